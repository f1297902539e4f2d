"""Attention and its gradients, a block of query rows at a time, as operators that torch can record.

Registered with torch, so that compiled and exported graphs, vmap and autograd take each as one
step. Neither the
weights nor anything else of size L x S is kept for the backward pass: it computes the blocks again,
    and its memory grows
with L + S. (FlashAttention does the same in a kernel: Dao et al. 2022, algorithms 1 and 4.)
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..masks import IntervalMask, hidden, intervals, transformed
from ..slopes import AlibiBias, falling
from . import cpu
from .blocks import FEWEST_ROWS, Scores, cut, exact, grouped, lowest, merged, scores, tops

BLOCK_ELEMENTS = 1 << 21  # scores held at once, 8 MiB in float32, of as many heads as fit
IN_PLACE = 1 << 24
ROWS = 256
# log-sum-exps that are too rounded to give weights back: those of rows that read by the lowest of
# biases alone
FAR = 1e4

# A mask enters as its start and stop, integers [B or 1, L], or dense. Sinks are [1 or B, H], and so
# are slopes (slopes.py), with
# positions of rows, `at` [1 or B, L], and of keys, `key_at` [1 or B, S], int64. Seed is that of the
# dropout; `kernels` says that
# compiled kernels (cpu.py) may compute it.
_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? start, Tensor? stop, Tensor? mask, Tensor? bias, Tensor?"
    " sinks, Tensor? slopes, Tensor? at, Tensor? key_at, Tensor? seed, float scale, float? softcap,"
    " float dropout, bool kernels"
)
_TENSORS, _NUMBERS = 12, 4  # so many of the inputs are tensors, so many of the rest numbers
_SEED, _LOOSE = (
    11,
    range(3, 11),
)  # the seed's place among them, and of those whose own batch may be 1
_AHEAD = 5  # so many come before them in the backward pass


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: IntervalMask | Tensor | None = None,
    *,
    bias: Tensor | AlibiBias | None = None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    return_lse: bool = False,
    return_weights: bool = False,
    kernels: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Output `[B, H, L, Ev]` and, on request, log-sum-exp `[B, H, L]` and weights `[B, H, L, S]`
    before dropout.
    """
    start = stop = dense = None
    if isinstance(mask, IntervalMask):
        if mask.static(q.shape[2], k.shape[2]) != "all":
            if kernels and not mask.rules and not hidden(q):
                start, stop = _band(mask.low, mask.high, q.shape[2], k.shape[2])
            else:
                start, stop = mask.bounds(q.shape[2], k.shape[2], q.device)
    elif mask is not None:
        dense = mask[(None,) * (4 - mask.ndim)]
    slopes = at = key_at = add = None
    if isinstance(bias, AlibiBias):
        slopes, at, key_at = bias.slopes[None], bias.query_positions, bias.key_positions
    elif bias is not None:
        add = bias[(None,) * (4 - bias.ndim)]
    # drawn from torch's own generator, so that torch.manual_seed makes it repeat
    seed = torch.randint(2**62, (1,), device=q.device) if dropout else None
    run: Any = attend
    if transformed():  # torch.func's grad and jacobians want an autograd.Function
        run = _Attend.apply
    elif not hidden(q) and not _tracked(q, k, v, add, sinks):
        run = _forward  # nothing to record: straight there, which saves a tenth of a millisecond
    # the gradient of sinks needs it, and so do the kernels' gradients
    with_lse = return_lse or sinks is not None or (kernels and _tracked(q, k, v, add, sinks))
    out, lse, weights = run(
        q,
        k,
        v,
        start,
        stop,
        dense,
        add,
        None if sinks is None else sinks[None],
        slopes,
        at,
        key_at,
        seed,
        scale,
        softcap,
        dropout,
        kernels,
        with_lse,
        return_weights,
    )
    return out, lse if return_lse else None, weights if return_weights else None


@lru_cache(maxsize=8)
def _band(low: int | None, high: int | None, length: int, keys: int) -> tuple[Tensor, Tensor]:
    """The bounds of a band as the kernels take them, kept for the layers that follow: making them
    costs a small call's time.
    """
    start, stop = (x.to(torch.int32) for x in IntervalMask((), low, high).bounds(length, keys))
    return start, stop


