"""One token a sequence through a layer in a transformers model, without what a step doesn't need.

A model generates by thousands of such calls a second, and in small models the checks and choices of
the general way take as long as the attention. `decode_step` does what `MultiHeadAttention.forward`
does with a `ModelCache`, for the commonest layer alone: rotary positions, no mask, no gradients.
Whatever is different goes the general way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as torch_module
from torch.overrides import has_torch_function

from ..ops.backends.sdpa import attend_step
from ..ops.functional import attention
from .attention import MultiHeadAttention
from .model_cache import append_in_place
from .rotary import Rotary, is_hooked

__all__ = ["decode_step"]


def decode_step(
    layer: Any, states: Tensor, cos: Tensor, sin: Tensor, cache: Any, layer_idx: int
) -> Tensor | None:
    """The update `[B, 1, D]` of one token a sequence, which reads all keys.

    Args:
        layer: the layer.
        states: `[B, 1, D]`.
        cos: `[B or 1, 1, R]`, the cosine of each angle twice, one half after the other.
        sin: the same of the sines.
        cache: the transformers cache.
        layer_idx: number of the layer in it.

    Returns:
        None for whatever isn't that plain, before anything is computed.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or not _is_plain(layer):
        return None
    if has_torch_function((states, cos, sin)) or states.ndim != 3 or states.shape[1] != 1:
        return None
    heads, groups, width = layer.num_heads, layer.num_kv_heads, layer.head_dim
    if states.dtype != cos.dtype or states.dtype != torch.float32 or cos.shape[-1] != width:
        return None
    if cos.ndim != 3 or torch.is_autocast_enabled(states.device.type):
        return None
    batch = states.shape[0]
    q, k, v = layer.q_proj(states), layer.k_proj(states), layer.v_proj(states)
    both = torch.cat((q, k), -1).view(batch, heads + groups, 1, width)
    # (a, b) cos + (-b, a) sin: the rotation of all pairs, of queries and keys together
    half = width // 2
    turned = torch.cat((-both.narrow(3, half, half), both.narrow(3, 0, half)), 3)
    both = both * cos.unsqueeze(1) + turned * sin.unsqueeze(1)
    q, k = both.narrow(1, 0, heads), both.narrow(1, heads, groups)
    v = v.view(batch, groups, 1, width)
    keys, values = append_in_place(cache, layer_idx, k, v) or cache.update(k, v, layer_idx)
    out = attend_step(q, keys, values, layer.scale)
    if out is None:
        out = attention(q, keys, values, scale=layer.scale)
    update: Tensor = layer.out_proj(out.reshape(batch, 1, heads * width))
    return update


def _is_plain(layer: Any) -> bool:
    """Whether the layer has nothing but projections and rotations, and no hooks."""
    if type(layer) is not MultiHeadAttention or "forward" in vars(layer):
        return False
    positions = layer.positions
    if type(positions) is not Rotary or positions.interleaved:
        return False
    if positions.rotary_dim != layer.head_dim or is_hooked(positions) or is_hooked(layer):
        return False
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return False
    if layer.training and (layer.dropout or layer.out_dropout):
        return False
    extras: tuple[object, ...] = (
        layer.q_norm,
        layer.clip_qkv,
        layer.softcap,
        layer.sinks,
        layer.shard,
        layer.mask,
        layer.gate,
        layer.bias_k,
    )
    return all(x is None for x in extras)
