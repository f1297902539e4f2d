"""Attention in NumPy float64, as the page of mathematics has it: the definition, and the judge of
every other backend.

Shapes: q `[B, H, L, E]`, k `[B, G, S, E]`, v `[B, G, S, Ev]`; head h reads key/value head g(h) = h
    // (H / G).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray


class Result(NamedTuple):
    out: NDArray[np.float64]  # [B, H, L, Ev]
    weights: NDArray[
        np.float64
    ]  # [B, H, L, S]; rows sum to 1, to less with sinks, to 0 where nothing is allowed
    lse: NDArray[np.float64]  # [B, H, L]; -inf where nothing is allowed
    scores: NDArray[np.float64]  # [B, H, L, S], as they enter the softmax


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    bias: ArrayLike | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: ArrayLike | None = None,
) -> Result:
    """Order of the definition: scale, softcap, bias, mask, sinks, softmax. `mask` is boolean, True
    = may read.

    >>> one = np.ones((1, 1, 2, 4))
    >>> attention(one, one, one, mask=np.tril(np.ones((2, 2), bool))).weights[0, 0].tolist()
    [[1.0, 0.0], [0.5, 0.5]]
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)

    scores = (q.shape[-1] ** -0.5 if scale is None else scale) * (q @ k.swapaxes(-1, -2))
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    if bias is not None:
        scores = scores + np.asarray(bias, np.float64)
    if mask is not None:
        scores = np.where(np.asarray(mask, bool), scores, -np.inf)

    top = scores.max(-1, initial=-np.inf)
    if sinks is not None:
        sinks = np.asarray(sinks, np.float64)[:, None]
        top = np.maximum(top, sinks)
    shift = np.where(np.isfinite(top), top, 0.0)
    weights = np.exp(scores - shift[..., None])
    total = weights.sum(-1)
    if sinks is not None:
        total = total + np.exp(sinks - shift)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + shift
    weights = weights / np.where(total == 0, 1.0, total)[..., None]
    return Result(weights @ v, weights, lse, scores)
