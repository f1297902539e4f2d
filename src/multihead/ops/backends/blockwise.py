"""Attention and its gradients in plain torch, a block of queries at a time, on any device.

Neither the weights nor anything else of size L x S is kept for the backward pass: it computes the
blocks again, and its memory grows with L + S. (FlashAttention does the same in a kernel: Dao et al.
2022, algorithms 1 and 4.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..call import AttentionCall, slice_axes
from .blocks import (
    FEWEST_ROWS,
    ScoreBlock,
    autocast_off,
    merge_batch_heads,
    multiply_grouped,
    score_blocks,
    tops,
)

BLOCK_ELEMENTS = 1 << 21  # scores held at once, 8 MiB in float32, of as many heads as fit
IN_PLACE = 1 << 24  # of scores that become the weights where they lie, and so take no more memory
ROWS = 256  # queries of a block where a mask lets blocks be skipped


class Gradients(NamedTuple):
    """Gradients of a call's inputs, of the inputs' shapes; None of what isn't there or wanted."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sinks: Tensor | None


class _Part(NamedTuple):
    """Some batch elements and heads of a call, few enough for a block of many queries to stay in
    the cache."""

    batch: slice
    heads: slice
    groups: slice
    call: AttentionCall
    blocks: Iterator[tuple[int, ScoreBlock]]  # numbered, the same in both passes

    def of(self, x: Tensor) -> Tensor:
        """The part of a tensor `[B, H, ...]`."""
        return x[self.batch, self.heads]


def widen(call: AttentionCall) -> AttentionCall:
    """The call with q, k and v in float32 or float64."""
    dtype = call.score_dtype()
    return call._replace(q=call.q.to(dtype), k=call.k.to(dtype), v=call.v.to(dtype))


