"""The operator in plain torch float64, with gradients, also for rows at the edge of what numbers
hold: no keys, all of the lowest number, sinks of -inf. Written independently of the backends.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attend(
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
    """Output `[B, H, L, Ev]`, log-sum-exp `[B, H, L]` and weights `[B, H, L, S]` of float64
    inputs."""
    share, keys = q.shape[1] // k.shape[1], k.shape[2]
    k, v = (x.repeat_interleave(share, 1) for x in (k, v))
    s = (max(q.shape[3], 1) ** -0.5 if scale is None else scale) * (q @ k.mT)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    may = torch.ones_like(s, dtype=torch.bool)
    if bias is not None:
        may = may & (bias != -torch.inf)
        s = s + torch.where(bias == -torch.inf, 0.0, bias)
    if allowed is not None:
        may = may & allowed
    s = torch.where(may, s, -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    if not s.shape[-1]:
        return s @ v, q.new_full(q.shape[:3], -torch.inf), s
    empty = (s == -torch.inf).all(-1, keepdim=True)
    safe = torch.where(empty, 0.0, s)
    weights = torch.where(empty, 0.0, torch.softmax(safe, -1))
    # its gradient is the weights; autograd would take them from the rounded result
    finite = torch.where(safe == -torch.inf, 0.0, safe)
    lse = torch.logsumexp(safe, -1).detach()
    lse = lse + ((finite - finite.detach()) * weights.detach()).sum(-1)
    weights = weights[..., :keys]
    return weights @ v, torch.where(empty[..., 0], -torch.inf, lse), weights
