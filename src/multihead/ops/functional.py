"""The public operator: one definition, computed by the backend that suits the input."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import MultiheadError
from .backends import cpu, sdpa
from .backends import custom_op as blockwise
from .masks import IntervalMask, hidden, intervals
from .slopes import AlibiBias, dense

BACKENDS = ("auto", "torch", "cpu", "sdpa", "flex", "reference")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


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
    q, k, v, mask, bias = _prepared(q, k, v, mask, bias)
    _check(q, k, v, mask, bias, sinks, scale, softcap, dropout, backend)
    if backend == "reference":
        _settled(
            mask,
            q,
            k,
            # for its refusals: the judge takes the rules' own dense form, not what the others compute
            # from
        )
        return _reference(
            q,
            k,
            v,
            mask,
            dense(bias, torch.float64),
            scale,
            softcap,
            sinks,
            dropout,
            return_lse,
            return_weights,
        )
    chosen, reason = _choose(
        q, k, v, mask, bias, softcap, sinks, dropout, return_lse, return_weights, backend
    )
    if not chosen:
        raise MultiheadError(
            f"backend={backend!r} can't serve this input: {reason}; use backend='auto', which gives"
            " the same result for every input"
        )
    mask = _settled(mask, q, k)
    number = max(q.shape[-1], 1) ** -0.5 if scale is None else scale
    if chosen == "sdpa":
        fused = sdpa.attention(
            q, k, v, mask, bias=dense(bias, q.dtype), scale=number, dropout=dropout
        )
        if fused is not None:
            return fused
    lse = weights = None
    if chosen == "flex":
        from .backends import flex

        out, lse = flex.attention(
            q, k, v, mask, bias=dense(bias, q.dtype), scale=number, softcap=softcap, sinks=sinks
        )
    else:
        out, lse, weights = blockwise.attention(
            q,
            k,
            v,
            mask,
            bias=bias,
            scale=number,
            softcap=softcap,
            sinks=sinks,
            dropout=dropout,
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
    q, k, v, mask, bias = _prepared(q, k, v, mask, bias)
    _check(q, k, v, mask, bias, sinks, scale, softcap, dropout, "auto")
    _settled(mask, q, k)
    return _choose(q, k, v, mask, bias, softcap, sinks, dropout, return_lse, return_weights, "auto")


def _settled(
    mask: IntervalMask | Tensor | None, q: Tensor, k: Tensor
) -> IntervalMask | Tensor | None:
    """The mask with its rules evaluated, once a call; refuses one for another batch."""
    if not isinstance(mask, IntervalMask) or not mask.rules:
        return mask
    start, stop = mask.bounds(q.shape[2], k.shape[2], q.device)
    if start.shape[0] not in (1, q.shape[0]):
        raise MultiheadError(
            f"mask is for a batch of {start.shape[0]}, but q{list(q.shape)} and k{list(k.shape)}"
            f" have one of {q.shape[0]}"
        )
    return intervals(start, stop)


def _choose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: IntervalMask | Tensor | None,
    bias: Tensor | AlibiBias | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
    return_lse: bool,
    return_weights: bool,
    backend: str,
) -> Choice:
    """The backend to take; "" and the reason where a named one can't serve."""
    if backend == "torch":
        return Choice(backend, "named")
    no_cpu = cpu.refuses(q, dropout, return_weights)
    if backend == "cpu":
        return Choice("" if no_cpu else backend, no_cpu or "named")
    if backend == "auto" and not no_cpu and not cpu.unsuited(q, k, v):
        return Choice(
            "cpu", "large enough for compiled kernels, which skip what the mask leaves out"
        )
    if no_cpu and no_cpu == cpu.MISSING and not hidden(q) and not cpu.unsuited(q, k, v):
        cpu.say_missing()
    no_sdpa = sdpa.refuses(q, v, softcap, sinks, return_lse, return_weights)
    if backend == "sdpa":
        return Choice("" if no_sdpa else backend, no_sdpa or "named")
    add = (
        bias.slopes.to(torch.promote_types(q.dtype, torch.float32))
        if isinstance(bias, AlibiBias)
        else bias
    )  # of its dtype
    worse = no_sdpa or sdpa.unsuited(q, k, mask, add, dropout)
    if backend == "auto" and not worse:
        return Choice("sdpa", "torch's fused kernels compute exactly this")
    if backend == "flex" or (q.is_cuda and isinstance(mask, IntervalMask) and bool(worse)):
        from .backends import flex

        no_flex = flex.refuses(q, k, v, dropout, return_weights)
        if backend == "flex":
            return Choice("" if no_flex else backend, no_flex or "named")
        if not no_flex:
            return Choice("flex", str(worse))
    return Choice("torch", str(worse))


def _prepared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: IntervalMask | Tensor | None,
    bias: Tensor | AlibiBias | None,
) -> tuple[Tensor, Tensor, Tensor, IntervalMask | Tensor | None, Tensor | AlibiBias | None]:
    """Inputs as autocast wants them, and numbers that were given as a mask joined with the bias."""
    if not all(isinstance(x, Tensor) for x in (q, k, v)):
        return q, k, v, mask, bias  # refused in a moment, with its name
    kind = q.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        # as torch casts for its own operator: all but float64
        dtype = torch.get_autocast_dtype(kind)
        q, k, v = (
            x if x.dtype == torch.float64 or not x.is_floating_point() else x.to(dtype)
            for x in (q, k, v)
        )
    return q, k, v, *numbers_apart(mask, bias, q.dtype)


