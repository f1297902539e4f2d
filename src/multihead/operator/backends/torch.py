"""Attention and its gradients, a block of query rows at a time, as operators that torch can record.

Registered with torch, so that compiled and exported graphs, vmap and autograd take each as one step. Neither the
weights nor anything else of size L x S is kept for the backward pass: it computes the blocks again, and its memory grows
with L + S. (FlashAttention does the same in a kernel: Dao et al. 2022, algorithms 1 and 4.)
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..masks import IntervalMask, intervals, traced
from .blocks import Block, blocks, cut, exact, grouped

# A mask enters as its start and stop, integers [B or 1, L], or dense. Sinks are [1 or B, H]; seed is that of the dropout.
_INPUTS = ("Tensor q, Tensor k, Tensor v, Tensor? start, Tensor? stop, Tensor? mask, Tensor? bias, Tensor? sinks, Tensor? seed, "
           "float scale, float? softcap, float dropout")
_TENSORS = 9  # so many of the inputs are tensors


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: IntervalMask | Tensor | None = None,
    *,
    bias: Tensor | None = None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    return_weights: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Output `[B, H, L, Ev]`, log-sum-exp `[B, H, L]` and, on request, weights `[B, H, L, S]` before dropout."""
    start = stop = dense = None
    if isinstance(mask, IntervalMask):
        if mask.static(q.shape[2], k.shape[2]) != "all":
            start, stop = mask.bounds(q.shape[2], k.shape[2], q.device)
    elif mask is not None:
        dense = mask[(None,) * (4 - mask.ndim)]
    bias = None if bias is None else bias[(None,) * (4 - bias.ndim)]
    # drawn from torch's own generator, so that torch.manual_seed makes it repeat
    seed = torch.randint(2**62, (1,), device=q.device) if dropout else None
    # torch.func's grad and jacobians want an autograd.Function; everything else takes the operator itself
    run = _Attend.apply if traced() and not torch.compiler.is_compiling() else attend
    out, lse, weights = run(q, k, v, start, stop, dense, bias, None if sinks is None else sinks[None], seed, scale,
                               softcap, dropout, return_weights)
    return out, lse, weights if return_weights else None


def _work(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _blocks(q: Tensor, k: Tensor, start: Tensor | None, stop: Tensor | None, mask: Tensor | None, bias: Tensor | None,
            sinks: Tensor | None, scale: float, softcap: float | None, slopes: bool = False) -> Any:
    bounds = mask if start is None or stop is None else intervals(start, stop)
    return blocks(q, k, bounds, bias=bias, scale=scale, softcap=softcap, sinks=sinks, slopes=slopes)


def _kept(block: Block, seed: Tensor | None, dropout: float) -> Tensor | None:
    """What dropout makes of each weight of a block, 0 or 1 / (1 - dropout): the same in both passes."""
    if seed is None:
        return None
    generator = torch.Generator(block.powers.device).manual_seed(int(seed[0]) + block.rows.start)
    return torch.empty_like(block.powers).bernoulli_(1 - dropout, generator=generator).div_(1 - dropout)


@torch.library.custom_op("multihead::attend", mutates_args=(),
                         schema=f"({_INPUTS}, bool return_weights) -> (Tensor, Tensor, Tensor)")
def attend(q: Tensor, k: Tensor, v: Tensor, start: Tensor | None, stop: Tensor | None, mask: Tensor | None,
           bias: Tensor | None, sinks: Tensor | None, seed: Tensor | None, scale: float, softcap: float | None,
           dropout: float, return_weights: bool) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, weights = _empty(q, k, v, start, stop, mask, bias, sinks, seed, scale, softcap, dropout, return_weights)
    q, k, v = (x.to(_work(x.dtype)) for x in (q, k, v))
    with exact(q):
        _attend(q, k, v, start, stop, mask, bias, sinks, seed, scale, softcap, dropout, out, lse,
                weights if return_weights else None)
    return out, lse, weights


def _attend(q: Tensor, k: Tensor, v: Tensor, start: Tensor | None, stop: Tensor | None, mask: Tensor | None,
            bias: Tensor | None, sinks: Tensor | None, seed: Tensor | None, scale: float, softcap: float | None,
            dropout: float, out: Tensor, lse: Tensor, weights: Tensor | None) -> None:
    """Fills out, lse and, where there is one, weights."""
    for block in _blocks(q, k, start, stop, mask, bias, sinks, scale, softcap):
        here = block.rows
        lse[:, :, here] = torch.where(block.total.isinf(), -torch.inf, block.top + block.total.log())
        p = block.powers.div_(block.total[..., None])
        if weights is not None:
            weights[:, :, here, : block.keys.start] = 0
            weights[:, :, here, block.keys] = p
            weights[:, :, here, block.keys.stop :] = 0
        kept = _kept(block, seed, dropout)
        out[:, :, here] = grouped(p if kept is None else p.mul_(kept), v[:, :, block.keys])


@attend.register_fake
def _empty(q: Tensor, k: Tensor, v: Tensor, start: Tensor | None, stop: Tensor | None, mask: Tensor | None,
           bias: Tensor | None, sinks: Tensor | None, seed: Tensor | None, scale: float, softcap: float | None,
           dropout: float, return_weights: bool) -> tuple[Tensor, Tensor, Tensor]:
    return (q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=_work(q.dtype)),
            q.new_empty(*q.shape[:3], k.shape[2]) if return_weights else q.new_empty(0))


