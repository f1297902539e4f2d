"""The public operator: one definition, computed by the backend that suits the input."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ..errors import MultiheadError
from .backends import AttentionOutput, Backend, background, cpu, jit
from .backends.custom_op import CpuBackend, TorchBackend
from .backends.onnx import OnnxBackend
from .backends.sdpa import SdpaBackend, attend_step
from .call import AttentionCall
from .masks import IntervalMask
from .modes import hidden, is_exporting_onnx, transformed
from .nested import Sequences, is_nested, pack_bias, pack_mask, refuse_nested, unpack
from .numbers import dequantize
from .slopes import AlibiBias
from .tensors import TensorLike

BACKENDS = ("auto", "torch", "cpu", "sdpa", "flex", "reference")


class AttentionOptions(TypedDict, total=False):
    """Keyword arguments of `attention` that don't change what it returns."""

    bias: Tensor | AlibiBias | None
    scale: float | Tensor | None
    softcap: float | None
    sinks: Tensor | None
    dropout: float
    k_scale: Tensor | None
    v_scale: Tensor | None
    backend: str | Backend


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: IntervalMask | TensorLike | None = None,
    *,
    return_lse: Literal[False] = False,
    return_weights: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: IntervalMask | TensorLike | None = None,
    *,
    return_lse: Literal[True],
    return_weights: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: IntervalMask | TensorLike | None = None,
    *,
    return_lse: Literal[True],
    return_weights: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: IntervalMask | TensorLike | None = None,
    *,
    return_lse: Literal[False] = False,
    return_weights: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: IntervalMask | TensorLike | None = None,
    *,
    return_lse: bool = False,
    return_weights: bool = False,
    **options: Unpack[AttentionOptions],
) -> Tensor | tuple[Tensor, ...]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: IntervalMask | TensorLike | None = None,
    *,
    bias: Tensor | AlibiBias | None = None,
    scale: float | Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    return_lse: bool = False,
    return_weights: bool = False,
    backend: str | Backend = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """Multi-head scaled dot-product attention (Vaswani et al. 2017, equation 1, for each head).

    For query head h, which attends with key/value head g = h // (H / G):

        s = scale * q_h k_g^T               s = softcap * tanh(s / softcap), if softcap
        s = s + bias                        s = -inf where the mask forbids
        p = softmax(s), with the sink as one more logit       out_h = dropout(p) v_g

    A query that may attend to no key gets zeros, never NaN. The output is the same whatever else is
    asked for.

    Args:
        q: queries `[B, H, L, E]`; float64, float32, bfloat16 or float16, as k and v.
        k: keys `[B, G, S, E]`; G divides H. Or int8, as `multihead.layers.QuantizedCache` has them.
        v: values `[B, G, S, Ev]`; int8 if k is.
        mask: an interval mask (`causal()`, `padding(...)`, joined with `&`); or booleans that
            broadcast to `[B, H, L, S]`, True where a query may attend to a key; or floating
            numbers, which are added to `bias`. A tensor, a list or a NumPy array.
        bias: floating numbers added to the scores; broadcasts to `[B, H, L, S]`. Or `AlibiBias`.
        scale: factor of the scores, 1 / sqrt(E) by default; or a tensor that broadcasts to
            `[B, H, L, 1]`, which gets its gradient.
        softcap: bound of the scores' absolute values.
        sinks: `[H]`, a logit for each head that joins its softmax and has no value.
        dropout: probability with which a weight is dropped; the others are scaled up.
        k_scale, v_scale: `[B, G, S]`, floating, what int8 keys and values are multiplied with.
            The few queries of a decoding step read int8 as it lies in memory, on a CPU; otherwise
            the products are made first.
        return_lse: also return the log-sum-exp of each query's scores.
        return_weights: also return the weights p, those before dropout.
        backend: "auto", "torch" (a block of queries at a time, any device), "cpu" (kernels compiled
            by Numba), "sdpa" (torch's fused kernels), "flex" (FlexAttention, on CUDA), "reference"
            (NumPy float64), or an object with the methods of `multihead.ops.Backend`. A named
            backend raises for what it can't compute exactly; `backend_for` gives what "auto" takes.

    Returns:
        The output `[B, H, L, Ev]` in the dtype of q; or a tuple of it and what was asked for, in
        this order: the log-sum-exp `[B, H, L]` in float32, or float64 where q or the bias is (-inf
        of a query without keys), and the weights `[B, H, L, S]` in the dtype of q.

    Raises:
        MultiheadError: shapes that don't fit together, numbers out of range, a named backend that
            doesn't support the input.
        TypeError: an integer mask, a bias of other numbers, dtypes that differ; q, k, v, bias or
            sinks that aren't tensors; a softcap or dropout that requires a gradient.

    Nested tensors of the jagged layout, `[B, H, j, E]` as for torch's own operator, are computed as
    packed sequences, each query with the keys of its sequence; the output is nested again.

    Under `torch.autocast` q, k and v are cast as for torch's own operator. Gradients reach q, k, v,
    bias, sinks and a scale that is a tensor through all results. Transforms of `torch.func`,
    forward-mode derivatives and second derivatives (`create_graph=True`) take plain torch
    operations, with all weights in memory.

    Traces, modes, tensor subclasses and whoever else listens to torch's operators see the operator
    `multihead::attend`, or those of torch.

    >>> import torch
    >>> from multihead.masks import causal
    >>> q, k, v = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    >>> attention(q, k, v, causal()).shape
    torch.Size([1, 4, 5, 8])
    >>> out, weights = attention(q, k, v, causal(), return_weights=True)
    >>> weights[0, 0, 0].tolist()
    [1.0, 0.0, 0.0, 0.0, 0.0]
    """
    if not torch.compiler.is_compiling() and has_torch_function((q, k, v, mask, bias, sinks)):
        # like torch's own operators: a `TorchFunctionMode` may replace it, as an instrumentation
        # does
        if k_scale is not None and v_scale is not None:  # replacements read numbers
            k, v = dequantize(k, k_scale, q.dtype), dequantize(v, v_scale, q.dtype)
        replaced: Tensor | tuple[Tensor, ...] = handle_torch_function(
            attention,
            (q, k, v, mask, bias, sinks),
            q,
            k,
            v,
            mask,
            bias=bias,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            dropout=dropout,
            return_lse=return_lse,
            return_weights=return_weights,
            backend=backend,
        )
        return replaced
    if (
        mask is None
        and bias is None
        and softcap is None
        and sinks is None
        and k_scale is None
        and v_scale is None
        and type(dropout) is float
        and dropout == 0.0
        and backend == "auto"
        and not (return_lse or return_weights or torch.is_grad_enabled())
        and (step := attend_step(q, k, v, scale)) is not None
    ):
        return step
    if is_nested(q, k, v):
        return _attend_nested(
            (q, k, v),
            mask,
            bias,
            return_weights,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            dropout=dropout,
            return_lse=return_lse,
            backend=backend,
        )
    if is_exporting_onnx() and isinstance(mask, IntervalMask) and mask.rules:
        # defined whatever the values are, which a graph can't check
        mask = mask.dense(q.shape[2], k.shape[2], q.device)
    call = AttentionCall.lower(
        q,
        k,
        v,
        mask,
        bias=bias,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        dropout=dropout,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    if backend == "reference" and isinstance(mask, IntervalMask):
        # the reference judges the others, so it takes the rules' dense form, not their bounds
        allowed = mask.dense(q.shape[2], k.shape[2], q.device)
        call = call._replace(start=None, stop=None, low=None, high=None, mask=allowed)
    result = _run(call, return_lse, return_weights, backend)
    if not return_lse and not return_weights:
        return result.out
    asked = (True, return_lse, return_weights)
    return tuple(x for x, wanted in zip(result, asked, strict=True) if wanted and x is not None)


def _attend_nested(
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: IntervalMask | TensorLike | None,
    bias: Tensor | AlibiBias | None,
    return_weights: bool,
    **options: Any,
) -> Tensor | tuple[Tensor, ...]:
    """Attention of sequences of different lengths, as packed documents: nested q `[B, H, j, E]`."""
    if return_weights:
        refuse_nested(
            "return_weights=True",
            "the weights of each sequence have another size",
            "ask for the weights of one sequence, of q.unbind()[b][None] and so on",
        )
    (q, queries), (k, keys), (v, values) = (
        unpack(name, x, 2, shape)
        for name, x, shape in zip("qkv", inputs, ("[B, H, j, E]", "[B, G, j, E]", "[B, G, j, Ev]"))
    )

    def describe() -> str:
        lengths = [x.lengths.tolist() for x in (queries, keys, values)]
        return (
            f"q, k and v are nested with the lengths {lengths}: expected one batch size, and one"
            " length of keys and values in each sequence"
        )

    v = keys.align(v, values, describe)
    if queries.lengths.shape != keys.lengths.shape:
        raise MultiheadError(describe())
    packed = [x.transpose(0, 1)[None] for x in (q, k, v)]
    result = attention(
        packed[0],
        packed[1],
        packed[2],
        pack_mask(mask, queries, keys),
        bias=pack_bias(bias, queries, keys),
        **options,
    )
    if isinstance(result, tuple):
        out, lse = result
        return _renest(out, queries), _renest(lse, queries)
    return _renest(result, queries)


def _renest(packed: Tensor, queries: Sequences) -> Tensor:
    """`[1, H, total, ...]` as the nested `[B, H, j, ...]`."""
    return queries.nest(packed[0].transpose(0, 1)).transpose(1, 2)


def compute(call: AttentionCall) -> Tensor:
    """The output `[B, H, L, Ev]` of a lowered call, by the backend that suits it."""
    return _run(call).out


def compute_weights(call: AttentionCall) -> Tensor:
    """The weights `[B, H, L, S]` of a lowered call, those before dropout."""
    weights = _run(call._replace(dropout=0.0), return_weights=True).weights
    assert weights is not None
    return weights


def _run(
    call: AttentionCall,
    return_lse: bool = False,
    return_weights: bool = False,
    backend: str | Backend = "auto",
) -> AttentionOutput:
    asked = {"return_lse": return_lse, "return_weights": return_weights}
    if call.k_scale is not None:
        is_chosen = backend == "cpu" or (backend == "auto" and not cpu.slow_reason(call))
        if is_chosen and not _int8_reason(call, return_weights):
            return _CPU.forward(call, **asked)
        call = call.dequantized()
    if is_exporting_onnx():
        return _ONNX.forward(call, **asked)
    if backend == "auto":
        return _named(_choose(call, return_lse, return_weights).backend).forward(call, **asked)
    if isinstance(backend, str):
        chosen, name = _named(backend), repr(backend)
    elif isinstance(backend, Backend):
        chosen, name = backend, type(backend).__name__
    else:
        raise TypeError(
            f"backend={backend!r}: expected one of {', '.join(BACKENDS)}, or an object with the"
            " methods unsupported_reason and forward (see multihead.ops.Backend)"
        )
    if reason := chosen.unsupported_reason(call, **asked):
        raise MultiheadError(
            f"backend={name} doesn't support this input: {reason}; use backend='auto', which gives"
            " the same result for every input"
        )
    # who asks for the kernels by name waits for them
    with jit.waiting() if chosen is _CPU else nullcontext():
        result = chosen.forward(call, **asked)
    if chosen is _CPU and jit.MISSING:  # found out on the way; torch computed the result
        raise MultiheadError(f"backend={name} isn't available: {jit.MISSING}; use backend='auto'")
    if (return_lse and result.lse is None) or (return_weights and result.weights is None):
        missing = "weights" if result.lse is not None or not return_lse else "lse"
        raise MultiheadError(
            f"backend={name} returned no {missing}, though return_{missing}=True: its"
            " unsupported_reason should have given a reason"
        )
    return result


_ONNX = OnnxBackend()
_TORCH, _CPU, _SDPA = TorchBackend(), CpuBackend(), SdpaBackend()
_BUILT_IN: dict[str, Backend] = {"torch": _TORCH, "cpu": _CPU, "sdpa": _SDPA}


def _named(name: str) -> Backend:
    if name not in BACKENDS:
        raise MultiheadError(f"backend={name!r}: expected one of {', '.join(BACKENDS)}")
    if name == "flex" and name not in _BUILT_IN:
        from .backends.flex import FlexBackend

        _BUILT_IN[name] = FlexBackend()
    if name == "reference" and name not in _BUILT_IN:
        from .backends.reference import ReferenceBackend

        _BUILT_IN[name] = ReferenceBackend()
    return _BUILT_IN[name]


class BackendChoice(NamedTuple):
    """The name of the backend that computes an input, and the reason for it.

    >>> BackendChoice("sdpa", "torch's fused kernels compute exactly this").backend
    'sdpa'
    """

    backend: str
    reason: str


def backend_for(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: IntervalMask | TensorLike | None = None,
    *,
    bias: Tensor | AlibiBias | None = None,
    scale: float | Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    return_lse: bool = False,
    return_weights: bool = False,
) -> BackendChoice:
    """The backend that `attention` takes for q `[B, H, L, E]`, k `[B, G, S, E]` and v `[B, G, S,
    Ev]` with `backend="auto"`, and the reason. Arguments as there.

    Raises:
        MultiheadError, TypeError: as `attention`.

    >>> import torch
    >>> from multihead.masks import causal
    >>> x = torch.randn(1, 4, 5, 8)
    >>> backend_for(x, x, x, causal()).backend, backend_for(x, x, x, softcap=30.0).backend
    ('sdpa', 'torch')
    """
    call = AttentionCall.lower(
        q,
        k,
        v,
        mask,
        bias=bias,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        dropout=dropout,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return _choose(call, return_lse, return_weights)


def _int8_reason(call: AttentionCall, return_weights: bool) -> str | None:
    """Why int8 keys and values are multiplied with their scales before the call, or None."""
    if transformed():
        return "torch.func and forward-mode derivatives need plain torch operations"
    return cpu.unsupported_reason(call, return_weights) or cpu.int8_reason(call)


def _choose(call: AttentionCall, return_lse: bool, return_weights: bool) -> BackendChoice:
    """The fastest backend that computes a call exactly."""
    if call.k_scale is not None:
        if not _int8_reason(call, return_weights) and not cpu.slow_reason(call):
            return BackendChoice("cpu", "a compiled kernel reads int8 keys and values")
        call = call.dequantized()
    if transformed():
        return BackendChoice(
            "torch", "torch.func and forward-mode derivatives need plain torch operations"
        )
    no_cpu = cpu.unsupported_reason(call, return_weights)
    if (not no_cpu or no_cpu == jit.MISSING) and not cpu.slow_reason(call):
        if not no_cpu and not background.is_busy():
            return BackendChoice(
                "cpu", "large enough for compiled kernels, which skip what the mask leaves out"
            )
        if no_cpu and not hidden(call.q):
            jit.report_missing()
    no_sdpa = _SDPA.unsupported_reason(
        call, return_lse=return_lse, return_weights=return_weights
    ) or _SDPA.slow_reason(call)
    if not no_sdpa:
        return BackendChoice("sdpa", "torch's fused kernels compute exactly this")
    if call.q.is_cuda and call.mask is None and not call.is_unmasked():
        flex = _named("flex")
        if not flex.unsupported_reason(call, return_weights=return_weights):
            return BackendChoice("flex", no_sdpa)
    return BackendChoice("torch", no_sdpa)