def numbers_apart(
    mask: IntervalMask | Tensor | None, bias: Tensor | AlibiBias | None, dtype: torch.dtype
) -> tuple[IntervalMask | Tensor | None, Tensor | AlibiBias | None]:
    """Mask and bias, where numbers that were given as a mask have joined the bias; refuses such of
    0 and 1 only.
    """
    if isinstance(mask, Tensor) and mask.is_floating_point():
        if (
            not hidden(mask)
            and mask.numel()
            and bool(((mask == 0) | (mask == 1)).all())
            and bool(mask.any())
        ):
            raise MultiheadError(
                f"mask{list(mask.shape)} is {mask.dtype} and holds only 0 and 1. Numbers are added"
                " to the scores, so it would mask nothing: use mask.bool() if 1 means that a row"
                " may read, ~mask.bool() for the opposite, bias=mask to add it all the same"
            )
        add = dense(bias, dtype)
        return None, mask if add is None else mask + add
    return mask, bias


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: object,
    bias: Tensor | AlibiBias | None,
    sinks: Tensor | None,
    scale: float | None,
    softcap: float | None,
    dropout: float,
    backend: str,
) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}: expected a torch tensor")
    shapes = f"q{list(q.shape)}, k{list(k.shape)}, v{list(v.shape)}"
    if any(x.ndim != 4 for x in (q, k, v)):
        raise MultiheadError(
            f"{shapes}: expected q[B, H, L, E], k[B, G, S, E], v[B, G, S, Ev]; "
            "split [B, L, H*E] with split_heads"
        )
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise MultiheadError(
            f"{shapes}: the batch of all three, the head width of q and k, and the heads and length"
            " of k and v must agree"
        )
    if k.shape[1] == 0 or q.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise MultiheadError(
            f"{shapes}: {q.shape[1]} query heads can't be shared evenly by {k.shape[1]} key/value"
            " heads; H must be a multiple of G"
        )
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        raise TypeError(
            f"q is {q.dtype}, k {k.dtype}, v {v.dtype}: expected one floating dtype for all three,"
            " float64, float32, bfloat16 or float16"
        )
    if isinstance(mask, Tensor):
        if mask.dtype != torch.bool:
            raise TypeError(
                f"mask is {mask.dtype}: expected bool, True where a row may read. Use mask.bool()"
                " for a 0/1 mask of that meaning, ~mask.bool() for the opposite, mask.float() for"
                " numbers to add"
            )
        _check_broadcast("mask", mask, q, k)
    elif mask is not None and not isinstance(mask, IntervalMask):
        raise TypeError(
            f"mask is a {type(mask).__name__}: expected an interval mask such as causal(), or a"
            " bool tensor"
        )
    if isinstance(bias, AlibiBias):
        bias.check(q, k)
    elif bias is not None:
        if not isinstance(bias, Tensor):
            raise TypeError(
                f"bias is a {type(bias).__name__}: expected a tensor of floating numbers, or"
                " AlibiBias(...)"
            )
        if not bias.is_floating_point():
            raise TypeError(
                f"bias is {bias.dtype}: expected floating numbers to add to the scores; a bool goes"
                " to mask="
            )
        _check_broadcast("bias", bias, q, k)
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise MultiheadError(
            f"sinks{list(sinks.shape)}: expected one logit for each of the {q.shape[1]} query heads"
        )
    if not 0 <= dropout < 1:
        raise MultiheadError(f"dropout={dropout}: expected a share of at least 0 and below 1")
    for name, number in (("scale", scale), ("softcap", softcap)):
        if number is not None and not (math.isfinite(number) and (name == "scale" or number > 0)):
            raise MultiheadError(
                f"{name}={number}: expected a finite"
                f" number{' above 0' if name == 'softcap' else ''}, or None"
            )
    if backend not in BACKENDS:
        raise MultiheadError(f"backend={backend!r}: expected one of {', '.join(BACKENDS)}")


def _check_broadcast(name: str, x: Tensor, q: Tensor, k: Tensor) -> None:
    full = (*q.shape[:3], k.shape[2])
    if x.ndim > 4 or any(
        have not in (1, want) for have, want in zip(x.shape[::-1], full[::-1], strict=False)
    ):
        raise MultiheadError(
            f"{name}{list(x.shape)} doesn't broadcast to [B, H, L, S] = {list(full)}"
        )


def _reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: IntervalMask | Tensor | None,
    bias: Tensor | None,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
    return_lse: bool,
    return_weights: bool,
) -> Tensor | tuple[Tensor, ...]:
    from .backends import reference

    tracked = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (q, k, v, bias, sinks)
    )
    if dropout or tracked:
        raise MultiheadError(
            "backend='reference' has neither dropout nor gradients; use backend='torch', or"
            " torch.no_grad()"
        )
    dense = mask.dense(q.shape[2], k.shape[2]) if isinstance(mask, IntervalMask) else mask

    def plain(x: Tensor | None) -> Any:
        return (
            None
            if x is None
            else (x if x.dtype == torch.bool else x.double()).detach().cpu().numpy()
        )

    result = reference.attention(
        plain(q),
        plain(k),
        plain(v),
        plain(dense),
        bias=plain(bias),
        scale=scale,
        softcap=softcap,
        sinks=plain(sinks),
    )
    wanted = [(result.out, q.dtype)]
    wanted += [(result.lse, torch.promote_types(q.dtype, torch.float32))] if return_lse else []
    wanted += [(result.weights, q.dtype)] if return_weights else []
    found = tuple(torch.from_numpy(x).to(q.device, dtype) for x, dtype in wanted)
    return found if len(found) > 1 else found[0]