@torch.library.custom_op("multihead::attend_backward", mutates_args=(),
                         schema=f"(Tensor grad, Tensor grad_lse, Tensor? grad_weights, Tensor out, Tensor lse, {_INPUTS}) "
                                "-> (Tensor, Tensor, Tensor, Tensor, Tensor)")
def attend_backward(grad: Tensor, grad_lse: Tensor, grad_weights: Tensor | None, out: Tensor, lse: Tensor, q: Tensor,
                    k: Tensor, v: Tensor, start: Tensor | None, stop: Tensor | None, mask: Tensor | None, bias: Tensor | None,
                    sinks: Tensor | None, seed: Tensor | None, scale: float, softcap: float | None,
                    dropout: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    with exact(q):
        return _attend_backward(grad, grad_lse, grad_weights, out, lse, q, k, v, start, stop, mask, bias, sinks, seed, scale,
                                softcap, dropout)


def _attend_backward(grad: Tensor, grad_lse: Tensor, grad_weights: Tensor | None, out: Tensor, lse: Tensor, q: Tensor,
                     k: Tensor, v: Tensor, start: Tensor | None, stop: Tensor | None, mask: Tensor | None, bias: Tensor | None,
                     sinks: Tensor | None, seed: Tensor | None, scale: float, softcap: float | None,
                     dropout: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, bias and sinks; of what isn't there, one of no elements.

    With A the weights and dA what reaches them, ds = A * (dA - rowsum(A * dA)); the log-sum-exp adds A * dlse to it.
    """
    work = _work(q.dtype)
    dq, dk, dv = (torch.zeros_like(x, dtype=work, memory_format=torch.contiguous_format) for x in (q, k, v))
    dbias = q.new_zeros(0 if bias is None else bias.shape, dtype=work)
    dsinks = q.new_zeros(0 if sinks is None else sinks.shape, dtype=work)
    types = (q.dtype, k.dtype, v.dtype, q.dtype if bias is None else bias.dtype, q.dtype if sinks is None else sinks.dtype)
    q, k, v, grad, out = (x.to(work) for x in (q, k, v, grad, out))
    groups = k.shape[1]
    v_t = v.transpose(-1, -2)
    # a row with nothing to read has lse = -inf, and whatever was computed from that may well be NaN
    grad_lse = grad_lse.masked_fill(lse.isneginf(), 0)
    reaches = (grad * out).sum(-1) - grad_lse
    for block in _blocks(q, k, start, stop, mask, bias, sinks, scale, softcap, slopes=softcap is not None):
        here, keys = block.rows, block.keys
        g = grad[:, :, here]
        a = block.powers.div_(block.total[..., None])
        ds = grouped(g, v_t[..., keys])
        kept = _kept(block, seed, dropout)
        if kept is not None:
            ds.mul_(kept)
        if grad_weights is not None:
            more = grad_weights[:, :, here, keys].to(work)
            ds.add_(more)
            reaches[:, :, here] += (a * more).sum(-1)
        dv[:, :, keys] += _gathered(a if kept is None else a * kept, g, groups)
        ds.sub_(reaches[:, :, here, None]).mul_(a)
        if bias is not None:
            part = cut(dbias, here, keys)
            part += ds.sum_to_size(part.shape)
        if block.slope is not None:
            ds.mul_(block.slope)
        dq[:, :, here] = grouped(ds, k[:, :, keys])
        dk[:, :, keys] += _gathered(ds, q[:, :, here], groups)
    dq *= scale
    dk *= scale
    if sinks is not None:
        dsinks += (-reaches * torch.exp(sinks.to(work)[..., None] - lse)).sum(-1).sum_to_size(dsinks.shape)
    return tuple(x.to(dtype) for x, dtype in zip((dq, dk, dv, dbias, dsinks), types))  # type: ignore[return-value]


def _gathered(p: Tensor, x: Tensor, groups: int) -> Tensor:
    """p `[B, H, rows, keys]`, x `[B, H, rows, E]` -> what each key gets from all heads of its group, `[B, G, keys, E]`."""
    p, x = (t.unflatten(1, (groups, -1)).flatten(2, 3) for t in (p, x))
    return p.transpose(-1, -2) @ x


@attend_backward.register_fake
def _empty_backward(grad: Tensor, grad_lse: Tensor, grad_weights: Tensor | None, out: Tensor, lse: Tensor, q: Tensor,
                    k: Tensor, v: Tensor, start: Tensor | None, stop: Tensor | None, mask: Tensor | None,
                    bias: Tensor | None, sinks: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    wide = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return (*wide, *(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (bias, sinks)))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:_TENSORS], *output[:2])
    ctx.numbers, ctx.weighted = inputs[_TENSORS : _TENSORS + 3], inputs[-1]


def _gradients(ctx: Any, grad: Tensor, grad_lse: Tensor, grad_weights: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, out, lse = ctx.saved_tensors
    run = attend_backward if torch.compiler.is_compiling() else _AttendBackward.apply
    dq, dk, dv, dbias, dsinks = run(grad, grad_lse, grad_weights if ctx.weighted else None, out, lse, *tensors,
                                    *ctx.numbers)
    bias, sinks = tensors[6], tensors[7]
    return (dq, dk, dv, None, None, None, None if bias is None else dbias, None if sinks is None else dsinks, None, None, None,
            None, None)


attend.register_autograd(_gradients, setup_context=_save)


_attend_once = torch.library.custom_op("multihead::attend_once", attend._init_fn, mutates_args=(),
                                       schema=f"({_INPUTS}, bool return_weights) -> (Tensor, Tensor, Tensor)")
_attend_once.register_fake(_empty)


class _Attend(torch.autograd.Function):
    """The same for torch.func, which takes no operator that brings its own gradients: hence one without."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _attend_once(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        _save(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, *grads)


class _AttendBackward(torch.autograd.Function):
    """The backward pass as a step that can be recorded (torch.func always does), and says so when it is to be differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        return attend_backward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError("the gradient of multihead.attention can't itself be differentiated: its backward pass keeps no "
                           "weights. For second derivatives write the attention out with torch's own operations")


def _fold(size: int, values: tuple[Any, ...], dims: tuple[Any, ...], loose: range) -> list[Any]:
    """vmap's inputs, each with a mapped axis or none, as inputs of a batch `size` times as large.

    `loose` are the numbers of those whose own batch may be 1: they are stretched to the batch of the first input.
    """
    found: list[Any] = []
    for i, (x, dim) in enumerate(zip(values, dims)):
        if isinstance(x, Tensor):
            x = x.expand(size, *x.shape) if dim is None or x.ndim == 1 else x.movedim(dim, 0)
            if not i:
                batch = x.shape[1]
            x = (x.expand(size, batch, *x.shape[2:]) if i in loose else x).flatten(0, 1)
        found.append(x)
    return found


def _vmap(op: Any, info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
    size, weighted = info.batch_size, inputs[-1]
    folded = _fold(size, _one_seed(inputs, dims, 8), dims, range(3, 8))
    out, lse, weights = op(*folded)
    parts = [x.unflatten(0, (size, x.shape[0] // size)) for x in ((out, lse, weights) if weighted else (out, lse))]
    return (*parts, *(() if weighted else (weights,))), (0, 0, 0 if weighted else None)


def _vmap_backward(info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
    size = info.batch_size
    parts = list(attend_backward(*_fold(size, _one_seed(inputs, dims, 13), dims, range(8, 13))))
    there = [True, True, True, inputs[11] is not None, inputs[12] is not None]
    for i, x in enumerate(parts):
        if there[i]:
            parts[i] = x.unflatten(0, (size, x.shape[0] // size))
    for i, number in ((3, 11), (4, 12)):  # what was stretched adds up again
        if there[i] and inputs[number].shape[0 if dims[number] is None or dims[number] > 0 else 1] == 1:
            parts[i] = parts[i].sum(1, keepdim=True)
    return tuple(parts), tuple(0 if x else None for x in there)


def _one_seed(inputs: tuple[Any, ...], dims: tuple[Any, ...], number: int) -> tuple[Any, ...]:
    """One seed for all of vmap's elements: each has its own part of the larger batch's draw."""
    seed = inputs[number]
    if seed is not None and dims[number] is not None:
        seed = seed.select(dims[number], 0)
    return (*inputs[:number], seed, *inputs[number + 1 :])


attend.register_vmap(partial(_vmap, attend))
_attend_once.register_vmap(partial(_vmap, _attend_once))
attend_backward.register_vmap(_vmap_backward)
