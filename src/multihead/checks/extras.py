"""Parts of attention other than projections: a norm of its inputs, a gate, sinks, ALiBi and a
key that every query may read.

Each is found by its name and its shape, and is taken for real only where the definition with it
gives the output.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn

from .callee import Callee
from .code_names import names_in_code
from .definition import Projected
from .projections import Assignment, Matrix

INPUT_NORMS = re.compile(r"(pre_?)?(layer_?|rms_?|input_?)*(norm|ln)(_?(1|x|in|input|q|query))?")
GATES = re.compile(r"(.*[._])?((to_)?gates?(ing)?(_?\w*)|(linear|w|to)_?g|g(_proj)?)")
SINKS = re.compile(r"(\w*_)?sinks?(_\w+)?|s_aux|(softmax_)?off_?by_?one")


@dataclass(frozen=True)
class Extras:
    """Parts of an attention other than its projections; None what it doesn't have.

    Attributes:
        norm: of the inputs, before the projections.
        gate: `[D, H]` or `[D, H * E]`, whose sigmoid multiplies the heads' outputs before W_O.
        sinks: `[H]`, scores that take a part of the weights and have no value.
        slopes: `[H]`, of ALiBi: added to the scores times the distance, which is negative.
        null: a key and a value, `[E]` or `[heads * E]`, that every query may read.
    """

    norm: nn.Module | None = None
    gate: Matrix | None = None
    sinks: Tensor | None = None
    slopes: Tensor | None = None
    null: tuple[Tensor, Tensor] | None = None

    @property
    def names(self) -> list[str]:
        words = {
            "norm": "a norm of its inputs",
            "gate": "a sigmoid gate",
            "sinks": "a sink for each head",
            "slopes": "ALiBi",
            "null": "a key that every query may read",
        }
        return [words[f.name] for f in fields(self) if getattr(self, f.name) is not None]


@dataclass(frozen=True)
class Extended(Assignment):
    """Projections, and the parts in addition to them."""

    extras: Extras

    @property
    def description(self) -> str:
        return f"{super().description}, with {' and '.join(self.extras.names)}"

    def project(self, module: object, x: Tensor, k: Tensor, v: Tensor, embed_dim: int) -> Projected:
        extras, is_self = self.extras, k is x
        if extras.norm is not None:
            x = copy.deepcopy(extras.norm).double()(x)
            k, v = (x, x) if is_self else (k, v)
        gate = None if extras.gate is None else extras.gate.double()(x).sigmoid()
        sinks = None if extras.sinks is None else extras.sinks.double()
        slopes = None if extras.slopes is None else extras.slopes.double()
        null = None if extras.null is None else (extras.null[0].double(), extras.null[1].double())
        projected = super().project(module, x, k, v, embed_dim)
        return replace(projected, gate=gate, sinks=sinks, slopes=slopes, null=null)


def extend(
    callee: Callee, options: Sequence[Assignment], matrices: Sequence[Matrix]
) -> Iterator[Assignment]:
    """The assignments again, with each combination of what is found, that with all of it first."""
    parts = _find_parts(callee, matrices)
    for count in range(len(parts), 0, -1):
        for some in itertools.combinations(parts.items(), count):
            extras = Extras(**dict(some))  # type: ignore[arg-type]
            for a in options:
                if type(a) is Assignment and extras.gate not in (a.q, a.k, a.v, a.o):
                    yield Extended(a.q, a.k, a.v, a.o, a.how, extras)


def _find_parts(callee: Callee, matrices: Sequence[Matrix]) -> dict[str, object]:
    parts: dict[str, object] = {}
    module, heads = callee.module, callee.num_heads
    if module is None:
        return parts
    for name, child in module.named_children():
        shapes = [p.shape for p in child.parameters()]
        has_width = shapes and all(tuple(shape) == (callee.embed_dim,) for shape in shapes)
        if INPUT_NORMS.fullmatch(name.lower()) and has_width:
            parts.setdefault("norm", child)
    for matrix in matrices:
        if GATES.fullmatch(matrix.name.lower()) and matrix.weight.shape[0] == callee.embed_dim:
            parts.setdefault("gate", matrix)
    for name, parameter in module.named_parameters():
        last = name.rpartition(".")[2].lower()
        if SINKS.fullmatch(last) and (heads is None or parameter.numel() == heads):
            parts.setdefault("sinks", parameter.detach().flatten())
    if (null := _find_null(module)) is not None:
        parts["null"] = null
    if heads and any(re.search("alibi|slopes", n, re.IGNORECASE) for n in names_in_code(module)):
        parts["slopes"] = _alibi_slopes(heads)
    return parts


def _find_null(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    """A learned key and value, or those of zeros that torch's layer adds."""
    found = {n: p.detach() for n, p in module.named_parameters(recurse=False)}
    for prefix in ("bias_", "null_", "mem_"):
        if found.keys() >= {f"{prefix}k", f"{prefix}v"}:
            return found[f"{prefix}k"].flatten(), found[f"{prefix}v"].flatten()
        both = found.get(f"{prefix}kv")
        if both is not None and len(both) == 2:
            return both[0].flatten(), both[1].flatten()
    if getattr(module, "add_zero_attn", False) is True:
        return torch.zeros(1), torch.zeros(1)
    return None


def find_mixers(module: nn.Module | None, heads: int) -> list[str]:
    """Names of matrices `[H, H]` that mix heads, as talking heads have (Shazeer et al., 2020)."""
    if module is None or heads == 1:
        return []
    shapes = ((heads, heads), (heads, heads, 1, 1))
    return [name for name, p in module.named_parameters() if tuple(p.shape) in shapes]


def _alibi_slopes(heads: int) -> Tensor:
    """2^(-8 i / n) for the next lower power of two n, then those between (Press et al., 2022)."""
    n = 1 << (heads.bit_length() - 1)
    first = [2 ** (-8 * i / n) for i in range(1, n + 1)]
    between = [2 ** (-4 * i / n) for i in range(1, 2 * n + 1, 2)]
    return torch.tensor((first + between)[:heads], dtype=torch.float64)
