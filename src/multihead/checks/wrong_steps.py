"""Wrong steps, which bugs put in the place of right ones: splits, merges, masks and rotations."""

from __future__ import annotations

import torch
from torch import Tensor

from .definition import Definition, cap_scores, mask_scores, rotate_pairs


def split_by_view(x: Tensor, heads: int) -> Tensor:
    batch, length, width = x.shape
    return x.reshape(batch, heads, length, width // heads)


def split_by_feature(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (-1, heads)).permute(0, 3, 1, 2)


def split_overlapping(x: Tensor, heads: int) -> Tensor:
    head_dim = x.shape[-1] // heads
    return torch.stack([x[..., h : h + head_dim] for h in range(heads)], 1)


def split_first(x: Tensor, heads: int) -> Tensor:
    return x[:, None, :, : x.shape[-1] // heads].expand(-1, heads, -1, -1)


def merge_by_view(x: Tensor) -> Tensor:
    batch, heads, length, head_dim = x.shape
    return x.reshape(batch, length, heads * head_dim)


def merge_by_feature(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1).flatten(2)


def ignore_mask(scores: Tensor, allowed: Tensor, definition: Definition) -> Tensor:
    return cap_scores(scores, definition.softcap)


def multiply_by_mask(scores: Tensor, allowed: Tensor, definition: Definition) -> Tensor:
    return cap_scores(scores, definition.softcap) * allowed


def mask_then_cap(scores: Tensor, allowed: Tensor, definition: Definition) -> Tensor:
    if not definition.softcap:
        return mask_scores(scores, allowed, definition)
    return cap_scores(scores.masked_fill(~allowed, -torch.inf), definition.softcap)


def transpose_mask(allowed: Tensor) -> Tensor:
    return allowed.mT if allowed.shape[-2] == allowed.shape[-1] else allowed


def mask_diagonal(allowed: Tensor) -> Tensor:
    return allowed & ~torch.eye(*allowed.shape[-2:], dtype=torch.bool)


def allow_next(allowed: Tensor) -> Tensor:
    length, keys = allowed.shape[-2:]
    return allowed | torch.eye(length, keys + 1, dtype=torch.bool)[:, :keys].roll(1, 1).tril(1)


def rotate_values(q: Tensor, k: Tensor, v: Tensor, d: Definition) -> tuple[Tensor, ...]:
    return rotate_pairs(q, d), rotate_pairs(k, d), rotate_pairs(v, d)


def rotate_queries(q: Tensor, k: Tensor, v: Tensor, d: Definition) -> tuple[Tensor, ...]:
    return rotate_pairs(q, d), k, v


def rotate_wrong_pairs(q: Tensor, k: Tensor, v: Tensor, d: Definition) -> tuple[Tensor, ...]:
    halves = d.rotary != "half"
    return rotate_pairs(q, d, halves=halves), rotate_pairs(k, d, halves=halves), v
