"""Attention by its definition, in steps that a known bug can replace.

`Definition` holds the choices that anyone is free to make (number of heads, scale, soft cap, rotary
positions) and the steps, each of which has one correct form: the field's default. A bug
(`bugs.Bug`) is a replacement of one or several steps, so `compute` also gives the output that an
implementation with that bug has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Latents:
    """The latents of latent attention (MLA), before their norms, and what is made of them.

    With R `rotary_dim` and widths E of a head without its rotary part.

    Attributes:
        queries: `[B, L, Cq]`; the inputs themselves where queries have no latent.
        keys: `[B, S, C]`, of keys and values.
        rotary: `[B, S, R]`, the rotary key that all heads share.
        up_q, up_k, up_v: from a latent to `[B, L, H * (E + R)]`, `[B, S, H * E]` and
            `[B, S, H * Ev]`.
        q_norm, kv_norm: norms of the latents; None without.
    """

    queries: Tensor
    keys: Tensor
    rotary: Tensor
    up_q: Callable[[Tensor], Tensor]
    up_k: Callable[[Tensor], Tensor]
    up_v: Callable[[Tensor], Tensor]
    q_norm: Any = None
    kv_norm: Any = None


@dataclass
class Projected:
    """Queries, keys and values `[B, L, heads * E]`, or latents of which they are made; the output
    projection and the norms; a gate `[B, L, H]` or `[B, L, H * E]` of the heads' outputs, sinks
    `[H]`, slopes of ALiBi `[H]`, and a key and a value `[E]` or `[heads * E]` that every query may
    read.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: tuple[Tensor, Tensor | None] | None  # W_O [H * Ev, D] and its bias
    q_norm: Any = None
    k_norm: Any = None
    embed_dim: int = 0
    latents: Latents | None = None
    gate: Tensor | None = None
    sinks: Tensor | None = None
    slopes: Tensor | None = None
    null: tuple[Tensor, Tensor] | None = None


# ---- The correct steps. [B, L, H * E] -> [B, H, L, E], and back.


