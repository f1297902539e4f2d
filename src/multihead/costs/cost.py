"""What the attention of a model costs, and what it would cost with other heads."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MultiheadError
from ..io import write_text
from .shape import DTYPES, Arithmetic, Shape, divisors, require_even

if TYPE_CHECKING:  # see models/loading.py
    from torch import nn
    from transformers import PretrainedConfig

CONTEXT = 4096  # tokens, where none are given and the model takes as many
FLOATS = ("float64", "float32", "bfloat16", "float16")


def cost(
    model: nn.Module | PretrainedConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    d_model: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    layers: int | None = None,
    context: int | None = None,
    batch: int = 1,
    dtype: str | None = None,
    window: int | None = None,
) -> Cost:
    """Parameters, arithmetic, memory and cache of a model's attention, exactly, from its settings
    alone.

    A model is built from its config on torch's meta device, so nothing is allocated, no weights are
    read, and what is counted is what transformers would run. In encoder-decoders the source is as
    long as the config's `max_source_positions`, else as `context`.

    Args:
        model: a folder or config.json, a GGUF file, a hub name, a config (or a dict of one), or a
            model. Without it and without `d_model`: the built-in model.
        d_model, heads, kv_heads, head_dim, layers: instead of a model, causal attention of such
            numbers: `kv_heads` as many as `heads`, `head_dim` d_model / heads and `layers` 1 unless
            given.
        context: tokens of a text, and in the cache; 4,096 unless given, or as many as the model
            takes, if fewer.
        batch: texts at a time.
        dtype: of numbers, cached ones too: one of "float32", "bfloat16", "float16", ..., "float8";
            or of the cache alone, with
            bfloat16 elsewhere: "int8", "int4", "int2" as transformers quantises, "q8_0" ... "q4_0"
                as llama.cpp does. The
            config's own unless given, and bfloat16 where it has none.
        window: lets every causal layer read so many keys at most, itself included.

    Raises:
        FileNotFoundError: a path that isn't there, a folder without config.json.
        ValueError: sizes that don't fit, an unknown dtype, a config that says too little, a model
            that isn't known.

    >>> found = cost(d_model=4096, heads=32, kv_heads=8, layers=32, context=8192)
    >>> found.parameters, found.cache_per_token, found.cache() == 8192 * found.cache_per_token
    ({'query': 536870912, 'key': 134217728, 'value': 134217728, 'output': 536870912}, 131072, True)
    """
    for name, value in (
        ("d_model", d_model),
        ("heads", heads),
        ("kv_heads", kv_heads),
        ("head_dim", head_dim),
        ("layers", layers),
        ("context", context),
        ("batch", batch),
        ("window", window),
    ):
        if value is not None and (
            not isinstance(value, int) or isinstance(value, bool) or value < 1
        ):
            raise MultiheadError(f"{name}={value!r}: expected a whole number from 1 on")
    if dtype is not None and dtype not in DTYPES:
        raise MultiheadError(f"dtype={dtype!r}: expected one of {', '.join(DTYPES)}")
    given = {
        "d_model": d_model,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "layers": layers,
    }
    notes: list[str] = []
    limit = source = None
    if d_model is None and any(value is not None for value in given.values()):
        name = next(name for name, value in given.items() if value is not None)
        raise MultiheadError(
            f"{name}={given[name]}: goes with d_model (--embed-dim), the width of the model, not with"
            " a model, which has its own"
        )
    if d_model is not None:
        if model is not None:
            raise MultiheadError(
                f"model={str(model)!r} and d_model={d_model}: give one of them, a model or its"
                " numbers"
            )
        name, shapes = _by_hand(d_model, heads, kv_heads, head_dim, layers or 1)
    else:
        from .from_model import shapes_of
        from .sources import max_lengths, open_source

        name, opened, config = open_source(model)
        shapes, notes = shapes_of(opened, config)
        limit, source = max_lengths(config)
        stored = str(getattr(config, "dtype", None)).removeprefix("torch.")
        dtype = dtype or (stored if stored in DTYPES else None)
    if window is not None:
        shapes = [
            replace(s, window=min(window, s.window or window)) if s.causal and not s.chunked else s
            for s in shapes
        ]
    if context is not None and limit is not None and context > limit:
        notes.append(f"the config speaks of {limit:,} positions, fewer than the context")
    context = context or min(CONTEXT, limit or CONTEXT)
    if source is not None:
        notes.append(f"the encoder's source is {source:,} tokens long")
    return Cost(
        name, tuple(shapes), context, source or context, batch, dtype or "bfloat16", tuple(notes)
    )


def _by_hand(
    width: int, heads: int | None, kv_heads: int | None, head_dim: int | None, layers: int
) -> tuple[str, list[Shape]]:
    if heads is None:
        raise MultiheadError(f"d_model={width}: give the number of heads too (--num-heads)")
    if head_dim is None and width % heads:
        raise MultiheadError(
            f"d_model={width}, heads={heads}: {heads} heads don't divide {width}; give a number"
            " that does, or the width of a head (--head-dim)"
        )
    wide = head_dim or width // heads
    shape = Shape(width, heads, kv_heads or heads, wide, wide)
    require_even(heads, shape.kv_heads)
    return "attention", [replace(shape, label=f"L{n}") for n in range(layers)]


@dataclass(frozen=True)
class Cost:
    """The cost of a model's attention for texts of a length. `print` shows it, `to_dict` and `save`
    give all of it.
    """

    name: str
    shapes: tuple[Shape, ...]  # of each attention module
    context: int
    source: int  # tokens of an encoder's text
    batch: int
    dtype: str
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> dict[str, int]:
        """By projection, over all layers."""
        found: dict[str, int] = {}
        for shape in self.shapes:
            for part, number in shape.parameters.items():
                found[part] = found.get(part, 0) + number
        return found

    def prefill(self, *, full: bool = False) -> Arithmetic:
        """Operations of a pass over the batch: of the pairs that masks allow, or of all (what eager
        attention computes).
        """
        return self._sum(lambda s: s.prefill(self.context, self.source, full=full))

    def decode(self, *, expanded: bool = False) -> Arithmetic:
        """Operations of one more token behind `context` cached ones. `expanded`: as transformers
        does it with a latent.
        """
        return self._sum(lambda s: s.decode(self.context, self.source, expanded=expanded))

    def cache(self, kept: str = "theory") -> int:
        """Bytes of the cache behind `context` tokens: in "theory", as "transformers" keeps it, or
        as a "paged" server does.
        """
        return self.batch * sum(
            s.cache(self.dtype, self.context, self.source, kept=kept) for s in self.shapes
        )

    @property
    def cache_per_token(self) -> int:
        """Bytes that a token adds to one text's cache, before any window is full."""
        return sum(s.cache(self.dtype, 1) for s in self.shapes if not s.cross)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes that the largest layer takes on the way, and all layers together where they are
        kept for a backward pass.
        """
        number = DTYPES[self._computed][0]
        pairs = [s.heads * math.prod(s.lengths(self.context, self.source)) for s in self.shapes]
        rows = [s.heads * s.lengths(self.context, self.source)[0] for s in self.shapes]
        made = [s.activations(self.context, self.source) for s in self.shapes]
        found = {}
        for name, numbers, each in (
            ("probabilities", pairs, number),
            ("streamed", rows, max(4, number)),
            ("activations", made, number),
        ):
            found[name] = self.batch * each * max(numbers)
            found[f"{name}, all layers"] = (
                self.batch
                * each
                * sum(n * s.calls for n, s in zip(numbers, self.shapes, strict=True))
            )
        return found

    def alternatives(self) -> list[tuple[str, Cost]]:
        """The same widths with other heads: plain, every way to share keys and values, a latent,
        and other numbers of heads.
        """
        common = math.gcd(*(s.heads for s in self.shapes))
        ways: list[tuple[str, Callable[[Shape], Shape]]] = []
        for share in divisors(common):
            same = len({s.heads for s in self.shapes}) == 1
            name = "MHA" if share == 1 else "MQA" if same and share == common else "GQA"
            ways.append((name, lambda s, share=share: s.grouped(share)))  # type: ignore[misc]
        if all(s.value_dim % 4 == 0 for s in self.shapes):
            ways.append(("MLA", Shape.latents))
        factor = next((n for n in divisors(common)[1:]), None)
        if factor:
            ways.append(("MHA, fewer heads", lambda s: s.split(s.heads // factor)))
        if all(s.value_dim % 2 == 0 for s in self.shapes):
            ways.append(("MHA, more heads", lambda s: s.split(s.heads * 2)))
        return [(name, replace(self, shapes=tuple(map(way, self.shapes)))) for name, way in ways]

    def at(self, context: int) -> Cost:
        """The same at another length."""
        return replace(
            self, context=context, source=context if self.source == self.context else self.source
        )

    def kinds(self) -> list[tuple[str, int, Shape]]:
        """Layers of one shape together: their labels, how many, and the shape."""
        groups: dict[Shape, list[str]] = {}
        for shape in self.shapes:
            groups.setdefault(replace(shape, label="", name=""), []).append(shape.label)
        return [(_ranges(labels), len(labels), shape) for shape, labels in groups.items()]

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain numbers: bytes, operations, and a dict for each layer."""

        def arithmetic(found: Arithmetic) -> dict[str, int]:
            return {**found._asdict(), "total": found.total}

        def one(what: Cost) -> dict[str, Any]:
            return {
                "parameters": {**what.parameters, "total": sum(what.parameters.values())},
                "prefill": arithmetic(what.prefill()),
                "prefill_full": arithmetic(what.prefill(full=True)),
                "decode": arithmetic(what.decode()),
                "decode_transformers": arithmetic(what.decode(expanded=True)),
                "memory": what.memory,
                "cache_per_token": what.cache_per_token,
                "cache": {kept: what.cache(kept) for kept in ("theory", "transformers", "paged")},
            }

        def layer(shape: Shape) -> dict[str, Any]:
            fields = (
                "label",
                "name",
                "width",
                "heads",
                "kv_heads",
                "head_dim",
                "value_dim",
                "latent",
                "rope",
                "query_latent",
                "causal",
                "window",
                "chunked",
                "cross",
                "cached",
                "own_keys",
                "calls",
            )
            return {
                **{field: getattr(shape, field) for field in fields},
                **one(replace(self, shapes=(shape,))),
            }

        return {
            "model": self.name,
            "context": self.context,
            "source": self.source,
            "batch": self.batch,
            "dtype": self.dtype,
            "notes": list(self.notes),
            **one(self),
            "layers": [layer(shape) for shape in self.shapes],
            "alternatives": [
                {"attention": name, "heads": heads_of(*it.shapes), **one(it)}
                for name, it in self.alternatives()
            ],
        }

    def save(self, path: str | Path) -> None:
        """Write `to_dict` as JSON."""
        write_text(path, json.dumps(self.to_dict(), indent=1) + "\n")

    def plot(self, path: str | Path) -> None:
        """Draws cache and arithmetic against context, as it is and with other heads. Needs
        matplotlib ('multihead[plot]').
        """
        from .show import plot

        plot(self, Path(path))

    def __str__(self) -> str:
        from .show import text

        return text(self)

    @property
    def _computed(self) -> str:
        return self.dtype if self.dtype in FLOATS else "bfloat16"

    def _sum(self, of: Callable[[Shape], Arithmetic]) -> Arithmetic:
        total = reduce(Arithmetic.plus, map(of, self.shapes), Arithmetic(0, 0, 0))
        return Arithmetic(*(self.batch * part for part in total))


