"""`CostTotals`: sums of the formulas over all attention modules of a model, and what they would be
with other heads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple, Self

from .shape import DTYPES, Arithmetic, Shape, divisors
from .states import State

COMPUTED = ("float64", "float32", "bfloat16", "float16")  # others are dtypes of the cache alone


class Weights(NamedTuple):
    """The numbers of parameters of a whole model, and their bytes.

    `vectors` are parameters outside attention with one dimension, which every device holds.
    """

    parameters: int
    attention: int
    vectors: int
    bytes: int | None  # None: not known, as no file here has their size
    unknown: str = ""  # why they aren't


@dataclass(frozen=True)
class CostTotals:
    """The cost of a model's attention for sequences of one length."""

    name: str
    shapes: tuple[Shape, ...]  # of each attention module
    context_length: int
    source_length: int  # tokens of an encoder's sequence
    batch_size: int
    dtype: str
    weights: Weights  # of the whole model
    max_positions: int | None = None  # tokens that the config allows
    notes: tuple[str, ...] = ()
    # Of the modules that keep a state of constant size instead of keys and values.
    states: tuple[State, ...] = ()

    @property
    def parameters(self) -> dict[str, int]:
        """Parameters by projection, over all layers; those of layers that keep a state by the kind
        of layer.
        """
        counts: Counter[str] = Counter()
        for shape in self.shapes:
            counts.update(shape.parameters)
        for state in self.states:
            counts.update({state.kind: state.parameters} if state.parameters else {})
        return dict(counts)

    def prefill(self, *, full: bool = False) -> Arithmetic:
        """Operations of a pass over the batch, for the pairs that masks allow, or for all of them
        (as eager attention computes).
        """
        length = self.context_length
        return self._sum(lambda s: s.prefill(length, self.source_length, full=full), length)

    def decode(self, *, expanded: bool = False) -> Arithmetic:
        """Operations of one token after `context_length` cached ones; `expanded`: as transformers
        computes it with a latent.
        """
        length = self.context_length
        return self._sum(lambda s: s.decode(length, self.source_length, expanded=expanded), 1)

    def cache(self, storage: str = "theory") -> int:
        """Bytes of the cache after `context_length` tokens: in "theory", as "transformers" stores
        it, or as a "paged" server does; the states of constant size included.
        """
        growing = sum(
            s.cache(self.dtype, self.context_length, self.source_length, storage=storage)
            for s in self.shapes
        )
        return self.batch_size * (growing + self.cache_per_sequence)

    @property
    def cache_per_token(self) -> int:
        """Bytes that a token adds to the cache of one sequence, before any window is full."""
        return sum(s.cache(self.dtype, 1) for s in self.shapes if not s.cross)

    @property
    def cache_per_sequence(self) -> int:
        """Bytes of the states of one sequence, whatever its length."""
        return sum(state.cache(self.dtype) for state in self.states)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes that the largest layer needs during a pass, and all layers together where they are
        kept for the backward pass.
        """
        lengths = self.context_length, self.source_length
        number = DTYPES[self.dtype if self.dtype in COMPUTED else "bfloat16"][0]
        queries = [s.num_heads * s.lengths(*lengths)[0] for s in self.shapes]
        pairs = [s.num_heads * math.prod(s.lengths(*lengths)) for s in self.shapes]
        activations = [s.activations(*lengths) for s in self.shapes]
        sizes = {}
        for name, counts, size in (
            ("probabilities", pairs, number),
            ("streamed", queries, max(4, number)),
            ("activations", activations, number),
        ):
            calls = sum(n * s.calls for n, s in zip(counts, self.shapes, strict=True))
            sizes[name] = self.batch_size * size * max(counts, default=0)
            sizes[f"{name}, all layers"] = self.batch_size * size * calls
        return sizes

    def alternatives(self) -> list[tuple[str, Self]]:
        """The same widths with other heads: MHA, every group size, a latent, and other numbers of
        heads.
        """
        if not self.shapes:
            return []
        common = math.gcd(*(s.num_heads for s in self.shapes))
        same = len({s.num_heads for s in self.shapes}) == 1
        ways: list[tuple[str, Callable[[Shape], Shape]]] = []
        for size in divisors(common):
            name = "MHA" if size == 1 else "MQA" if same and size == common else "GQA"
            ways.append((name, lambda s, size=size: s.with_group_size(size)))  # type: ignore[misc]
        if all(s.value_dim % 4 == 0 for s in self.shapes):
            ways.append(("MLA", Shape.with_latent))
        factor = next((n for n in divisors(common)[1:]), None)
        if factor:
            ways.append(("MHA, fewer heads", lambda s: s.with_num_heads(s.num_heads // factor)))
        if all(s.value_dim % 2 == 0 for s in self.shapes):
            ways.append(("MHA, more heads", lambda s: s.with_num_heads(s.num_heads * 2)))
        return [(name, replace(self, shapes=tuple(map(way, self.shapes)))) for name, way in ways]

    def at_length(self, context_length: int) -> Self:
        """The same for another sequence length."""
        source = self.source_length
        source = context_length if source == self.context_length else source
        return replace(self, context_length=context_length, source_length=source)

    def on_device(self, devices: int) -> Self:
        """The part of one device of tensor parallelism."""
        return replace(
            self,
            shapes=tuple(shape.on_device(devices) for shape in self.shapes),
            states=tuple(state.on_device(devices) for state in self.states),
        )

    def kinds(self) -> list[tuple[str, int, Shape]]:
        """Modules of one shape together: their labels, their number, and the shape."""
        groups: dict[Shape, list[str]] = {}
        for shape in self.shapes:
            groups.setdefault(replace(shape, label="", name=""), []).append(shape.label)
        return [(_join_ranges(labels), len(labels), shape) for shape, labels in groups.items()]

    def state_kinds(self) -> list[tuple[str, int, State]]:
        """Modules with states of one size together, as `kinds`."""
        groups: dict[State, list[str]] = {}
        for state in self.states:
            groups.setdefault(replace(state, label="", name=""), []).append(state.label)
        return [(_join_ranges(labels), len(labels), state) for state, labels in groups.items()]

    def _sum(self, operations: Callable[[Shape], Arithmetic], tokens: int) -> Arithmetic:
        parts = [*map(operations, self.shapes), *(s.prefill(tokens) for s in self.states)]
        total = reduce(Arithmetic.plus, parts, Arithmetic(0, 0, 0))
        return Arithmetic(*(self.batch_size * part for part in total))


def _join_ranges(labels: list[str]) -> str:
    """
    >>> _join_ranges(["L0", "L1", "L2", "L4", "encoder.L0"])
    'L0-L2 L4 encoder.L0'
    """
    runs: list[list[str]] = []
    last: tuple[str, int, str] | None = None
    for label in labels:
        head, _, tail = label.rpartition("L")
        digits = tail.partition(".")[0]
        here = (head, int(digits), tail[len(digits) :]) if digits.isdigit() else None
        if here and last and here == (last[0], last[1] + 1, last[2]):
            runs[-1].append(label)
        else:
            runs.append([label])
        last = here
    return " ".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
