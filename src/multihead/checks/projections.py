"""Reading W_Q, W_K, W_V and W_O off a module: by name where names tell, and else by shape, in every
way that could be.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..models.names import projection_role
from .calling import Subject


@dataclass(frozen=True)
class Map:
    """A matrix [in, out] that a module multiplies with, and its bias."""

    name: str
    weight: Tensor
    bias: Tensor | None = None
    heads: int | None = None  # where its shape says it
    who: str | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.weight if self.bias is None else x @ self.weight + self.bias

    def columns(self, index: Tensor, who: str) -> Map:
        return Map(
            self.name,
            self.weight[:, index],
            None if self.bias is None else self.bias[index],
            self.heads,
            who,
        )


@dataclass(frozen=True)
class Reading:
    """Which matrices are taken for which."""

    q: Map
    k: Map
    v: Map
    o: Map | None
    how: str  # in words, where it isn't by name

    @property
    def words(self) -> str:
        parts = {"W_Q": self.q, "W_K": self.k, "W_V": self.v, "W_O": self.o}
        return ", ".join(f"{n} is {m.name}" for n, m in parts.items() if m is not None) + (
            f" ({self.how})" if self.how else ""
        )


def read_maps(subject: Subject) -> list[Map]:
    """All matrices of a module, function or object, each as [in, out]."""
    if subject.module is None:
        return _given(subject)
    found: dict[str, Map] = {}
    for path, module in subject.module.named_modules():
        if type(module).__name__ == "Conv1D":
            found[path] = Map(path, module.weight, module.bias)
        elif isinstance(weight := getattr(module, "weight", None), Tensor) and hasattr(
            module, "in_features"
        ):
            if weight.ndim == 2:
                found[path] = Map(path, weight.T, getattr(module, "bias", None))
        elif isinstance(module, nn.Conv1d) and module.kernel_size == (1,):
            found[path] = Map(path, module.weight[..., 0].T, module.bias)
        elif not isinstance(module, nn.Embedding):
            own = {n: p.detach() for n, p in module.named_parameters(recurse=False)}
            for name, p in own.items():
                if p.ndim >= 2 and not re.search(r"bias|^b_?[qkvo]", name):
                    full = f"{path}.{name}".lstrip(".")
                    found[full] = _matrix(full, p, own, subject.width)
    return _joined(found)


def _given(subject: Subject) -> list[Map]:
    """Of a function, the matrices that were handed to it; of an object, its arrays."""
    if subject.weights:
        return [
            Map(
                subject.named(role) or role,
                w,
                subject.weights.get(role.replace("weight", "bias")),
                who=role.split()[0],
            )
            for role, w in subject.weights.items()
            if role.endswith("weight")
        ]
    owner = getattr(subject.function, "__self__", subject.function)
    arrays = {
        n: torch.as_tensor(a)
        for n, a in getattr(owner, "__dict__", {}).items()
        if isinstance(a, np.ndarray) and np.issubdtype(a.dtype, np.floating)
    }
    return _joined(
        {n: _matrix(n, a, arrays, subject.width) for n, a in arrays.items() if a.ndim >= 2}
    )


def _matrix(name: str, p: Tensor, others: dict[str, Tensor], width: int) -> Map:
    last = name.rpartition(".")[2]
    called = (
        last.replace("weight", "bias"),
        re.sub(r"^[wW]", "b", last),
        re.sub(r"^[wW]_?", "bias_", last),
        last.replace("kernel", "bias"),
        f"{last}_bias",
    )
    bias = next((others[b] for b in called if b != last and b in others), None)
    heads, who = None, role_of_path(name)
    if last in (
        "q_proj_weight",
        "k_proj_weight",
        "v_proj_weight",
        "in_proj_weight",
    ):  # torch's own, always for F.linear
        weight = p.T
        if "in_proj_bias" in others and last != "in_proj_weight":
            bias = others["in_proj_bias"].chunk(3)["qkv".index(last[0])]
    elif p.ndim == 2:
        weight = (
            p.T if last.endswith("weight") and p.shape[1] == width and p.shape[0] != width else p
        )
        if last.endswith("weight") and p.shape[0] == p.shape[1]:
            weight = p.T  # as F.linear has it; the other way is tried too
    elif p.ndim == 3:
        if who == "o":
            last_out = p.shape[2] == width or p.shape[0] != width  # [H, E, D], or else [D, H, E]
            weight = p.flatten(0, 1) if last_out else p.permute(1, 2, 0).flatten(0, 1)
            heads = p.shape[0] if last_out else p.shape[1]
        elif p.shape[0] == width:  # [D, H, E]
            weight, heads = p.flatten(1), p.shape[1]
        else:  # [H, D, E], [H, E, D]
            weight = (p.permute(1, 0, 2) if p.shape[1] == width else p.permute(2, 0, 1)).flatten(1)
            heads = p.shape[0]
    else:
        axis = next((a for a in range(p.ndim) if p.shape[a] == width), 0)
        weight = p.movedim(axis, 0).flatten(1)
    return Map(name, weight, None if bias is None else bias.flatten(), heads, who)


def _joined(found: dict[str, Map]) -> list[Map]:
    """Matrices of heads that are modules of their own, `heads.0.query` and so on, side by side as
    one.
    """
    groups: dict[str, list[Map]] = {}
    for name, m in found.items():
        groups.setdefault(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name), []).append(m)
    result = []
    for name, members in groups.items():
        if (
            len(members) == 1
            or "*" not in name
            or len({m.weight.shape for m in members}) > 1
            or (name.endswith("*") and not role_of_path(name))
        ):
            result += members
            continue
        bias = [m.bias for m in members if m.bias is not None]
        result.append(
            Map(
                name,
                torch.cat([m.weight for m in members], 1),
                torch.cat(bias) if len(bias) == len(members) else None,
                len(members),
            )
        )
    return [m if m.who else replace(m, who=role_of_path(m.name)) for m in result]


def role_of_path(path: str) -> str | None:
    parts = [
        p
        for p in re.sub(
            r"\.(weight|kernel)$|_weight$|_kernel$", "", path.lower().replace("/", ".")
        ).split(".")
        if not p.isdigit() and p not in ("*", "weight", "kernel")
    ]
    for part in reversed(parts):
        if (role := projection_role(part)) is not None:
            return "o" if role == "out" else role
    return None


def readings(subject: Subject, head_counts: Iterable[int]) -> Iterator[Reading]:
    """Every way in which its matrices could be queries, keys, values and output, the most plausible
    first.
    """
    maps = [m for m in read_maps(subject) if m.weight.is_floating_point()]
    named: dict[str, list[Map]] = {}
    for m in maps:
        named.setdefault(m.who or "?", []).append(m)
    one = {who: ms[0] for who, ms in named.items() if len(ms) == 1 and who != "?"}
    o = one.get("o")
    seen = False
    if {"q", "k", "v"} <= set(one):
        yield from _turned(Reading(one["q"], one["k"], one["v"], o, ""))
        seen = True
    if "q" in one and "kv" in one:
        for k, v, how in _pairs(one["kv"], head_counts):
            yield Reading(one["q"], k, v, o, how)
        seen = True
    if "qkv" in one:
        yield from _fused(one["qkv"], o, subject, head_counts)
        seen = True
    if seen and o is not None:
        return
    yield from _by_shape(maps, subject, head_counts)


def _turned(reading: Reading) -> Iterator[Reading]:
    """As read, and with all square parameters transposed, where a bare matrix doesn't say which way
    it multiplies.
    """
    yield reading
    bare = [m for m in (reading.q, reading.k, reading.v, reading.o) if m is not None]
    if all(m.weight.shape[0] == m.weight.shape[1] for m in bare):
        q, k, v, *o = (replace(m, weight=m.weight.T) for m in bare)
        yield Reading(q, k, v, o[0] if o else None, "transposed")


def _pairs(kv: Map, head_counts: Iterable[int]) -> Iterator[tuple[Map, Map, str]]:
    width = kv.weight.shape[1]
    for index, how in _layouts(width, 2, head_counts):
        for (a, b), order in (((0, 1), "k, v"), ((1, 0), "v, k")):
            yield kv.columns(index[a], "k"), kv.columns(index[b], "v"), f"fused as {order}{how}"


def _layouts(
    width: int, parts: int, head_counts: Iterable[int]
) -> Iterator[tuple[list[Tensor], str]]:
    """Columns of each part: in blocks, [H, parts, E], [H, E, parts], [E, parts, H]."""
    if width % parts:
        return
    at = torch.arange(width)
    yield list(at.view(parts, -1)), ""
    for heads in head_counts:
        if width % (parts * heads) == 0:
            yield (
                [at.view(heads, parts, -1)[:, n].flatten() for n in range(parts)],
                f", of each of {heads} heads in turn",
            )
            yield (
                [at.view(heads, -1, parts)[..., n].flatten() for n in range(parts)],
                f", number by number in {heads} heads",
            )
            yield (
                [at.view(-1, parts, heads)[:, n].T.flatten() for n in range(parts)],
                f", as [E, {parts}, {heads}]",
            )


def _fused(
    m: Map, o: Map | None, subject: Subject, head_counts: list[int] | Iterable[int]
) -> Iterator[Reading]:
    counts = list(head_counts)
    width = m.weight.shape[1]
    inner = o.weight.shape[0] if o is not None else subject.width
    if (width % 3 == 0 and width // 3 == inner) or o is None:
        for index, how in _layouts(width, 3, counts):
            for order in itertools.permutations("qkv"):
                part = {who: m.columns(index[n], who) for n, who in enumerate(order)}
                yield Reading(
                    part["q"], part["k"], part["v"], o, f"fused as {', '.join(order)}{how}"
                )
    elif width > inner and (width - inner) % 2 == 0:  # fewer key/value heads
        at, kv = torch.arange(width), (width - inner) // 2
        a, b, c = (m.columns(i, "fused") for i in at.split([inner, kv, kv]))
        yield Reading(a, b, c, o, "fused as q, k, v")
        yield Reading(a, c, b, o, "fused as q, v, k")
        for heads in counts:
            each = inner // heads
            if (
                each
                and kv % each == 0
                and heads % (groups := kv // each) == 0
                and inner % heads == 0
            ):
                grid = at.view(groups, heads // groups + 2, each)
                q, k, v = (
                    m.columns(i.flatten(), "fused")
                    for i in (grid[:, :-2], grid[:, -2], grid[:, -1])
                )
                yield Reading(q, k, v, o, f"fused as q, k, v, of each of {groups} groups in turn")


def _by_shape(maps: list[Map], subject: Subject, head_counts: Iterable[int]) -> Iterator[Reading]:
    """Names don't tell. Matrices that take the inputs are q, k, v in some order, one that takes
    what they give is W_O.
    """
    counts = list(head_counts)
    takes = [m for m in maps if m.weight.shape[0] == subject.width][:6]
    fits = 0
    for who, count in (("three", 3), ("one", 1)):
        for chosen in itertools.permutations(takes, count):
            rest = [m for m in maps if all(m is not c for c in chosen)]
            if who == "one":
                width = chosen[0].weight.shape[1]
                outs: list[Map | None] = [m for m in rest if m.weight.shape[0] < width]
                for out in outs[:2] or [None]:
                    yield from _fused(chosen[0], out, subject, counts)
                continue
            q, k, v = chosen
            if k.weight.shape != v.weight.shape:
                continue
            others: list[Map | None] = [m for m in rest if m.weight.shape[0] == q.weight.shape[1]]
            for out in others[:2] or [None]:
                fits += 1
                if fits <= 60:
                    yield from _turned(Reading(q, k, v, out, "by shape"))


def divisors(subject: Subject, stated: int | None, maps: list[Map]) -> list[int]:
    """How many heads there may be: as stated, or as shapes have it, or each divisor of the
    width.
    """
    if stated:
        return [stated]
    shaped = {m.heads for m in maps if m.heads}
    if shaped:
        return sorted(shaped, reverse=True)
    width = subject.width
    return [n for n in range(1, min(width, 64) + 1) if width % n == 0]


def norms(module: Any) -> tuple[Any, Any]:
    """Norms of queries and keys, where names tell."""

    def find(names: tuple[str, ...]) -> Any:
        return next(
            (
                m
                for n in names
                if isinstance(m := getattr(module, n, None), nn.Module)
                and not isinstance(m, nn.Identity)
            ),
            None,
        )

    return find(("q_norm", "norm_q", "q_ln", "q_layernorm", "query_norm")), find(
        ("k_norm", "norm_k", "k_ln", "k_layernorm", "key_norm")
    )