def heads_of(*shapes: Shape) -> str:
    """Query heads, key/value heads where fewer, and width: "32/8 x 128"; several where layers
    differ.
    """
    kinds: dict[str, None] = {}
    for s in shapes:
        shared = f"/{s.kv_heads}" if s.kv_heads != s.heads else ""
        wide = f"{s.head_dim}" if s.head_dim == s.value_dim else f"{s.head_dim}+{s.value_dim}"
        kinds[f"{s.heads}{shared} x {wide}"] = None
    shown = list(kinds)
    return ", ".join(shown) if len(shown) < 3 else f"{shown[0]} and {len(shown) - 1} more"


def _ranges(labels: list[str]) -> str:
    """
    >>> _ranges(["L0", "L1", "L2", "L4", "encoder.L0"])
    'L0-L2 L4 encoder.L0'
    """
    runs: list[list[str]] = []
    last: tuple[str, int, str] | None = None
    for label in labels:
        head, _, tail = label.rpartition("L")
        digits = tail.partition(".")[0]
        here = (head, int(digits), tail[len(digits) :]) if digits.isdigit() else None
        if here and last and (here[0], here[1], here[2]) == (last[0], last[1] + 1, last[2]):
            runs[-1].append(label)
        else:
            runs.append([label])
        last = here
    return " ".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
