"""Scores and weights in plain torch, a block of query rows at a time: any device, any mask, never L x S in memory at once.

`blocks` is the one definition; the operator mixes values with each block, its backward pass goes over the same blocks
again, and a reading takes its statistics from them on the way past.
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
    slope: Tensor | None = None  # [B, H, rows, keys], on request: what the soft cap makes of a small change of its score


def exact(x: Tensor) -> torch.autocast:
    """Autocast switched off on the device of x: what is to be float32 or better stays that."""
    return torch.autocast(x.device.type, enabled=False)


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
    slopes: bool = False,
) -> Iterator[Block]:
    """q `[B, H, L, E]`, k `[B, G, S, E]`, at least float32; a dense mask or bias broadcasts to `[B, H, L, S]`; sinks are `[H]`
    or `[1 or B, H]`."""
    batch, heads, length, width = q.shape
    groups, keys = k.shape[1], k.shape[2]
    low = lowest(q.dtype)
    step = rows_per_block(batch * heads, keys)
    spans = None
    if isinstance(mask, IntervalMask):
        start, stop = mask.bounds(length, keys, q.device)
        number = torch.arange(keys, device=q.device)
        spans = _spans(start, stop, step)
    q = (q * scale).unflatten(1, (groups, heads // groups))
    k_t = k.transpose(-1, -2)
    for i in range(0, length, step):
        rows = slice(i, min(i + step, length))
        count = rows.stop - rows.start
        may, slope, first, last = None, None, 0, keys
        if spans is not None:
            first, last, inner, outer = spans[i // step]
        columns = slice(first, last)
        of_group = q[:, :, :, rows].reshape(batch, groups, heads // groups * count, width)
        s = (of_group @ k_t[..., columns]).view(batch, heads, count, last - first)
        if softcap:
            s = torch.tanh(s / softcap)
            slope = 1 - s * s if slopes else None
            s = s * softcap
        if bias is not None:
            s = (s + cut(bias, rows, columns)).clamp(min=low)
        if spans is not None:
            if inner > first or outer < last:
                may = allowed(start[:, rows], stop[:, rows], number[columns])[:, None]
                sides = (slice(None),) if inner >= outer else (slice(0, inner - first), slice(outer - first, None))
                for side in sides:
                    s[..., side].masked_fill_(~may[..., side], low)
        elif isinstance(mask, Tensor):
            may = cut(mask, rows, columns)
            s = s.masked_fill(~may, low)
        # the shift cancels out of the result, so no gradient goes through it
        top = s.detach().amax(-1) if last > first else s.new_full(s.shape[:-1], low)
        if sinks is not None:
            top = torch.maximum(top, sinks.detach().to(s.dtype)[..., None])
        shifted = s.sub_(top[..., None]) if not s.requires_grad else s - top[..., None]
        powers = shifted.exp()
        total = powers.sum(-1)
        if sinks is not None:
            total = total + torch.exp(sinks.to(s.dtype)[..., None] - top)
        total = total.masked_fill(top <= low, torch.inf)
        yield Block(rows, columns, shifted, powers, top, total, may, slope)


def _spans(start: Tensor, stop: Tensor, step: int) -> list[tuple[int, int, int, int]]:
    """Of each block of rows: the keys first..last that any row may read, and inner..outer that every row may read.

    Looked up for all blocks at once, because on an accelerator each look waits for all that was started before.
    """
    short = -start.shape[1] % step
    begin, end = (torch.cat([x, x[:, -1:].expand(-1, short)], 1).unflatten(1, (-1, step)) for x in (start, stop))
    some = end > begin
    first = begin.masked_fill(~some, torch.iinfo(begin.dtype).max).amin((0, 2))
    last = end.masked_fill(~some, 0).amax((0, 2))
    spans = torch.stack([torch.minimum(first, last), last, begin.amax((0, 2)), end.amin((0, 2))], 1)
    return [(a, b, c, d) for a, b, c, d in spans.tolist()]


def mix(block: Block, v: Tensor) -> Tensor:
    """Weighted sums of values: a block and v `[B, G, S, Ev]` -> `[B, H, rows, Ev]`."""
    return grouped(block.powers, v[:, :, block.keys]) / block.total[..., None]


def grouped(p: Tensor, v: Tensor) -> Tensor:
    """p `[B, H, rows, keys]` times v `[B, G, keys, Ev]`, each head with its group's -> `[B, H, rows, Ev]`."""
    batch, heads, rows, keys = p.shape
    groups = v.shape[1]
    return (p.reshape(batch, groups, heads // groups * rows, keys) @ v).view(batch, heads, rows, v.shape[-1])


def cut(x: Tensor, rows: slice, columns: slice) -> Tensor:
    """Rows and columns of something that broadcasts to [B, H, L, S]."""
    x = x if x.shape[-1] == 1 else x[..., columns]
    return x if x.ndim < 2 or x.shape[-2] == 1 else x[..., rows, :]
