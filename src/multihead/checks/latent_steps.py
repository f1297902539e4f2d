"""Wrong steps of latent attention (MLA), as changes of the definition: see `bugs.BUGS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .definition import Definition, Latents, expand_latents, rotate_pairs

Expanded = tuple[Tensor, Tensor, Tensor]  # queries, keys and values [B, L, heads * E]


# ---- Of latents


def expand_without(*norms: str) -> Callable[[Latents, Definition], Expanded]:
    """Without these norms, among `q_norm` and `kv_norm`."""
    without: dict[str, Any] = dict.fromkeys(norms)
    return lambda latents, d: expand_latents(replace(latents, **without), d)


def normalize_keys_alone(latents: Latents, d: Definition) -> Expanded:
    q, k, _ = expand_latents(latents, d)
    return q, k, latents.up_v(latents.keys)


def rotary_key_of_first_head(latents: Latents, d: Definition) -> Expanded:
    q, k, v = expand_latents(latents, d)
    by_head = k.unflatten(-1, (d.num_heads, -1)).clone()
    width = d.rotary_dim or 0
    start = 0 if d.rotary_first else by_head.shape[-1] - width
    by_head[..., 1:, start : start + width] = 0
    return q, by_head.flatten(-2), v


def drop_rotary_key(latents: Latents, d: Definition) -> Expanded:
    return expand_latents(replace(latents, rotary=torch.zeros_like(latents.rotary)), d)


# ---- Of rotary positions


def rotate_keys(q: Tensor, k: Tensor, v: Tensor, d: Definition) -> tuple[Tensor, ...]:
    return q, rotate_pairs(k, d), v


def rotate_whole_heads(q: Tensor, k: Tensor, v: Tensor, d: Definition) -> tuple[Tensor, ...]:
    whole = replace(d, rotary_dim=None)
    return rotate_pairs(q, whole), rotate_pairs(k, whole), v


def rotate_other_end(q: Tensor, k: Tensor, v: Tensor, d: Definition) -> tuple[Tensor, ...]:
    other = replace(d, rotary_first=not d.rotary_first)
    return rotate_pairs(q, other), rotate_pairs(k, other), v
