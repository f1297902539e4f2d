"""The public operator: one definition, computed by the backend that suits the input."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..errors import MultiheadError
from .backends import cpu, sdpa
from .backends import custom_op as blockwise
from .call import AttentionCall
from .masks import IntervalMask, hidden
from .slopes import AlibiBias

BACKENDS = ("auto", "torch", "cpu", "sdpa", "flex", "reference")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: IntervalMask | Tensor | None = None,
    *,
    bias: Tensor | AlibiBias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    return_lse: bool = False,
    return_weights: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """Several weighted reads of the same positions, one a head (Vaswani et al. 2017, equation 1,
    for each head).

    Order of the definition: scale, softcap, bias, mask, sinks, softmax, dropout. What is asked for
        never changes the
    output, and a row that may read nothing gives zeros.

    Args:
        q: queries `[B, H, L, E]`; float64, float32, bfloat16 or float16, as k and v.
        k: keys `[B, G, S, E]`; G divides H, and head h reads key/value head h // (H / G).
        v: values `[B, G, S, Ev]`.
        mask: an interval mask (`causal()`, `padding(...)`, joined with `&`); or booleans that
            broadcast to `[B, H, L, S]`, True where a row may read; or floating numbers, which are
            taken as `bias`.
        bias: floating numbers added to the scores, after scale and soft cap; broadcasts to `[B, H,
            L, S]`. Or `AlibiBias`, which fall with the distance of a key. With a mask both hold.
        scale: of the scores, 1 / sqrt(E) where None.
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: `[H]`, one logit a head that joins the softmax and reads nothing.
        dropout: share of the weights dropped, the rest scaled up. Returned weights are those before
            dropout.
        return_lse: also return the log-sum-exp of each row, `[B, H, L]`, float32 or better.
        return_weights: also return the weights, `[B, H, L, S]`.
        backend: "auto", "torch" (blocks of rows, any device), "cpu" (kernels that Numba compiles),
            "sdpa" (torch's fused kernels), "flex" (FlexAttention, on CUDA) or "reference" (NumPy
            float64). A named backend refuses what it can't compute exactly; `backend_for` tells
            which one "auto" takes, and why.

    Under `torch.autocast` q, k and v are cast as torch's own operator casts them. Gradients reach
    q, k, v, bias and sinks, and go through the output, the log-sum-exp and the weights, once: the
    backward pass can't itself be differentiated.

    Returns:
        The output `[B, H, L, Ev]`, or a tuple of it, the log-sum-exp and the weights, as asked.

    Raises:
        ValueError: for shapes that don't fit together, with both of them.
        TypeError: for an integer mask, or dtypes that differ.

    >>> from multihead.masks import causal
    >>> q, k, v = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    >>> attention(q, k, v, causal()).shape
    torch.Size([1, 4, 5, 8])
    """
    call = AttentionCall.lower(
        q, k, v, mask, bias=bias, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout
    )
    if backend not in BACKENDS:
        raise MultiheadError(f"backend={backend!r}: expected one of {', '.join(BACKENDS)}")
    if backend == "reference" and isinstance(mask, IntervalMask):
        # the reference judges the others, so it takes the rules' dense form, not their bounds
        allowed = mask.dense(q.shape[2], k.shape[2], q.device)
        call = call._replace(start=None, stop=None, low=None, high=None, mask=allowed)
    return _run(call, return_lse, return_weights, backend)


def compute(call: AttentionCall) -> Tensor:
    """The output `[B, H, L, Ev]` of a lowered call, by the backend that suits it."""
    return cast(Tensor, _run(call))


def compute_weights(call: AttentionCall) -> Tensor:
    """The weights `[B, H, L, S]` of a lowered call, those before dropout."""
    return _run(call._replace(dropout=0.0), return_weights=True)[1]


def _run(
    call: AttentionCall,
    return_lse: bool = False,
    return_weights: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, ...]:
    if backend == "reference":
        return _reference(call, return_lse, return_weights)
    chosen, reason = _choose(call, return_lse, return_weights, backend)
    if not chosen:
        raise MultiheadError(
            f"backend={backend!r} can't serve this input: {reason}; use backend='auto', which gives"
            " the same result for every input"
        )
    q, k, v = call[:3]
    if chosen == "sdpa":
        fused = sdpa.attention(
            q,
            k,
            v,
            call.to_mask(),
            bias=call.added(torch.promote_types(q.dtype, torch.float32)),
            scale=call.scale,
            dropout=call.dropout,
        )
        if fused is not None:
            return fused
    lse = weights = None
    if chosen == "flex":
        from .backends import flex

        out, lse = flex.attention(
            q,
            k,
            v,
            call.to_mask(),
            bias=call.added(torch.promote_types(q.dtype, torch.float32)),
            scale=call.scale,
            softcap=call.softcap,
            sinks=call.sinks,
        )
    else:
        out, lse, weights = blockwise.attention(
            q,
            k,
            v,
            call.to_mask(),
            bias=call.to_bias(),
            scale=call.scale,
            softcap=call.softcap,
            sinks=call.sinks,
            dropout=call.dropout,
            return_lse=return_lse,
            return_weights=return_weights,
            kernels=chosen == "cpu",
        )
    extra = ((lse,) if return_lse and lse is not None else ()) + (
        (weights,) if weights is not None else ()
    )
    return (out, *extra) if extra else out


class Choice(NamedTuple):
    """Which backend serves an input, and why."""

    backend: str
    reason: str


def backend_for(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: IntervalMask | Tensor | None = None,
    *,
    bias: Tensor | AlibiBias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    return_lse: bool = False,
    return_weights: bool = False,
) -> Choice:
    """Which backend `attention` takes for this input when it is left the choice, and why. Arguments
    as there.

    >>> from multihead.masks import causal
    >>> x = torch.randn(1, 4, 5, 8)
    >>> backend_for(x, x, x, causal()).backend, backend_for(x, x, x, softcap=30.0).backend
    ('sdpa', 'torch')
    """
    call = AttentionCall.lower(
        q, k, v, mask, bias=bias, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout
    )
    return _choose(call, return_lse, return_weights, "auto")


def _choose(call: AttentionCall, return_lse: bool, return_weights: bool, backend: str) -> Choice:
    """The backend to take; "" and the reason where a named one can't serve."""
    if backend == "torch":
        return Choice(backend, "named")
    q, k, v = call[:3]
    no_cpu = cpu.refuses(q, call.dropout, return_weights)
    if backend == "cpu":
        return Choice("" if no_cpu else backend, no_cpu or "named")
    if backend == "auto" and not no_cpu and not cpu.unsuited(q, k, v):
        return Choice(
            "cpu", "large enough for compiled kernels, which skip what the mask leaves out"
        )
    if no_cpu and no_cpu == cpu.MISSING and not hidden(q) and not cpu.unsuited(q, k, v):
        cpu.say_missing()
    no_sdpa = sdpa.refuses(q, v, call.softcap, call.sinks, return_lse, return_weights)
    if backend == "sdpa":
        return Choice("" if no_sdpa else backend, no_sdpa or "named")
    mask = call.to_mask()
    add = (
        call.bias
        if call.slopes is None
        else call.slopes.to(torch.promote_types(q.dtype, torch.float32))  # of its dtype
    )
    worse = no_sdpa or sdpa.unsuited(q, k, mask, add, call.dropout)
    if backend == "auto" and not worse:
        return Choice("sdpa", "torch's fused kernels compute exactly this")
    if backend == "flex" or (q.is_cuda and isinstance(mask, IntervalMask) and bool(worse)):
        from .backends import flex

        no_flex = flex.refuses(q, k, v, call.dropout, return_weights)
        if backend == "flex":
            return Choice("" if no_flex else backend, no_flex or "named")
        if not no_flex:
            return Choice("flex", str(worse))
    return Choice("torch", str(worse))


def _reference(
    call: AttentionCall, return_lse: bool, return_weights: bool
) -> Tensor | tuple[Tensor, ...]:
    from .backends import reference

    if call.dropout or call.is_tracked():
        raise MultiheadError(
            "backend='reference' has neither dropout nor gradients; use backend='torch', or"
            " torch.no_grad()"
        )

    def plain(x: Tensor | None) -> Any:
        if x is None:
            return None
        return (x if x.dtype == torch.bool else x.double()).detach().cpu().numpy()

    result = reference.attention(
        plain(call.q),
        plain(call.k),
        plain(call.v),
        plain(call.allowed()),
        bias=plain(call.added(torch.float64)),
        scale=call.scale,
        softcap=call.softcap,
        sinks=plain(call.sinks),
    )
    q = call.q
    wanted = [(result.out, q.dtype)]
    wanted += [(result.lse, torch.promote_types(q.dtype, torch.float32))] if return_lse else []
    wanted += [(result.weights, q.dtype)] if return_weights else []
    found = tuple(torch.from_numpy(x).to(q.device, dtype) for x, dtype in wanted)
    return found if len(found) > 1 else found[0]