def _parts(
    call: AttentionCall, *, softcap_slope: bool = False, into: Tensor | None = None
) -> Iterator[_Part]:
    batch, heads, length, groups, keys = *call.q.shape[:3], *call.k.shape[1:3]
    share = heads // groups
    elements = BLOCK_ELEMENTS if into is None else IN_PLACE
    # as many queries as there are, so that weights are written in one run, where nothing is skipped
    most = elements // max(keys, 1) if call.bounds() is None else ROWS
    rows = max(1, min(most, length))
    fit = max(1, elements // (rows * max(keys, 1)))  # heads
    step_b = max(1, fit // heads)
    step_g = groups if fit >= heads else max(1, fit // share)
    rows = max(FEWEST_ROWS, min(rows, elements // (step_b * step_g * share * max(keys, 1))))
    number = 0
    for b in range(0, batch, step_b):
        for g in range(0, groups, step_g):
            of_b, of_g = slice(b, b + step_b), slice(g, g + step_g)
            of_h = slice(g * share, (g + step_g) * share)
            whole = step_b >= batch and step_g == groups
            part = call if whole else call.slice(batch=of_b, head=of_h)
            part = part._replace(k=merge_batch_heads(part.k), v=merge_batch_heads(part.v))
            place = None if into is None else into[of_b, of_h]
            blocks = score_blocks(part, step=rows, softcap_slope=softcap_slope, into=place)
            yield _Part(of_b, of_h, of_g, part, enumerate(blocks, number))
            number += -(-length // rows)


def _softmax(
    block: ScoreBlock, sinks: Tensor | None, with_lse: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The weights of a block, which overwrite its scores, the log-sum-exp on request, and the
    weights of the sinks."""
    if sinks is None and not with_lse:
        nothing = (
            block.s.amax(-1, keepdim=True) == -torch.inf
            if block.empty and block.s.shape[-1]
            else None
        )
        # On a CPU the softmax of the last axis may overwrite its input, as torch's own attention
        # layer does there; touching fewer pages of memory matters more than the arithmetic.
        weights = torch.softmax(block.s, -1, out=block.s if block.s.device.type == "cpu" else None)
        return (weights if nothing is None else weights.masked_fill_(nothing, 0)), None, None
    top, shift, of_sink = tops(block, sinks)
    weights = block.s.sub_(shift[..., None]).exp_()
    total = weights.sum(-1) + of_sink
    nothing = top == -torch.inf
    weights.div_(total.masked_fill(nothing, torch.inf)[..., None])
    sunk = None if sinks is None else (of_sink / total).masked_fill(nothing, 0)
    return weights, (top + total.log()).masked_fill(nothing, -torch.inf), sunk


def _kept(like: Tensor, number: int, seed: Tensor | None, dropout: float) -> Tensor | None:
    """Factors of a block's weights under dropout, 0 or 1 / (1 - dropout): the same in both
    passes."""
    if seed is None:
        return None
    generator = torch.Generator(like.device).manual_seed(int(seed[0]) + number)
    return torch.empty_like(like).bernoulli_(1 - dropout, generator=generator).div_(1 - dropout)


def draw_kept_weights(call: AttentionCall, seed: Tensor) -> Tensor:
    """Factors of all weights of a call under dropout, `[B, H, L, S]`, as both passes draw them."""
    call = widen(call)
    kept = call.q.new_zeros(*call.q.shape[:3], call.k.shape[2])
    for part in _parts(call):
        for number, block in part.blocks:
            drawn = _kept(block.s, number, seed, call.dropout)
            if drawn is not None:
                part.of(kept)[:, :, block.rows, block.keys] = drawn
    return kept


def attend_blockwise(
    call: AttentionCall,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    weights: Tensor | None,
) -> None:
    """Compute into `out` `[B, H, L, Ev]` and, if given, `lse` `[B, H, L]` and `weights`
    `[B, H, L, S]`."""
    call = widen(call)
    # with dropout the blocks must be those of the backward pass, which draws for each of them again
    in_place = weights is not None and weights.dtype == call.q.dtype and seed is None
    with autocast_off(call.q):
        for part in _parts(call, into=weights if in_place else None):
            for number, block in part.blocks:
                here, keys = block.rows, block.keys
                p, block_lse, _ = _softmax(block, part.call.sinks, lse is not None)
                if weights is not None:
                    rows = part.of(weights)[:, :, here]
                    if keys.start or keys.stop < rows.shape[3]:
                        outside = p[..., :1] * 0  # NaN in a row of NaN
                        rows[..., : keys.start] = outside
                        rows[..., keys.stop :] = outside
                    if rows[..., keys].data_ptr() != p.data_ptr():
                        rows[..., keys] = p
                if block_lse is not None and lse is not None:
                    part.of(lse)[:, :, here] = block_lse
                kept = _kept(p, number, seed, call.dropout)
                read = p if kept is None else p * kept
                part.of(out)[:, :, here] = multiply_grouped(read, part.call.v[:, :, keys])


def differentiate_blockwise(
    call: AttentionCall,
    seed: Tensor | None,
    grad: Tensor,
    reaches: Tensor,
    grad_weights: Tensor | None,
    with_bias: bool,
) -> Gradients:
    """Gradients of q, k, v and, `with_bias`, of the bias, in float32 or float64.

    With A the weights and dA what reaches them, ds = A * (dA - reaches), where `reaches` `[B, H,
    L]` is rowsum(A * dA) = rowsum(grad * out), less the gradient of the log-sum-exp.
    """
    call = widen(call)
    q, k, v = call[:3]
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    dbias = call.bias if with_bias else None
    if dbias is not None:
        dbias = torch.zeros_like(dbias, dtype=q.dtype, memory_format=torch.contiguous_format)
    dsinks = None if call.sinks is None else torch.zeros_like(call.sinks, dtype=q.dtype)
    with autocast_off(q):
        for part in _parts(call, softcap_slope=call.softcap is not None):
            v_t = part.call.v.transpose(-1, -2)
            dk_part, dv_part = dk[part.batch, part.groups], dv[part.batch, part.groups]
            for number, block in part.blocks:
                here, keys = block.rows, block.keys
                g = part.of(grad)[:, :, here]
                a, _, sunk = _softmax(block, part.call.sinks, False)
                ds = multiply_grouped(g, v_t[..., keys])
                kept = _kept(a, number, seed, call.dropout)
                if kept is not None:
                    ds.mul_(kept)
                reach = part.of(reaches)[:, :, here]
                if grad_weights is not None:
                    more = part.of(grad_weights)[:, :, here, keys].to(q.dtype)
                    ds.add_(more)
                    reach += (a * more).sum(-1)
                if dsinks is not None and sunk is not None:
                    dsinks[part.heads] -= (reach * sunk).sum((0, 2))
                read = a if kept is None else a * kept
                dv_part[:, :, keys] += _by_key(read, g, part.call.k.shape[1])
                ds.sub_(reach[..., None]).mul_(a)
                if dbias is not None:
                    place = {"B": part.batch, "H": part.heads, "L": here, "S": keys}
                    into = slice_axes(dbias, "B H L S", place)
                    into += ds.sum_to_size(into.shape)
                if block.slope is not None:
                    ds.mul_(block.slope)
                part.of(dq)[:, :, here] = multiply_grouped(ds, part.call.k[:, :, keys])
                dk_part[:, :, keys] += _by_key(ds, part.call.q[:, :, here], part.call.k.shape[1])
        dq *= call.scale
        dk *= call.scale
    return Gradients(dq, dk, dv, dbias, dsinks)


def _by_key(p: Tensor, x: Tensor, groups: int) -> Tensor:
    """p `[B, H, rows, keys]`, x `[B, H, rows, E]` -> what each key gets from all heads of its
    group, `[B, G, keys, E]`."""
    p, x = (t.unflatten(1, (groups, t.shape[1] // groups)).flatten(2, 3) for t in (p, x))
    return p.transpose(-1, -2) @ x
