"""Conversion between `nn.MultiheadAttention` and `MultiHeadAttention`, with equal results."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import MultiheadError
from ..ops.numbers import default_scale
from .attention import MultiHeadAttention

__all__ = ["from_torch", "to_torch"]


def from_torch(module: nn.MultiheadAttention) -> MultiHeadAttention:
    """The layer that computes what `module` computes, with copies of its weights.

    The call differs: `layer(x)` returns `[B, L, D]` alone, and a tuple only with
    `return_weights=True`, so `layer(x)[0]` would be the first batch element. Packed and separate
    projections, `add_bias_kv` and `add_zero_attn` (a sink whose logit is 0), dropout, device, dtype
    and training mode are kept. The layer is batch first, whatever `module` was; convert masks with
    `multihead.masks.from_torch_mask`. Returned weights are those of each head, before dropout and
    without the columns of the two additions; a query without a key gives zeros instead of NaN.

    Raises:
        TypeError: anything but an `nn.MultiheadAttention`, or a subclass with another forward.

    >>> theirs = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    >>> x = torch.randn(1, 3, 8)
    >>> torch.allclose(from_torch(theirs)(x), theirs(x, x, x)[0], atol=1e-6)
    True
    """
    if (
        not isinstance(module, nn.MultiheadAttention)
        or type(module).forward is not nn.MultiheadAttention.forward
    ):
        raise TypeError(
            f"module is a {type(module).__name__}: expected a torch.nn.MultiheadAttention with"
            " torch's own forward"
        )
    width = module.embed_dim
    packed: Tensor | None = module.in_proj_weight
    weights = (
        packed.chunk(3)
        if packed is not None
        else (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    )
    layer = MultiHeadAttention(
        width,
        module.num_heads,
        kdim=module.kdim,
        vdim=module.vdim,
        bias=module.in_proj_bias is not None,
        out_bias=module.out_proj.bias is not None,
        sinks=module.add_zero_attn,
        bias_kv=module.bias_k is not None,
        dropout=module.dropout,
        device=weights[0].device,
        dtype=weights[0].dtype,
    )
    with torch.no_grad():
        for proj, weight in zip((layer.q_proj, layer.k_proj, layer.v_proj), weights):
            proj.weight.copy_(weight)
        if module.in_proj_bias is not None:
            for proj, bias in zip(
                (layer.q_proj, layer.k_proj, layer.v_proj), module.in_proj_bias.chunk(3)
            ):
                proj.bias.copy_(bias)
        layer.out_proj.weight.copy_(module.out_proj.weight)
        if module.out_proj.bias is not None:
            layer.out_proj.bias.copy_(module.out_proj.bias)
        for ours, theirs in ((layer.bias_k, module.bias_k), (layer.bias_v, module.bias_v)):
            if ours is not None and theirs is not None:
                ours.copy_(theirs.view_as(ours))
    if layer.sinks is not None:
        layer.sinks.requires_grad_(False)  # add_zero_attn isn't learned
    return layer.train(module.training)


def to_torch(layer: MultiHeadAttention) -> nn.MultiheadAttention:
    """An `nn.MultiheadAttention` (batch first) that computes what `layer` computes, with copies of
    its weights.

    Shared key/value heads are repeated, one for each query head.

    Raises:
        MultiheadError: options that torch's layer doesn't have, all of them listed.

    >>> layer = MultiHeadAttention(8, 4, num_kv_heads=2)
    >>> x = torch.randn(1, 3, 8)
    >>> torch.allclose(to_torch(layer)(x, x, x)[0], layer(x), atol=1e-6)
    True
    """
    width, heads = layer.embed_dim, layer.num_heads
    linears = (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)
    zero = layer.sinks is not None and not layer.sinks.is_meta and not bool(layer.sinks.any())
    unsupported = {
        f"head_dim={layer.head_dim} instead of embed_dim / num_heads = {width / heads:g}": (
            layer.head_dim * heads != width
        ),
        f"out_dim={getattr(layer.out_proj, 'out_features', None)} instead of embed_dim={width}": (
            layer.out_proj.out_features != width
        ),
        "heads divided among ranks": layer.shard is not None,
        "positions": layer.positions is not None,
        "softcap": layer.softcap is not None,
        "gate": layer.gate is not None,
        "qk_norm": layer.q_norm is not None,
        "clip_qkv": layer.clip_qkv is not None,
        "mask": layer.mask is not None,
        f"scale={layer.scale} instead of 1 / sqrt(head_dim)": (
            layer.scale != default_scale(layer.head_dim)
        ),
        "out_dropout": bool(layer.out_dropout),
        "sinks that aren't 0": layer.sinks is not None and not zero,
        "projections that aren't nn.Linear": not all(type(x) is nn.Linear for x in linears),
    }
    if names := [name for name, is_used in unsupported.items() if is_used]:
        raise MultiheadError(
            f"nn.MultiheadAttention doesn't support this layer's {', '.join(names)}"
        )
    group_size = heads // layer.num_kv_heads

    def repeat(x: Tensor) -> Tensor:
        """Repeat the rows of each key/value head for its query heads."""
        return (
            x.unflatten(0, (layer.num_kv_heads, -1)).repeat_interleave(group_size, 0).flatten(0, 1)
        )

    weight = layer.q_proj.weight
    biased = any(x.bias is not None for x in linears)
    module = nn.MultiheadAttention(
        width,
        heads,
        dropout=layer.dropout,
        bias=biased,
        add_bias_kv=layer.bias_k is not None,
        add_zero_attn=zero,
        kdim=layer.k_proj.in_features,
        vdim=layer.v_proj.in_features,
        batch_first=True,
        device=weight.device,
        dtype=weight.dtype,
    )
    with torch.no_grad():
        weights = (weight, repeat(layer.k_proj.weight), repeat(layer.v_proj.weight))
        if module.in_proj_weight is not None:
            module.in_proj_weight.copy_(torch.cat(weights))
        else:
            for parameter, new_weight in zip(
                (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight), weights
            ):
                parameter.copy_(new_weight)
        module.out_proj.weight.copy_(layer.out_proj.weight)
        if biased:
            q, k, v, out = (
                x.weight.new_zeros(x.out_features) if x.bias is None else x.bias for x in linears
            )
            module.in_proj_bias.copy_(torch.cat([q, repeat(k), repeat(v)]))
            module.out_proj.bias.copy_(out)
        for theirs, ours in ((module.bias_k, layer.bias_k), (module.bias_v, layer.bias_v)):
            if ours is not None and theirs is not None:
                theirs.copy_(ours.repeat_interleave(group_size, 0).view_as(theirs))
    return module.train(layer.training)