def _tracked(*inputs: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def _work(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _Part(NamedTuple):
    """Some batch elements and heads of a call, few enough for a block of many rows to stay in the
    cache.
    """

    batch: slice
    heads: slice
    groups: slice
    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    blocks: Iterator[tuple[int, Scores]]  # numbered, the same in both passes

    def of(self, x: Tensor) -> Tensor:
        """The part's share of something `[B, H, ...]`."""
        return x[self.batch, self.heads]


def _parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor | None,
    stop: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    slopes: bool = False,
    into: Tensor | None = None,
) -> Iterator[_Part]:
    batch, heads, length, groups, keys = *q.shape[:3], *k.shape[1:3]
    share = heads // groups
    # Scores that become the weights where they stand take no memory of their own: more of them at
    # once.
    elements = BLOCK_ELEMENTS if into is None else IN_PLACE
    # fewer rows a block where a mask lets blocks be skipped; else as many as there are, so that
    # weights are written in one run
    most = elements // max(keys, 1) if start is None else ROWS
    rows = max(1, min(most, length))
    fit = max(1, elements // (rows * max(keys, 1)))  # heads
    step_b = max(1, fit // heads)
    step_g = groups if fit >= heads else max(1, fit // share)
    rows = max(FEWEST_ROWS, min(rows, elements // (step_b * step_g * share * max(keys, 1))))
    wide_sinks = None if sinks is None else sinks[..., None, None]
    number = 0
    for b in range(0, batch, step_b):
        for g in range(0, groups, step_g):
            of_b, of_g, of_h = (
                slice(b, b + step_b),
                slice(g, g + step_g),
                slice(g * share, (g + step_g) * share),
            )
            low, high, may, add, sink = (
                _share(x, of_b, of_h) for x in (start, stop, mask, bias, wide_sinks)
            )
            inner = may if low is None or high is None else intervals(low, high)
            whole = step_b >= batch and step_g == groups
            q_part = q if whole else q[of_b, of_h]
            k_part, v_part = (merged(x if whole else x[of_b, of_g]) for x in (k, v))
            found = scores(
                q_part,
                k_part,
                inner,
                bias=add,
                scale=scale,
                softcap=softcap,
                step=rows,
                slopes=slopes,
                into=None if into is None else into[of_b, of_h],
            )
            yield _Part(
                of_b,
                of_h,
                of_g,
                q_part,
                k_part,
                v_part,
                None if sink is None else sink[..., 0, 0],
                enumerate(found, number),
            )
            number += -(-length // rows)


def _share(x: Tensor | None, batch: slice, heads: slice) -> Tensor | None:
    """Of something that broadcasts to [B, H, L, S], or to [B, L]."""
    if x is None:
        return None
    x = x if x.shape[0] == 1 else x[batch]
    return x[:, heads] if x.ndim == 4 and x.shape[1] > 1 else x


def _weights(block: Scores, sinks: Tensor | None, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    """The softmax of a block's scores, which it overwrites, and the log-sum-exp on request."""
    low = lowest(block.s.dtype)
    if sinks is None and not with_lse:
        nothing = (
            block.s.amax(-1, keepdim=True) <= low if block.empty and block.s.shape[-1] else None
        )
        # On a CPU the softmax of the last axis may overwrite its input, as torch's own attention
        # layer does there; touching
        # fewer pages of memory matters more than the arithmetic.
        weights = torch.softmax(block.s, -1, out=block.s if block.s.device.type == "cpu" else None)
        return (weights if nothing is None else weights.masked_fill_(nothing, 0)), None
    top, total = tops(block, sinks, low)
    weights = block.s.sub_(top[..., None]).exp_()
    total = weights.sum(-1) + total
    nothing = top <= low
    weights.div_(total.masked_fill(nothing, torch.inf)[..., None])
    return weights, (top + total.log()).masked_fill(nothing, -torch.inf)


def _kept(like: Tensor, number: int, seed: Tensor | None, dropout: float) -> Tensor | None:
    """What dropout makes of each weight of a block, 0 or 1 / (1 - dropout): the same in both
    passes.
    """
    if seed is None:
        return None
    generator = torch.Generator(like.device).manual_seed(int(seed[0]) + number)
    return torch.empty_like(like).bernoulli_(1 - dropout, generator=generator).div_(1 - dropout)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor | None,
    stop: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    at: Tensor | None,
    key_at: Tensor | None,
    seed: Tensor | None,
    scale: float,
    softcap: float | None,
    dropout: float,
    kernels: bool,
    with_lse: bool,
    with_weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, weights = _empty(
        q,
        k,
        v,
        start,
        stop,
        mask,
        bias,
        sinks,
        slopes,
        at,
        key_at,
        seed,
        scale,
        softcap,
        dropout,
        kernels,
        with_lse,
        with_weights,
    )
    if kernels and not with_weights and seed is None and not cpu.refuses(q, 0.0, False):
        cpu.forward(
            q,
            k,
            v,
            start,
            stop,
            mask,
            bias,
            sinks,
            slopes,
            at,
            key_at,
            scale,
            softcap,
            out,
            lse if with_lse else None,
        )
        return out, lse, weights
    bias = _joined(bias, slopes, at, key_at, _work(q.dtype))
    q, k, v = (x.to(_work(x.dtype)) for x in (q, k, v))
    # with dropout the blocks must be those of the backward pass, which draws for each of them again
    straight = weights if with_weights and weights.dtype == q.dtype and seed is None else None
    with exact(q):
        for part in _parts(q, k, v, start, stop, mask, bias, sinks, scale, softcap, into=straight):
            for number, block in part.blocks:
                here, keys = block.rows, block.keys
                p, block_lse = _weights(block, part.sinks, with_lse)
                if with_weights:
                    rows = part.of(weights)[:, :, here]
                    if keys.start or keys.stop < rows.shape[3]:
                        rows[..., : keys.start] = 0
                        rows[..., keys.stop :] = 0
                    if rows[..., keys].data_ptr() != p.data_ptr():
                        rows[..., keys] = p
                if block_lse is not None and with_lse:
                    part.of(lse)[:, :, here] = block_lse
                kept = _kept(p, number, seed, dropout)
                part.of(out)[:, :, here] = grouped(
                    p if kept is None else p * kept, part.v[:, :, keys]
                )
    return out, lse, weights


def _empty(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor | None,
    stop: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    at: Tensor | None,
    key_at: Tensor | None,
    seed: Tensor | None,
    scale: float,
    softcap: float | None,
    dropout: float,
    kernels: bool,
    with_lse: bool,
    with_weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    # the heads of a token lie side by side, as the output projection wants them
    return (
        q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2),
        q.new_empty(q.shape[:3] if with_lse else (0,), dtype=_work(q.dtype)),
        q.new_empty(*q.shape[:3], k.shape[2]) if with_weights else q.new_empty(0),
    )


_SCHEMA = f"({_INPUTS}, bool with_lse, bool with_weights) -> (Tensor, Tensor, Tensor)"
attend = torch.library.custom_op("multihead::attend", _forward, mutates_args=(), schema=_SCHEMA)
attend.register_fake(_empty)


@torch.library.custom_op(
    "multihead::attend_backward",
    mutates_args=(),
    schema=(
        f"(Tensor grad, Tensor? grad_lse, Tensor? grad_weights, Tensor out, Tensor lse, {_INPUTS}, "
        "bool with_bias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)
def attend_backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    grad_weights: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor | None,
    stop: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    at: Tensor | None,
    key_at: Tensor | None,
    seed: Tensor | None,
    scale: float,
    softcap: float | None,
    dropout: float,
    kernels: bool,
    with_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, bias and sinks; of what isn't there, or isn't wanted, one of no
    elements.

    With A the weights and dA what reaches them, ds = A * (dA - rowsum(A * dA)); the log-sum-exp
    adds A * dlse to it.
    """
    work = _work(q.dtype)
    dq, dk, dv = (
        torch.zeros_like(x, dtype=work, memory_format=torch.contiguous_format) for x in (q, k, v)
    )
    dbias, dsinks = (
        x if x is None else torch.zeros_like(x, dtype=work, memory_format=torch.contiguous_format)
        for x in (bias if with_bias else None, sinks)
    )
    types = [q.dtype if x is None else x.dtype for x in (q, k, v, bias, sinks)]
    q, k, v, grad, out = (x.to(work) for x in (q, k, v, grad, out))
    with exact(q):
        reaches = (grad * out).sum(-1)
        if grad_lse is not None:
            # a row with nothing to read has lse = -inf, and whatever was computed from that may
            # well be NaN
            reaches -= grad_lse.masked_fill(lse.isneginf(), 0)
        fast = (
            kernels
            and grad_weights is None
            and seed is None
            and lse.numel() > 0
            and not cpu.refuses(q, 0.0, False)
            and (bias is None or bool(lse.masked_fill(lse.isneginf(), 0).abs().max() < FAR))
        )
        if fast:
            dq, dk, dv = cpu.backward(
                grad,
                reaches,
                lse,
                q,
                k,
                v,
                start,
                stop,
                mask,
                bias,
                slopes,
                at,
                key_at,
                scale,
                softcap,
                dbias,
            )
        else:
            bias = _joined(bias, slopes, at, key_at, work)
        for part in (
            ()
            if fast
            else _parts(
                q, k, v, start, stop, mask, bias, sinks, scale, softcap, slopes=softcap is not None
            )
        ):
            v_t = part.v.transpose(-1, -2)
            dk_part, dv_part = dk[part.batch, part.groups], dv[part.batch, part.groups]
            for number, block in part.blocks:
                here, keys = block.rows, block.keys
                g = part.of(grad)[:, :, here]
                a, _ = _weights(block, part.sinks, False)
                ds = grouped(g, v_t[..., keys])
                kept = _kept(a, number, seed, dropout)
                if kept is not None:
                    ds.mul_(kept)
                reach = part.of(reaches)[:, :, here]
                if grad_weights is not None:
                    more = part.of(grad_weights)[:, :, here, keys].to(work)
                    ds.add_(more)
                    reach += (a * more).sum(-1)
                dv_part[:, :, keys] += _gathered(
                    a if kept is None else a * kept, g, part.k.shape[1]
                )
                ds.sub_(reach[..., None]).mul_(a)
                if dbias is not None:
                    into = cut(_given(_share(dbias, part.batch, part.heads)), here, keys)
                    into += ds.sum_to_size(into.shape)
                if block.slope is not None:
                    ds.mul_(block.slope)
                part.of(dq)[:, :, here] = grouped(ds, part.k[:, :, keys])
                dk_part[:, :, keys] += _gathered(ds, part.q[:, :, here], part.k.shape[1])
        if not fast:
            dq *= scale
            dk *= scale
        if sinks is not None and dsinks is not None:
            read = torch.exp(sinks.to(work)[..., None] - lse).masked_fill(lse.isneginf(), 0)
            dsinks += (-reaches * read).sum(-1).sum_to_size(dsinks.shape)
    found = (x if x is not None else q.new_zeros(0) for x in (dq, dk, dv, dbias, dsinks))
    return tuple(x.to(dtype) for x, dtype in zip(found, types))  # type: ignore[return-value]


def _joined(
    bias: Tensor | None,
    slopes: Tensor | None,
    at: Tensor | None,
    key_at: Tensor | None,
    dtype: torch.dtype,
) -> Tensor | None:
    """The bias of the blocks, which know nothing of slopes."""
    if slopes is None or at is None or key_at is None:
        return bias
    add = falling(slopes, at, key_at, dtype)
    return add if bias is None else add + bias


def _given(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def _gathered(p: Tensor, x: Tensor, groups: int) -> Tensor:
    """p `[B, H, rows, keys]`, x `[B, H, rows, E]` -> what each key gets from all heads of its
    group, `[B, G, keys, E]`.
    """
    p, x = (t.unflatten(1, (groups, t.shape[1] // groups)).flatten(2, 3) for t in (p, x))
    return p.transpose(-1, -2) @ x


@attend_backward.register_fake
def _empty_backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    grad_weights: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor | None,
    stop: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    bias = bias if rest[-1] else None
    wide = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return (*wide, *(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (bias, sinks)))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:_TENSORS], *output[:2])
    ctx.numbers, (ctx.with_lse, ctx.with_weights) = (
        inputs[_TENSORS : _TENSORS + _NUMBERS],
        inputs[-2:],
    )


def _gradients(
    ctx: Any, grad: Tensor, grad_lse: Tensor, grad_weights: Tensor
) -> tuple[Tensor | None, ...]:
    *tensors, out, lse = ctx.saved_tensors
    run = attend_backward if torch.compiler.is_compiling() else _AttendBackward.apply
    with_bias = tensors[6] is not None and ctx.needs_input_grad[6]
    dq, dk, dv, dbias, dsinks = run(
        grad,
        grad_lse if ctx.with_lse else None,
        grad_weights if ctx.with_weights else None,
        out,
        lse,
        *tensors,
        *ctx.numbers,
        with_bias,
    )
    return (
        dq,
        dk,
        dv,
        None,
        None,
        None,
        dbias if with_bias else None,
        None if tensors[7] is None else dsinks,
        *(None,) * (_NUMBERS + 6),
    )


attend.register_autograd(_gradients, setup_context=_save)


_attend_once = torch.library.custom_op(
    "multihead::attend_once", _forward, mutates_args=(), schema=_SCHEMA
)
_attend_once.register_fake(_empty)


class _Attend(torch.autograd.Function):
    """The same for torch.func, which takes no operator that brings its own gradients: hence one
    without.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _attend_once(*inputs)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        _save(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, *grads)


class _AttendBackward(torch.autograd.Function):
    """The backward pass as a step that can be recorded (torch.func always does), and says so when
    it is to be differentiated.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        return attend_backward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(
            "the gradient of multihead.attention can't itself be differentiated: its backward pass"
            " keeps no weights. For second derivatives write the attention out with torch's own"
            " operations"
        )


def _fold(size: int, values: tuple[Any, ...], dims: tuple[Any, ...], loose: range) -> list[Any]:
    """vmap's inputs, each with a mapped axis or none, as inputs of a batch `size` times as large.

    `loose` are the numbers of those whose own batch may be 1: they are stretched to the batch of
    the first input.
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
    if inputs[_SEED] is not None and dims[_SEED] is None:
        return _one_by_one(op, info.batch_size, dims, inputs)
    size, there = info.batch_size, (True, *inputs[-2:])
    parts = list(op(*_fold(size, _one_seed(inputs, dims, _SEED), dims, _LOOSE)))
    for i, x in enumerate(parts):
        if there[i]:
            parts[i] = x.unflatten(0, (size, x.shape[0] // size))
    return tuple(parts), tuple(0 if x else None for x in there)


def _one_by_one(
    op: Any, size: int, dims: tuple[Any, ...], inputs: tuple[Any, ...]
) -> tuple[Any, Any]:
    """One draw of dropout for all elements (as in a Jacobian, whose forward pass came before): each
    by itself repeats it.
    """
    picked = (
        [x if dim is None else x.select(dim, i) for x, dim in zip(inputs, dims)]
        for i in range(size)
    )
    return tuple(map(torch.stack, zip(*(op(*x) for x in picked)))), (0,) * len(
        op._opoverload._schema.returns
    )


def _vmap_backward(info: Any, dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, Any]:
    seed = _AHEAD + _SEED
    if inputs[seed] is not None and dims[seed] is None:
        return _one_by_one(attend_backward, info.batch_size, dims, inputs)
    size = info.batch_size
    loose = range(_AHEAD + _LOOSE.start, _AHEAD + _LOOSE.stop)
    parts = list(attend_backward(*_fold(size, _one_seed(inputs, dims, seed), dims, loose)))
    there = [True, True, True, inputs[-1], inputs[12] is not None]
    for i, x in enumerate(parts):
        if there[i]:
            parts[i] = x.unflatten(0, (size, x.shape[0] // size))
    for i, number in ((3, 11), (4, 12)):  # what was stretched adds up again
        if (
            there[i]
            and inputs[number].shape[0 if dims[number] is None or dims[number] > 0 else 1] == 1
        ):
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
