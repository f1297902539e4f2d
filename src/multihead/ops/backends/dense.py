"""All weights at once, in plain torch operations: under transforms of torch.func, for forward-mode
derivatives and for second derivatives, which the other backends don't have."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..call import AttentionCall
from . import AttentionOutput
from .blocks import add_bias, autocast_off


def attend_dense(
    call: AttentionCall,
    *,
    return_lse: bool = False,
    return_weights: bool = False,
    kept: Tensor | None = None,
) -> AttentionOutput:
    """The definition, with all scores `[B, H, L, S]` in memory.

    Args:
        kept: `[B, H, L, S]`, what dropout multiplies the weights with; drawn where it is None.
    """
    dtype = call.score_dtype()
    q, k, v = (x.to(dtype) for x in call[:3])
    groups = k.shape[1]
    with autocast_off(q):
        by_group = q.unflatten(1, (groups, q.shape[1] // groups))
        s = call.scale * (by_group @ k.transpose(-2, -1)[:, :, None]).flatten(1, 2)
        if call.softcap:
            s = call.softcap * torch.tanh(s / call.softcap)
        add, allowed = call.added(q.dtype), call.allowed()
        if add is not None:
            s = add_bias(s, add)
        if allowed is not None:
            s = torch.where(allowed, s, -torch.inf)
        # the largest score cancels out of the result, so no gradient goes through it
        top = s.detach().amax(-1) if s.shape[-1] else s.new_full(s.shape[:-1], -torch.inf)
        sinks = None if call.sinks is None else call.sinks.to(s.dtype)[:, None]
        top = top if sinks is None else torch.maximum(top, sinks.detach())
        empty = top == -torch.inf
        shift = top.masked_fill(empty, 0)  # -inf less -inf is NaN
        powers = torch.exp(s - shift[..., None])
        total = powers.sum(-1) if sinks is None else powers.sum(-1) + torch.exp(sinks - shift)
        weights = powers / total.masked_fill(empty, torch.inf)[..., None]
        read = weights
        if call.dropout:
            read = F.dropout(weights, call.dropout) if kept is None else weights * kept
        out = (read.unflatten(1, by_group.shape[1:3]) @ v[:, :, None]).flatten(1, 2)
        lse = (top + total.log()).masked_fill(empty, -torch.inf) if return_lse else None
    dtype = call.q.dtype
    return AttentionOutput(out.to(dtype), lse, weights.to(dtype) if return_weights else None)
