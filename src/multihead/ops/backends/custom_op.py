"""Attention and its gradients as operators that torch can record: one step of a compiled or
exported graph, and one of autograd.

The schema is that of `AttentionCall`: its fields in their order, then the seed of the dropout, and
whether the compiled kernels (cpu.py) or torch (blockwise.py) compute it. What these operators lack,
the dense backend computes: calls under transforms of torch.func, forward-mode derivatives, and
second derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

import torch
from torch import Tensor

from ..call import AttentionCall
from ..modes import has_plain_memory, transformed
from . import AttentionOutput, cpu, jit
from .blockwise import attend_blockwise, differentiate_blockwise, draw_kept_weights
from .dense import attend_dense
from .flops import register_flops

# log-sum-exps that are too rounded to give weights back: those of queries whose biases are all the
# lowest, or of scores that large
FAR = 1e4
T = TypeVar("T")
_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    int | None: "SymInt?",
    float: "float",
    float | None: "float?",
}
_HINTS = get_type_hints(AttentionCall)
_FIELDS = AttentionCall._fields[:-1]  # but for the context, which is no argument
_INPUTS = ", ".join(f"{_TYPES[_HINTS[name]]} {name}" for name in _FIELDS)
_INPUTS += ", Tensor? seed, bool kernels"
_SCHEMA = f"({_INPUTS}, bool with_lse, bool with_weights) -> (Tensor, Tensor, Tensor)"


def _unpack(inputs: tuple[Any, ...]) -> tuple[AttentionCall, Tensor | None, bool]:
    """Call, seed and kernels, of an operator's inputs from q on."""
    n = len(_FIELDS)
    return AttentionCall(*inputs[:n]), inputs[n], inputs[n + 1]


def _forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, weights = _empty(*inputs)
    call, seed, kernels = _unpack(inputs)
    with_lse, with_weights = inputs[-2:]
    lse_or_none = lse if with_lse else None
    fast = kernels and not cpu.unsupported_reason(call, with_weights)
    if not (fast and _try(cpu.attend_compiled, call, out, lse_or_none)):
        attend_blockwise(
            call.dequantized(), seed, out, lse_or_none, weights if with_weights else None
        )
    return out, lse, weights


def _try(compute: Callable[..., T], *arguments: Any) -> T | None:
    """The results of the kernels; None, with one line on stderr, where they can't be had."""
    try:
        return compute(*arguments)
    except jit.KernelsUnavailable:
        jit.report_missing()
        return None


def _empty(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, (with_lse, with_weights) = *inputs[:3], inputs[-2:]
    work = _unpack(inputs)[0].score_dtype()
    return (
        # the heads of a token lie side by side, as the output projection wants them
        q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2),
        q.new_empty(q.shape[:3] if with_lse else (0,), dtype=work),
        q.new_empty(*q.shape[:3], k.shape[2]) if with_weights else q.new_empty(0),
    )


attend = torch.library.custom_op("multihead::attend", _forward, mutates_args=(), schema=_SCHEMA)
attend.register_fake(_empty)


