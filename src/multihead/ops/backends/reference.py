"""Attention in NumPy float64, as the page of mathematics has it: the definition, and the judge of
every other backend.

Shapes: q `[B, H, L, E]`, k `[B, G, S, E]`, v `[B, G, S, Ev]`; head h reads key/value head g(h) = h
    // (H / G).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ..call import AttentionCall
from . import AttentionOutput


def _to_numpy(x: Tensor | None) -> Any:
    """Booleans as they are, numbers in float64."""
    if x is None:
        return None
    numbers = x if x.dtype == torch.bool else x.double()
    return numbers.detach().cpu().resolve_conj().resolve_neg().numpy()


class ReferenceResult(NamedTuple):
    out: NDArray[np.float64]  # [B, H, L, Ev]
    weights: NDArray[
        np.float64
    ]  # [B, H, L, S]; rows sum to 1, to less with sinks, to 0 where nothing is allowed
    lse: NDArray[np.float64]  # [B, H, L]; -inf where nothing is allowed
    scores: NDArray[np.float64]  # [B, H, L, S], as they enter the softmax


def attend_reference(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    bias: ArrayLike | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: ArrayLike | None = None,
    largest: float = np.inf,
) -> ReferenceResult:
    """Order of the definition: scale, softcap, bias, mask, sinks, softmax. `mask` is boolean, True
    = may read. A query with a score, or a sink, that is NaN or +inf is NaN in everything.

    Scores whose absolute values are above `largest` are infinite, as they are in the dtype of
    which it is the largest number; a sum with a finite bias is never below -`largest`.

    >>> one = np.ones((1, 1, 2, 4))
    >>> attend_reference(one, one, one, mask=np.tril(np.ones((2, 2), bool))).weights[0, 0].tolist()
    [[1.0, 0.0], [0.5, 0.5]]
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)

    scale = max(q.shape[-1], 1) ** -0.5 if scale is None else scale
    scores = _within(scale * (q @ k.swapaxes(-1, -2)), largest)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    if bias is not None:
        bias = np.asarray(bias, np.float64)
        lowest = -min(largest, np.finfo(np.float64).max)
        floor = np.where(bias == -np.inf, -np.inf, lowest)
        scores = _within(np.maximum(scores + bias, floor), largest)
    if mask is not None:
        scores = np.where(np.asarray(mask, bool), scores, -np.inf)

    top = scores.max(-1, initial=-np.inf)
    if sinks is not None:
        sinks = np.asarray(sinks, np.float64)[:, None]
        top = np.maximum(top, sinks)
    shift = np.where(np.isneginf(top), 0.0, top)
    weights = np.exp(scores - shift[..., None])
    total = weights.sum(-1)
    if sinks is not None:
        total = total + np.exp(sinks - shift)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + shift
    weights = weights / np.where(total == 0, 1.0, total)[..., None]
    return ReferenceResult(weights @ v, weights, lse, scores)


def _within(scores: NDArray[np.float64], largest: float) -> NDArray[np.float64]:
    return np.where(np.abs(scores) > largest, np.copysign(np.inf, scores), scores)


class ReferenceBackend:
    """The definition as a backend, for comparisons."""

    def unsupported_reason(
        self, call: AttentionCall, *, return_lse: bool = False, return_weights: bool = False
    ) -> str | None:
        """Why the definition doesn't hold for a call as it is."""
        if call.dropout or call.is_tracked():
            return "it has neither dropout nor gradients (backend='torch' has both)"
        return None

    def forward(
        self, call: AttentionCall, *, return_lse: bool = False, return_weights: bool = False
    ) -> AttentionOutput:
        """The definition of a call, in the dtypes of the other backends."""
        q, work = call.q, call.score_dtype()
        if q.is_meta:
            return _shapes(call, return_lse, return_weights)
        result = attend_reference(
            _to_numpy(call.q),
            _to_numpy(call.k),
            _to_numpy(call.v),
            _to_numpy(call.allowed()),
            bias=_to_numpy(call.added(torch.float64)),
            scale=call.scale,
            softcap=call.softcap,
            sinks=_to_numpy(call.sinks),
            largest=torch.finfo(work).max,
        )
        return AttentionOutput(
            torch.from_numpy(result.out).to(q.device, q.dtype),
            torch.from_numpy(result.lse).to(q.device, work) if return_lse else None,
            torch.from_numpy(result.weights).to(q.device, q.dtype) if return_weights else None,
        )


def _shapes(call: AttentionCall, return_lse: bool, return_weights: bool) -> AttentionOutput:
    """Results without numbers, of meta tensors."""
    q, rows, work = call.q, call.q.shape[:3], call.score_dtype()
    return AttentionOutput(
        q.new_empty(*rows, call.v.shape[3]),
        q.new_empty(rows, dtype=work) if return_lse else None,
        q.new_empty(*rows, call.k.shape[2]) if return_weights else None,
    )
