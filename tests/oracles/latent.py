"""Multi-head latent attention in plain torch float64, from DeepSeek-V2's formulas (2024, section
2.1, equations 9 to 19), with keys and values of every head written out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oracles.definition import attend


def attend_latent(
    layer: Any, x: Tensor, allowed: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The output `[B, L, D]` of a `LatentAttention`, its weights `[B, H, L, S]` and the values
    `[B, H, S, Ev]`, for positions from 0 on, rotated by halves.
    """
    heads, latent_dim, x = layer.num_heads, layer.kv_latent_dim, x.double()
    if layer.q_latent_dim is None:
        q = project(layer.q_proj, x)
    else:
        q = project(layer.q_up_proj, normalize(layer.q_norm, project(layer.q_down_proj, x)))
    q = q.unflatten(-1, (heads, -1)).transpose(1, 2)
    down = project(layer.kv_down_proj, x)
    latent, shared = normalize(layer.kv_norm, down[..., :latent_dim]), down[..., latent_dim:]
    up = project(layer.kv_up_proj, latent).unflatten(-1, (heads, -1)).transpose(1, 2)
    k, values = up[..., : layer.head_dim], up[..., layer.head_dim :]
    shared = torch.stack([rotate(shared, layer.positions.theta)] * heads, 1)
    q = torch.cat(
        [q[..., : layer.head_dim], rotate(q[..., layer.head_dim :], layer.positions.theta)], -1
    )
    out, _, weights = attend(q, torch.cat([k, shared], -1), values, allowed)
    return project(layer.out_proj, out.transpose(1, 2).flatten(2)), weights, values


def project(linear: Any, x: Tensor) -> Tensor:
    y = x @ linear.weight.double().T
    return y if linear.bias is None else y + linear.bias.double()


def normalize(norm: Any, x: Tensor) -> Tensor:
    """Root mean square norm (Zhang and Sennrich 2019)."""
    if norm is None:
        return x
    eps = torch.finfo(norm.weight.dtype).eps if norm.eps is None else norm.eps
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight.double()


def rotate(x: Tensor, theta: float) -> Tensor:
    half, positions = x.shape[-1] // 2, torch.arange(x.shape[-2], dtype=torch.float64)
    angle = positions[:, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1
    )