def _backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    grad_weights: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *inputs: Any,
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v, bias and sinks; of what isn't there, or isn't wanted, one of no
    elements."""
    call, seed, kernels = _unpack(inputs)
    with_bias, work = inputs[-1], call.score_dtype()
    grad, out = grad.to(work), out.to(work)
    reaches = (grad * out).sum(-1)
    if grad_lse is not None:
        # a query without keys has lse = -inf, and whatever was computed from that may well be NaN
        reaches -= grad_lse.masked_fill(lse.isneginf(), 0)
    fast = (
        kernels
        and grad_weights is None
        and lse.numel() > 0
        and not cpu.unsupported_reason(call)
        and bool(lse.masked_fill(lse.isneginf(), 0).abs().max() < FAR)
    )
    found = None
    if fast:
        found = _try(cpu.differentiate_compiled, call, grad, reaches, lse, with_bias)
    if found is None:
        found = differentiate_blockwise(call, seed, grad, reaches, grad_weights, with_bias)
    dsinks = found.sinks
    if call.sinks is not None and dsinks is None:
        weight = torch.exp(call.sinks.to(work)[:, None] - lse).masked_fill(lse.isneginf(), 0)
        dsinks = (-reaches * weight).sum(-1).sum(0)
    inputs_of = (call.q, call.k, call.v, call.bias, call.sinks)
    return tuple(
        call.q.new_zeros(0) if dx is None or x is None else dx.to(x.dtype)
        for dx, x in zip((*found[:4], dsinks), inputs_of, strict=True)
    )


attend_backward = torch.library.custom_op(
    "multihead::attend_backward",
    _backward,
    mutates_args=(),
    schema=(
        f"(Tensor grad, Tensor? grad_lse, Tensor? grad_weights, Tensor out, Tensor lse, {_INPUTS}, "
        "bool with_bias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)


@attend_backward.register_fake
def _empty_backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    grad_weights: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *inputs: Any,
) -> tuple[Tensor, ...]:
    call, _, _ = _unpack(inputs)
    bias = call.bias if inputs[-1] else None
    return tuple(
        call.q.new_empty(0)
        if x is None
        else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (*call[:3], bias, call.sinks)
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    tensors = (_savable(x) if isinstance(x, Tensor) else None for x in inputs)
    ctx.save_for_backward(*tensors, *output[:2])
    ctx.numbers = [None if isinstance(x, Tensor) else x for x in inputs]


def _savable(x: Tensor) -> Tensor:
    """A tensor for the backward pass; those made in inference mode are copied."""
    return x if torch.compiler.is_compiling() or not x.is_inference() else x.clone()


def _gradients(
    ctx: Any, grad: Tensor, grad_lse: Tensor, grad_weights: Tensor
) -> tuple[Tensor | None, ...]:
    *tensors, out, lse = ctx.saved_tensors
    inputs = [number if x is None else x for x, number in zip(tensors, ctx.numbers, strict=True)]
    *inputs, with_lse, with_weights = inputs
    call, seed, _ = _unpack(tuple(inputs))
    grads = (grad, grad_lse if with_lse else None, grad_weights if with_weights else None)
    wanted = [_FIELDS.index(name) for name in ("q", "k", "v", "bias", "sinks")]
    with_bias = call.bias is not None and ctx.needs_input_grad[wanted[3]]
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        found = differentiate_dense(call, seed, grads)
    else:
        found = attend_backward(*grads, out, lse, *inputs, with_bias)
    result: list[Tensor | None] = [None] * len(ctx.numbers)
    for n, dx in zip(wanted, found, strict=True):
        result[n] = dx if ctx.needs_input_grad[n] else None
    return tuple(result)


def differentiate_dense(
    call: AttentionCall, seed: Tensor | None, grads: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients that can be differentiated once more (`create_graph=True`)."""
    kept = None if seed is None else draw_kept_weights(call, seed)
    # one tensor may be several inputs, as in self-attention, and each has its own gradient
    call = call._replace(
        q=call.q.view_as(call.q),
        k=call.k.view_as(call.k),
        v=call.v.view_as(call.v),
        bias=None if call.bias is None else call.bias.view_as(call.bias),
        sinks=None if call.sinks is None else call.sinks.view_as(call.sinks),
    )
    output = attend_dense(
        call, return_lse=grads[1] is not None, return_weights=grads[2] is not None, kept=kept
    )
    pairs = [(x, g) for x, g in zip(output, grads, strict=True) if x is not None and g is not None]
    inputs = (call.q, call.k, call.v, call.bias, call.sinks)
    tracked = [x for x in inputs if x is not None and x.requires_grad]
    found = iter(
        torch.autograd.grad(
            [x for x, _ in pairs],
            tracked,
            [g for _, g in pairs],
            create_graph=True,
            allow_unused=True,
        )
    )
    return tuple(next(found) if x is not None and x.requires_grad else None for x in inputs)


attend.register_autograd(_gradients, setup_context=_save)
register_flops()


class TorchBackend:
    """Plain torch, a block of queries at a time: every call, on any device."""

    kernels = False

    def unsupported_reason(
        self, call: AttentionCall, *, return_lse: bool = False, return_weights: bool = False
    ) -> str | None:
        return None

    def forward(
        self, call: AttentionCall, *, return_lse: bool = False, return_weights: bool = False
    ) -> AttentionOutput:
        """Output and, on request, log-sum-exp and weights."""
        if transformed():
            return attend_dense(call, return_lse=return_lse, return_weights=return_weights)
        # drawn from torch's own generator, so that torch.manual_seed makes it repeat
        seed = torch.randint(2**62, (1,), device=call.q.device) if call.dropout else None
        tracked = call.is_tracked()
        # nothing to record: straight there, which saves a tenth of a millisecond
        run: Any = _forward if not tracked and has_plain_memory(*call.tensors()) else attend
        # the gradient of sinks needs it, and so do the kernels' gradients
        with_lse = return_lse or call.sinks is not None or (self.kernels and tracked)
        out, lse, weights = run(*call[:-1], seed, self.kernels, with_lse, return_weights)
        return AttentionOutput(
            out, lse if return_lse else None, weights if return_weights else None
        )


class CpuBackend(TorchBackend):
    """Kernels compiled by Numba, for CPUs."""

    kernels = True

    def unsupported_reason(
        self, call: AttentionCall, *, return_lse: bool = False, return_weights: bool = False
    ) -> str | None:
        return cpu.unsupported_reason(call, return_weights)
