"""Scores and weights in plain torch, a block of queries at a time, on any device and for any mask;
never L x S numbers in memory at once.

`score_blocks` is the one definition: the operator multiplies each block with the values, its
backward pass computes the same blocks again, and a reading takes its statistics from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from ..call import AXES, AttentionCall, slice_axes
from ..masks import bounds_to_dense

# scores in memory at once: 2 MiB in float32, so that a block stays in the CPU cache
BLOCK_ELEMENTS = 1 << 19
FEWEST_ROWS = 32
WILD = 1e12  # scales from which on scores may well be infinite
_BHLS = AXES[AttentionCall._fields.index("bias")]


class ScoreBlock(NamedTuple):
    """Scores of some queries and the keys that any of them may attend to, as they enter the
    softmax.
    """

    rows: slice
    keys: slice
    s: Tensor  # [B, H, rows, keys]; -inf where not allowed
    # bool [B or 1, 1 or H, rows, keys]; None where every query may attend to all these keys
    allowed: Tensor | None
    empty: bool  # whether some query may have no key
    slope: Tensor | None = None  # [B, H, rows, keys], on request: derivative of the soft cap


class WeightBlock(NamedTuple):
    """Unnormalised weights of some queries and the keys that any of them may attend to; divide
    `powers` by `total` for weights.
    """

    rows: slice
    keys: slice
    # [B, H, rows, keys]: scores minus `top`; very negative, never -inf, where not allowed, so that
    # its product with a power of 0 is 0
    shifted: Tensor
    powers: Tensor  # [B, H, rows, keys]: exp(shifted)
    # [B, H, rows]: the query's largest score (or its sink, where that is larger); -inf where
    # nothing is allowed
    top: Tensor
    # [B, H, rows]: sum of powers and sink; infinite where nothing is allowed, so that weights are 0
    total: Tensor
    allowed: Tensor | None


def autocast_off(x: Tensor) -> AbstractContextManager[object]:
    """Context manager that turns autocast off on the device of x, so that float32 stays float32."""
    kind = x.device.type  # "meta" has no autocast
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if on else nullcontext()


def add_bias(s: Tensor, bias: Tensor) -> Tensor:
    """Scores plus a bias that broadcasts to them. Only a bias of -inf forbids a key: a finite sum
    below what the dtype holds becomes the lowest number that it holds.
    """
    floor = torch.full_like(bias, torch.finfo(s.dtype).min, dtype=s.dtype)
    floor.masked_fill_(bias == -torch.inf, -torch.inf)
    return (s + bias.to(s.dtype)).clamp(min=floor)


def rows_per_block(batch_heads: int, keys: int) -> int:
    """Number of queries that keep a block in the CPU cache, but never so few that matrix products
    become vector products.
    """
    return max(FEWEST_ROWS, min(256, BLOCK_ELEMENTS // max(1, batch_heads * keys)))


def score_blocks(
    call: AttentionCall,
    *,
    step: int | None = None,
    softcap_slope: bool = False,
    into: Tensor | None = None,
    space: Tensor | None = None,
) -> Iterator[ScoreBlock]:
    """Scores of a call whose q and k are at least float32, `step` queries a block.

    Those of blocks that fill a run of memory of `into` `[B, H, L, S]` are computed there, and all
    of them in `space`, if given.
    """
    q, k, scale, softcap, mask = call.q, call.k, call.scale, call.softcap, call.mask
    bias = call.added(q.dtype)
    batch, heads, length, width = q.shape
    groups, keys = k.shape[1], k.shape[2]
    step = step or rows_per_block(batch * heads, keys)
    spans = None
    bounds = call.bounds()
    if bounds is not None:
        start, stop = bounds
        number = torch.arange(keys, device=q.device)
        spans = _spans(start, stop, step, keys)
    share = heads // groups
    k_t = merge_batch_heads(k).flatten(0, 1).transpose(1, 2)
    nothing = q.new_empty(())
    for i in range(0, length, step):
        rows = slice(i, min(i + step, length))
        count = rows.stop - rows.start
        may, slope, first, last = None, None, 0, keys
        empty = bias is not None or abs(scale) > WILD
        if spans is not None:
            first, last, inner, outer, fewest = spans[i // step]
            empty = empty or fewest <= 0
        columns = slice(first, last)
        of_group = q[:, :, rows].reshape(batch * groups, share * count, width)
        place = None if into is None or softcap else into[:, :, rows, columns]
        place = (
            place.view(batch * groups, share * count, last - first)
            if place is not None and place.is_contiguous()
            else None
        )
        if space is not None:
            place = space[: batch * heads * count * (last - first)].view(
                batch * groups, share * count, last - first
            )
        s = torch.baddbmm(nothing, of_group, k_t[..., columns], beta=0, alpha=scale, out=place)
        s = s.view(batch, heads, count, last - first)
        if softcap:
            s = torch.tanh(s / softcap)
            slope = 1 - s * s if softcap_slope else None
            s = s * softcap
        if bias is not None:
            s = add_bias(s, slice_axes(bias, _BHLS, {"L": rows, "S": columns}))
        if spans is not None and (inner > first or outer < last):
            may = bounds_to_dense(start[:, rows], stop[:, rows], number[columns])[:, None]
            sides = (
                (slice(None),)
                if inner >= outer
                else (slice(0, inner - first), slice(outer - first, None))
            )
            for side in sides:
                s[..., side].masked_fill_(~may[..., side], -torch.inf)
        if mask is not None:
            dense, empty = slice_axes(mask, _BHLS, {"L": rows, "S": columns}), True
            s = s.masked_fill(~dense, -torch.inf)
            may = dense if may is None else may & dense
        yield ScoreBlock(rows, columns, s, may, empty, slope)


def weight_blocks(call: AttentionCall, *, passing: bool = False) -> Iterator[WeightBlock]:
    """The scores of a call, ready to be weights and statistics of weights.

    Of blocks that are only looked at in `passing`, each lies where the last one lay: new memory for
    each, a little larger every time, is slow and leaves holes.
    """
    q, k = call.q, call.k
    low = torch.finfo(q.dtype).min / 4
    batch, heads, length = q.shape[:3]
    step = rows_per_block(batch * heads, k.shape[2])
    space = q.new_empty(2, batch * heads * min(step, length) * k.shape[2]) if passing else None
    for part in score_blocks(call, step=step, space=None if space is None else space[0]):
        top, shift, total = tops(part, call.sinks)
        shifted = (
            part.s.sub_(shift[..., None]) if not part.s.requires_grad else part.s - shift[..., None]
        )
        if part.empty or part.allowed is not None:
            shifted = shifted.clamp_(min=low)
        powers = (
            shifted.exp()
            if space is None
            else torch.exp(shifted, out=space[1, : shifted.numel()].view(shifted.shape))
        )
        total = powers.sum(-1) + total
        yield WeightBlock(
            part.rows,
            part.keys,
            shifted,
            powers,
            top,
            total.masked_fill(top == -torch.inf, torch.inf),
            part.allowed,
        )


def tops(part: ScoreBlock, sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor | float]:
    """Each row's largest score, or its sink where that is larger; the same with 0 of rows without
    keys, to subtract from scores; and what the sink adds to the sum of powers of the rest.
    """
    # the shift cancels out of the result, so no gradient goes through it
    s = part.s.detach()
    top = s.amax(-1) if s.shape[-1] else s.new_full(s.shape[:-1], -torch.inf)
    if sinks is not None:
        sinks = sinks.to(top.dtype)[..., None]
        top = torch.maximum(top, sinks.detach())
    shift = top.masked_fill(top == -torch.inf, 0)  # -inf less -inf is NaN
    return top, shift, 0.0 if sinks is None else torch.exp(sinks - shift)


def _spans(
    start: Tensor, stop: Tensor, step: int, keys: int
) -> list[tuple[int, int, int, int, int]]:
    """Of each block of rows: the keys first..last that any row may read (all, of a block that may
    read none), inner..outer that every row may read, and how many the row with the fewest may.

    Looked up for all blocks at once, because on an accelerator each look waits for all that was
    started before.
    """
    short = -start.shape[1] % step
    begin, end = (
        torch.cat([x, x[:, -1:].expand(-1, short)], 1).unflatten(1, (-1, step))
        for x in (start, stop)
    )
    some = end > begin
    first = begin.masked_fill(~some, torch.iinfo(begin.dtype).max).amin((0, 2))
    last = end.masked_fill(~some, 0).amax((0, 2))
    first, last = first.masked_fill(last == 0, 0), last.masked_fill(last == 0, keys)
    fewest = (end - begin).amin((0, 2))
    spans = torch.stack([first, last, begin.amax((0, 2)), end.amin((0, 2)), fewest], 1)
    return [(a, b, c, d, e) for a, b, c, d, e in spans.tolist()]


def mix_values(block: WeightBlock, v: Tensor) -> Tensor:
    """Weighted sums of values: a block and v `[B, G, S, Ev]` -> `[B, H, rows, Ev]`."""
    return multiply_grouped(block.powers, v[:, :, block.keys]) / block.total[..., None]


def merge_batch_heads(x: Tensor) -> Tensor:
    """`[B, H, L, E]` so that B and H can be looked at as one axis: copied if it must be, once and
    not at every product.
    """
    if x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1):
        return x
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]).unflatten(0, x.shape[:2])


def multiply_grouped(p: Tensor, v: Tensor) -> Tensor:
    """p `[B, H, rows, keys]` times v `[B, G, keys, Ev]`, each head with its group's -> `[B, H,
    rows, Ev]`.
    """
    batch, heads, rows, keys = p.shape
    groups = v.shape[1]
    of_group = p.reshape(batch * groups, heads // groups * rows, keys)
    return torch.bmm(of_group, v.flatten(0, 1)).view(batch, heads, rows, v.shape[-1])
