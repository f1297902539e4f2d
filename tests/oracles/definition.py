"""Attention as its definition words it, in float64, with all weights in memory; torch's autograd
differentiates it.

Nothing here is shared with the library: where the two disagree, one of them is wrong.
"""

from __future__ import annotations

import torch
from torch import Tensor


def define(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output `[B, H, L, Ev]`, log-sum-exp `[B, H, L]` and weights `[B, H, L, S]` in float64.

    `allowed` is boolean, `bias` is added, both broadcast to `[B, H, L, S]`; k and v have G heads.
    """
    q, k, v = q.double(), k.double(), v.double()
    repeats = q.shape[1] // max(k.shape[1], 1)
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.double()
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    logits = scores
    if sinks is not None:
        sink = sinks.double()[:, None, None].expand(*scores.shape[:-1], 1)
        logits = torch.cat([scores, sink], -1)
    if not logits.shape[-1]:
        empty = logits.new_full(logits.shape[:-1], -torch.inf)
        return logits @ v, empty, logits
    top = logits.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top.isneginf(), 0)
    powers = torch.exp(logits - top)
    total = powers.sum(-1, keepdim=True)
    none = total == 0
    total = total.masked_fill(none, 1)
    weights = (powers / total)[..., : scores.shape[-1]]
    lse = (total.log() + top).masked_fill(none, -torch.inf)[..., 0]
    return weights @ v, lse, weights