def split_by_transpose(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_by_transpose(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def repeat_each(x: Tensor, times: int) -> Tensor:
    return x.repeat_interleave(times, 1)


def scale_by_head_dim(head_dim: int, embed_dim: int, definition: Definition) -> float:
    return head_dim**-0.5 if definition.scale is None else definition.scale


def cap_scores(scores: Tensor, softcap: float | None) -> Tensor:
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def mask_scores(scores: Tensor, allowed: Tensor, definition: Definition) -> Tensor:
    scores = cap_scores(scores, definition.softcap)
    if definition.fill == "add -1e9":
        return scores + torch.where(allowed, 0.0, -1e9)
    return scores.masked_fill(~allowed, -torch.inf if definition.fill == "-inf" else -1e9)


def softmax_over_keys(scores: Tensor) -> Tensor:
    return scores.softmax(-1)


def rotate_queries_keys(
    q: Tensor, k: Tensor, v: Tensor, definition: Definition
) -> tuple[Tensor, ...]:
    return rotate_pairs(q, definition), rotate_pairs(k, definition), v


def expand_latents(latents: Latents, d: Definition) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values `[B, L, heads * E]`; the rotary key is repeated for each head."""
    queries = latents.queries if latents.q_norm is None else latents.q_norm(latents.queries)
    keys = latents.keys if latents.kv_norm is None else latents.kv_norm(latents.keys)
    return latents.up_q(queries), join_rotary(latents.up_k(keys), latents, d), latents.up_v(keys)


def join_rotary(k: Tensor, latents: Latents, d: Definition) -> Tensor:
    """Append (or prepend) the shared rotary key to the keys `[B, S, H * E]` of all heads."""
    by_head = k.unflatten(-1, (d.num_heads, -1))
    shared = latents.rotary[..., None, :].expand(-1, -1, d.num_heads, -1)
    parts = [shared, by_head] if d.rotary_first else [by_head, shared]
    return torch.cat(parts, -1).flatten(-2)


def rotate_pairs(x: Tensor, definition: Definition, *, halves: bool | None = None) -> Tensor:
    """Rotate the pairs of `x [B, H, L, E]`, or of its rotary part; `halves` is the layout of the
    angles.
    """
    width = definition.rotary_dim
    if width is None:
        return _rotate(x, definition, halves)
    if definition.rotary_first:
        return torch.cat([_rotate(x[..., :width], definition, halves), x[..., width:]], -1)
    rest = x.shape[-1] - width
    return torch.cat([x[..., :rest], _rotate(x[..., rest:], definition, halves)], -1)


def _rotate(x: Tensor, definition: Definition, halves: bool | None) -> Tensor:
    head_dim, half = x.shape[-1], definition.rotary == "half"
    positions = torch.arange(x.shape[2], dtype=torch.float64)
    pairs = torch.arange(0, head_dim - 1, 2, dtype=torch.float64)
    angle = torch.outer(positions, definition.theta ** -(pairs / head_dim))
    angle = (
        torch.cat([angle, angle], -1)
        if (half if halves is None else halves)
        else angle.repeat_interleave(2, -1)
    )
    if half:
        first, second = x.chunk(2, -1)
        partner = torch.cat([-second, first], -1)
    else:
        partner = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * angle.cos() + partner * angle.sin()


@dataclass(frozen=True)
class Masking:
    """Effect of a mask: on itself, on the scores before the softmax, on the weights after it.

    Attributes:
        rule: the mask that is applied, from the right one (bool `[.., L, S]`, True = read).
        hide: scores `[B, H, L, S]` after soft cap and mask.
        reweight: weights `[B, H, L, S]` after the softmax; None leaves them.
        empties_rows: whether queries are left without a key, so that the number written to hidden
            scores shows in the output.
    """

    rule: Callable[[Tensor], Tensor] | None = None
    hide: Callable[[Tensor, Tensor, Definition], Tensor] = mask_scores
    reweight: Callable[[Tensor, Tensor], Tensor] | None = None
    empties_rows: bool = False


@dataclass(frozen=True)
class Definition:
    """Free choices first, then the steps, whose defaults are the correct ones.

    Attributes:
        num_heads, num_kv_heads: H and G.
        scale: 1 / sqrt(E) if None.
        softcap: soft cap of the scores, or None.
        rotary: pairing of rotary positions, "half" or "interleaved"; None without.
        theta: base of the rotary angles.
        rotary_dim: width of the rotary part of a head; None for all of it.
        rotary_first: whether that is the first part of a head, not the last.
        latents: names of latents (MLA) that have a norm, among "q" and "kv"; None without latents.
        output: whether there is a W_O.
        fill: value of hidden scores, "-inf", "-1e9" or "add -1e9"; shows only in queries that may
            read no key.

    The steps, by name: `expand` (`Latents`, definition -> queries, keys and values of latents),
    `split_q`, `split_k` and `split_v` (`[B, L, H*E]`, heads -> `[B, H, L, E]`), `rotate` (q, k, v,
    definition -> q, k, v), `repeat_kv` (`[B, G, L, E]`, times), `scaling` (E, D, definition ->
    factor), `masking` (a `Masking`), `softmax` (scores `[B, H, L, S]` -> weights), `reweight`
    (weights -> weights), `merge` (`[B, H, L, E]` -> `[B, L, H*E]`), `order`,
    `scored` and `applies_output`.

    >>> x = torch.randn(1, 3, 8)
    >>> allowed = torch.ones(3, 3).bool()
    >>> two_heads = Definition(num_heads=2, num_kv_heads=2, output=False)
    >>> compute_definition(Projected(x, x, x, None), allowed, two_heads).shape
    torch.Size([1, 3, 8])
    """

    num_heads: int
    num_kv_heads: int
    scale: float | None = None
    softcap: float | None = None
    rotary: str | None = None
    theta: float = 10000.0
    rotary_dim: int | None = None
    rotary_first: bool = False
    latents: tuple[str, ...] | None = None
    output: bool = True
    fill: str = "-inf"

    expand: Callable[[Latents, Definition], tuple[Tensor, Tensor, Tensor]] = expand_latents
    split_q: Callable[[Tensor, int], Tensor] = split_by_transpose
    split_k: Callable[[Tensor, int], Tensor] = split_by_transpose
    split_v: Callable[[Tensor, int], Tensor] = split_by_transpose
    rotate: Callable[[Tensor, Tensor, Tensor, Definition], tuple[Tensor, ...]] = rotate_queries_keys
    repeat_kv: Callable[[Tensor, int], Tensor] = repeat_each
    scaling: Callable[[int, int, Definition], float] = scale_by_head_dim
    masking: Masking = field(default_factory=Masking)
    softmax: Callable[[Tensor], Tensor] = softmax_over_keys
    reweight: Callable[[Tensor], Tensor] | None = None
    merge: Callable[[Tensor], Tensor] = merge_by_transpose
    order: str = "qkv"  # the projections that queries, keys and values are read from
    scored: str = "qk"  # those whose products are the scores, "qk", "qq" or "kk"
    applies_output: bool = True


def compute_definition(inputs: Projected, allowed: Tensor, definition: Definition) -> Tensor:
    """The output `[B, L, D]`; `allowed` is bool `[L, S]` or `[B, L, S]`, True = may read."""
    d = definition
    _, out = compute_heads(inputs, allowed, d)
    if inputs.gate is not None:
        out = out * inputs.gate.repeat_interleave(out.shape[-1] // inputs.gate.shape[-1], -1)
    if inputs.out is None or not d.output or not d.applies_output:
        return out
    weight, bias = inputs.out
    return out @ weight if bias is None else out @ weight + bias


def compute_heads(inputs: Projected, allowed: Tensor, d: Definition) -> tuple[Tensor, Tensor]:
    """The weights `[B, H, L, S]` and the merged heads `[B, L, H * Ev]`, before a gate and W_O."""
    q, k, v = inputs.q, inputs.k, inputs.v
    if inputs.latents is not None:
        q, k, v = d.expand(inputs.latents, d)
    q, k, v = ({"q": q, "k": k, "v": v}[which] for which in d.order)
    q = normalize(d.split_q(q, d.num_heads), inputs.q_norm)
    v = d.split_v(v, d.num_kv_heads)
    k = normalize(d.split_k(k, d.num_kv_heads), inputs.k_norm)
    q, k = (k, k) if d.scored == "kk" else (q, q if d.scored == "qq" else k)
    if d.rotary:
        q, k, v = d.rotate(q, k, v, d)
    if (times := d.num_heads // d.num_kv_heads) > 1:
        k, v = d.repeat_kv(k, times), d.repeat_kv(v, times)
    scale = d.scaling(q.shape[-1], inputs.embed_dim, d)
    scores = scale * (q @ k.mT)
    if inputs.slopes is not None:
        scores = scores + _alibi(scores, inputs.slopes)
    if d.masking.rule is not None:
        allowed = d.masking.rule(allowed)
    allowed = allowed[:, None] if allowed.ndim == 3 else allowed
    scores = d.masking.hide(scores, allowed, d)
    further = []
    if inputs.null is not None:
        null_k, null_v = (_by_head(t, d, x) for t, x in zip(inputs.null, (k, v), strict=True))
        further.append(scale * (q * null_k).sum(-1, keepdim=True))
    if inputs.sinks is not None:
        further.append(inputs.sinks[:, None, None].expand(*scores.shape[:-1], 1))
    weights = d.softmax(torch.cat([scores, *further], -1) if further else scores)
    weights, rest = weights.split([scores.shape[-1], len(further)], -1)
    if d.masking.reweight is not None:
        weights = d.masking.reweight(weights, allowed)
    if d.reweight is not None:
        weights = d.reweight(weights)
    read = weights @ v
    return weights, d.merge(read if inputs.null is None else read + rest[..., :1] * null_v)


def _by_head(null: Tensor, d: Definition, x: Tensor) -> Tensor:
    """A key or value for all heads, groups or heads, as `[H, 1, E]`; E is that of `x`."""
    rows = null.expand(x.shape[-1]) if null.numel() == 1 else null
    rows = rows.reshape(-1, x.shape[-1])
    return rows.repeat_interleave(d.num_heads // len(rows), 0)[:, None]


def _alibi(scores: Tensor, slopes: Tensor) -> Tensor:
    """`[H, L, S]`: minus the distance of a key, times the slope of the head."""
    queries, keys = (torch.arange(n, dtype=torch.float64) for n in scores.shape[-2:])
    queries = queries + (len(keys) - len(queries))
    return -slopes[:, None, None] * (queries[:, None] - keys).abs()


def normalize(x: Tensor, norm: Any) -> Tensor:
    """Heads `[B, H, L, E]` after their norm: one for each, or over all of them; None without."""
    if norm is None:
        return x
    shape = getattr(norm, "normalized_shape", None) or getattr(norm, "weight", x[0, 0, 0]).shape
    if tuple(shape) == (x.shape[1] * x.shape[-1],):  # one norm over all heads together
        return norm(x.transpose(1, 2).flatten(2)).unflatten(-1, (x.shape[1], -1)).transpose(1, 2)
    return norm(x)
