"""Attention as it is defined, with a switch for each way in which people get it wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Spec:
    """What is computed. Up to `fill` it's a choice that anyone is free to make; each field below
    has one right value.
    """

    heads: int
    groups: int
    scale: float | None = None  # 1 / sqrt(E) where None
    softcap: float | None = None
    rotary: str | None = None  # "half" or "interleaved"
    theta: float = 10000.0
    first: int = 0  # position of the first token
    output: bool = True  # whether there is a W_O
    # what stands for hidden scores: "-inf", "-1e9" or "add -1e9"; seen only in rows that hide all
    fill: str = "-inf"

    scaling: str = "1/sqrt(E)"
    q_split: str = "transpose"
    k_split: str = "transpose"
    v_split: str = "transpose"
    merge: str = "transpose"
    axis: str = "keys"
    again: bool = False  # a second softmax, over heads
    masking: str = "before"
    grouping: str = "repeat"
    turned: str = "queries and keys"
    values: str = "own"
    applies_output: bool = True


@dataclass
class Projected:
    """Queries, keys and values `[B, L, heads * E]`, and the way out."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: tuple[Tensor, Tensor | None] | None  # W_O [H * Ev, D] and its bias
    q_norm: Any = None
    k_norm: Any = None
    width: int = 0  # D, for a scale of 1 / sqrt(D)


def compute(p: Projected, may: Tensor, spec: Spec) -> Tensor:
    """The output [B, L, D]; `may` is bool [L, S] or [B, L, S]."""
    values = p.k if spec.values == "keys" else p.v
    q = _norm(_split(p.q, spec.heads, spec.q_split), p.q_norm)
    k = _norm(_split(p.k, spec.groups, spec.k_split), p.k_norm)
    v = _split(values, spec.groups, spec.v_split)
    if spec.rotary:
        q = _turn(q, spec)
        k = k if spec.turned == "queries only" else _turn(k, spec)
        v = _turn(v, spec) if spec.turned == "values too" else v
    each = spec.heads // spec.groups
    if each > 1:
        k, v = (
            (t.repeat(1, each, 1, 1) if spec.grouping == "tile" else t.repeat_interleave(each, 1))
            for t in (k, v)
        )
    width = q.shape[-1]
    scale = {
        "1/sqrt(E)": width**-0.5 if spec.scale is None else spec.scale,
        "none": 1.0,
        "1/E": 1.0 / width,
        "1/sqrt(D)": p.width**-0.5,
        "sqrt(E)": width**0.5,
        "not as said": width**-0.5,
    }[spec.scaling]
    scores = scale * (q @ k.mT)
    may = _mask(may, spec.masking)
    may = may[:, None] if may.ndim == 3 else may
    if spec.masking == "before cap" and spec.softcap:
        scores = _cap(scores.masked_fill(~may, -torch.inf), spec.softcap)
    else:
        scores = _cap(scores, spec.softcap)
        if spec.masking == "zero":
            scores = scores * may
        elif spec.masking not in ("after", "ignored"):
            scores = (
                scores + torch.where(may, 0.0, -1e9)
                if spec.fill == "add -1e9"
                else scores.masked_fill(~may, -torch.inf if spec.fill == "-inf" else -1e9)
            )
    weights = scores.softmax({"keys": -1, "queries": -2, "heads": 1, "batch": 0}[spec.axis])
    if spec.masking == "after":
        weights = weights * may
    if spec.again:
        weights = weights.softmax(1)
    out = _merge(weights @ v, spec.merge)
    if p.out is None or not spec.output or not spec.applies_output:
        return out
    weight, bias = p.out
    return out @ weight if bias is None else out @ weight + bias


def _split(x: Tensor, heads: int, how: str) -> Tensor:
    batch, length, width = x.shape
    each = width // heads
    if how == "reshape":
        return x.reshape(batch, heads, length, each)
    if how == "strided":
        return x.reshape(batch, length, each, heads).permute(0, 3, 1, 2)
    if how == "overlap":
        return torch.stack([x[..., h : h + each] for h in range(heads)], 1)
    if how == "first":
        return x[:, None, :, :each].expand(-1, heads, -1, -1)
    return x.reshape(batch, length, heads, each).transpose(1, 2)


def _merge(x: Tensor, how: str) -> Tensor:
    batch, heads, length, each = x.shape
    if how == "reshape":
        return x.reshape(batch, length, heads * each)
    if how == "strided":
        return x.permute(0, 2, 3, 1).reshape(batch, length, heads * each)
    return x.transpose(1, 2).reshape(batch, length, heads * each)


def _norm(x: Tensor, norm: Any) -> Tensor:
    if norm is None:
        return x
    shape = getattr(norm, "normalized_shape", None) or getattr(norm, "weight", x[0, 0, 0]).shape
    if tuple(shape) == (x.shape[1] * x.shape[-1],):  # over all heads together
        return norm(x.transpose(1, 2).flatten(2)).unflatten(-1, (x.shape[1], -1)).transpose(1, 2)
    return norm(x)


def _cap(scores: Tensor, cap: float | None) -> Tensor:
    return cap * torch.tanh(scores / cap) if cap else scores


def _mask(may: Tensor, masking: str) -> Tensor:
    length, keys = may.shape[-2:]
    if masking == "inverted":
        return ~may
    if masking == "upper":  # also at itself
        return may.mT if length == keys else may
    eye = torch.eye(length, keys, dtype=torch.bool)
    if masking == "strict":
        return may & ~eye
    if masking == "ahead":
        return may | torch.eye(length, keys + 1, dtype=torch.bool)[:, :keys].roll(1, 1).tril(1)
    return may


def _turn(x: Tensor, spec: Spec) -> Tensor:
    width = x.shape[-1]
    at = torch.arange(spec.first, spec.first + x.shape[2], dtype=torch.float64)
    angle = torch.outer(
        at, spec.theta ** -(torch.arange(0, width - 1, 2, dtype=torch.float64) / width)
    )
    half = spec.rotary == "half"
    halves = half if spec.turned != "wrong pairing" else not half
    angle = torch.cat([angle, angle], -1) if halves else angle.repeat_interleave(2, -1)
    if half:
        a, b = x.chunk(2, -1)
        other = torch.cat([-b, a], -1)
    else:
        other = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * angle.cos() + other * angle.sin()
