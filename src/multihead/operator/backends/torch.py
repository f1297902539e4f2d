"""Attention in plain torch, a block of query rows at a time: any device, any mask, never L x S in memory at once.

`blocks` is the one definition; the operator mixes values with each block, and a reading takes its statistics from
the same block on the way past.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..masks import IntervalMask, allowed

BLOCK_ELEMENTS = 1 << 19  # scores held at once: 2 MiB in float32, so that a block's passes stay in the cache
FEWEST_ROWS = 32


class Block(NamedTuple):
    """Some query rows against the keys that any of them may read. Divide by `total` to get weights."""

    rows: slice
    keys: slice
    shifted: Tensor  # [B, H, rows, keys]: scores minus `top`; very negative, never -inf, where not allowed
    powers: Tensor  # [B, H, rows, keys]: exp(shifted)
    top: Tensor  # [B, H, rows]: the row's largest score (or its sink, where that is larger)
    total: Tensor  # [B, H, rows]: sum of powers and sink; infinite where nothing is allowed, so that weights are 0
    allowed: Tensor | None  # bool [B or 1, 1 or H, rows, keys]; None where every row may read all these keys


def lowest(dtype: torch.dtype) -> float:
    """Stands for -inf: a difference of two such numbers is finite, so nothing on the way is NaN."""
    return torch.finfo(dtype).min / 4


def rows_per_block(batch_heads: int, keys: int) -> int:
    """As many as keep a block in the cache, but never so few that products of matrices become products of vectors."""
    return max(FEWEST_ROWS, min(256, BLOCK_ELEMENTS // max(1, batch_heads * keys)))


def blocks(
    q: Tensor,
    k: Tensor,
    mask: IntervalMask | Tensor | None,
    *,
    bias: Tensor | None = None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Iterator[Block]:
    """q `[B, H, L, E]`, k `[B, G, S, E]`, at least float32; a dense mask or bias broadcasts to `[B, H, L, S]`."""
    batch, heads, length, width = q.shape
    groups, keys = k.shape[1], k.shape[2]
    low = lowest(q.dtype)
    if isinstance(mask, IntervalMask):
        start, stop = mask.bounds(length, keys, q.device)
        number = torch.arange(keys, device=q.device)
    step = rows_per_block(batch * heads, keys)
    q = (q * scale).unflatten(1, (groups, heads // groups))
    k_t = k.transpose(-1, -2)
    for i in range(0, length, step):
        rows = slice(i, min(i + step, length))
        count = rows.stop - rows.start
        may, first, last = None, 0, keys
        if isinstance(mask, IntervalMask):
            begin, end = start[:, rows], stop[:, rows]
            some = end > begin
            if bool(some.any()):
                first, last = int(begin[some].min()), int(end[some].max())
            # every row reads inner..outer: only what lies beside needs a look at each element
            inner, outer = int(begin.max()), int(end.min())
        columns = slice(first, last)
        grouped = q[:, :, :, rows].reshape(batch, groups, heads // groups * count, width)
        s = (grouped @ k_t[..., columns]).view(batch, heads, count, last - first)
        if softcap:
            s = torch.tanh(s / softcap) * softcap
        if bias is not None:
            s = (s + _cut(bias, rows, columns)).clamp(min=low)
        if isinstance(mask, IntervalMask):
            if inner > first or outer < last:
                may = allowed(begin, end, number[columns])[:, None]
                sides = (slice(None),) if inner >= outer else (slice(0, inner - first), slice(outer - first, None))
                for side in sides:
                    s[..., side].masked_fill_(~may[..., side], low)
        elif mask is not None:
            may = _cut(mask, rows, columns)
            s = s.masked_fill(~may, low)
        # the shift cancels out of the result, so no gradient goes through it
        top = s.detach().amax(-1) if last > first else s.new_full(s.shape[:-1], low)
        if sinks is not None:
            top = torch.maximum(top, sinks.detach().to(s.dtype)[:, None])
        shifted = s.sub_(top[..., None]) if not s.requires_grad else s - top[..., None]
        powers = shifted.exp()
        total = powers.sum(-1)
        if sinks is not None:
            total = total + torch.exp(sinks.to(s.dtype)[:, None] - top)
        total = total.masked_fill(top <= low, torch.inf)
        yield Block(rows, columns, shifted, powers, top, total, may)


def mix(block: Block, v: Tensor) -> Tensor:
    """Weighted sums of values: a block and v `[B, G, S, Ev]` -> `[B, H, rows, Ev]`."""
    return _grouped(block.powers, v[:, :, block.keys]) / block.total[..., None]


def _grouped(p: Tensor, v: Tensor) -> Tensor:
    batch, heads, rows, keys = p.shape
    groups = v.shape[1]
    return (p.reshape(batch, groups, heads // groups * rows, keys) @ v).view(batch, heads, rows, v.shape[-1])


def _cut(x: Tensor, rows: slice, columns: slice) -> Tensor:
    """Rows and columns of something that broadcasts to [B, H, L, S]."""
    x = x if x.shape[-1] == 1 else x[..., columns]
    return x if x.ndim < 2 or x.shape[-2] == 1 else x[..., rows, :]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: IntervalMask | Tensor | None = None,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    return_weights: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Output `[B, H, L, Ev]`, log-sum-exp `[B, H, L]` and, on request, weights `[B, H, L, S]` before dropout."""
    dtype = q.dtype
    work = torch.promote_types(dtype, torch.float32)
    q, k, v = (x.to(work) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse, weights = [], [], []
    for block in blocks(q, k, mask, bias=bias, scale=scale, softcap=softcap, sinks=sinks):
        lse.append(torch.where(block.total.isinf(), -torch.inf, block.top + block.total.log()))
        if return_weights:
            row = block.powers / block.total[..., None]
            weights.append(torch.nn.functional.pad(row, (block.keys.start, k.shape[2] - block.keys.stop)))
        if dropout:
            keep = torch.nn.functional.dropout(torch.ones_like(block.powers), dropout)
            block = block._replace(powers=block.powers * keep)
        out.append(mix(block, v))
    if not out:
        empty = q.new_zeros(*q.shape[:3], v.shape[-1])
        return empty.to(dtype), q.new_zeros(q.shape[:3]), q.new_zeros(*q.shape[:3], k.shape[2]) if return_weights else None
    return (torch.cat(out, 2).to(dtype), torch.cat(lse, 2), torch.cat(weights, 2).to(dtype) if return_weights else None)
