"""The attention function and the mask function that transformers calls, both registered under the
name "multihead".

`model.set_attn_implementation("multihead")` then computes with `multihead.attention`, and so does a
model while it is instrumented. The mask function must be registered too: otherwise the mask arrives
as None, and padding and windows are silently lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MultiheadError
from ..layers.interval_tensor import IntervalTensor, mask_function
from ..layers.model_attention import IGNORED
from ..ops.call import AttentionCall, CallContext
from ..ops.functional import compute
from ..ops.masks import IntervalMask, causal
from .head_layout import HeadLayout
from .model_masks import ModelMask, fill_empty, split_mask
from .own_attention import COMPARE, OwnAttention

NAME = "multihead"
# Attribute of an attention module: what computes its calls while it is instrumented.
ATTEND = "_multihead_attend"
FEW_QUERIES = 16  # a step of decoding, or a few


def forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: query `[B, H, L, E]`, key `[B, G, S, E]` and value
    `[B, G, S, Ev]` -> output `[B, L, H, Ev]`, and None for the weights.
    """
    compare = vars(module).get(COMPARE)
    if compare is not None:
        options = {
            "dropout": dropout,
            "scaling": scaling,
            "is_causal": is_causal,
            "s_aux": s_aux,
            "sinks": sinks,
            "softcap": softcap,
            "position_bias": position_bias,
            "indices": indices,
        }
        given = {name: option for name, option in options.items() if option is not None}
        own = OwnAttention(module, query, key, value, attention_mask, given | kwargs)
    for name, option in kwargs.items():
        if option is not None and name not in IGNORED:
            raise MultiheadError(
                f"{type(module).__name__} passes {name}= to attention, which multihead doesn't"
                f" know; without it the result might be another. {_without(module)}"
            )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    length, keys = query.shape[2], key.shape[2]
    if hasattr(attention_mask, "mask_mod"):  # a BlockMask of flex attention
        from torch.nn.attention.flex_attention import create_mask

        shape = query.shape[0], query.shape[1], length, keys
        attention_mask = create_mask(attention_mask.mask_mod, *shape, device=str(query.device))
    mask, added = lower_mask(attention_mask, is_causal and length > 1, query.dtype)
    if position_bias is not None:
        layout = getattr(module, NAME, None)
        # one table for all layers, of all heads, in the order that they had
        if layout is not None and position_bias.shape[1] == layout.config_num_heads:
            position_bias = position_bias.index_select(1, _index(layout.heads, position_bias))
        added = position_bias if added is None else position_bias + added
    # [B, L, n]: keys that an indexer chose for each query (DeepSeek V3.2); eager masks the others
    if indices is not None:
        shape = (query.shape[0], 1, query.shape[2], key.shape[2])
        chosen = torch.zeros(shape, dtype=torch.bool, device=query.device).scatter(
            -1, indices.long()[:, None], True
        )
        mask = _intersect(mask, chosen, query, key)
    split = ModelMask(mask)
    if added is not None or isinstance(mask, Tensor):
        split = split_mask(mask, added, length, keys)
    scale = None if scaling is None else float(scaling)
    s_aux = sinks if s_aux is None else s_aux

    def lower(q: Tensor, k: Tensor, v: Tensor) -> AttentionCall:
        return AttentionCall.lower(
            q,
            k,
            v,
            split.mask,
            bias=split.bias,
            scale=scale,
            softcap=softcap,
            sinks=None if s_aux is None else s_aux.reshape(-1),
            dropout=dropout,
        )

    attend: Callable[[AttentionCall], Tensor] | None = vars(module).get(ATTEND)
    layout = getattr(module, NAME, None)
    if layout is not None and not layout.is_even:
        by_head = split.mask is not None and isinstance(split.mask, Tensor)
        plain = not by_head and split.bias is None and split.empty is None and s_aux is None
        if attend is None and length <= FEW_QUERIES and plain:
            out = _uneven(query, key, value, layout, lower)
            return out.transpose(1, 2).contiguous(), None
        chosen = _index(layout.reads, key)
        key, value = key.index_select(1, chosen), value.index_select(1, chosen)
    call = lower(query, key, value)
    call = call._replace(context=CallContext(empty=split.empty))
    out = fill_empty(compute(call) if attend is None else attend(call), call, split)
    out = out.transpose(1, 2).contiguous()
    for compared in compare or ():
        compared(own, out)
    return out, None


def _without(module: nn.Module) -> str:
    """Advice for a model whose attention isn't known."""
    if ATTEND in vars(module):
        return "So this model can't be read; please report it with the model's class"
    return "Use attn_implementation='eager' for this model"


def _uneven(
    q: Tensor, k: Tensor, v: Tensor, layout: HeadLayout, lower: Callable[..., AttentionCall]
) -> Tensor:
    """Attention of few queries by heads that share key/value heads unevenly.

    Reading the keys is what costs, so each key/value head is read once: groups are padded with
    queries of zero to the size of the largest.
    """
    sizes = [layout.reads.count(g) for g in range(len(layout.kv_heads))]
    seen = [0] * len(layout.kv_heads)
    places = []
    for g in layout.reads:
        places.append(g * max(sizes) + seen[g])
        seen[g] += 1
    index = _index(places, q)
    full = q.new_zeros(q.shape[0], len(layout.kv_heads) * max(sizes), *q.shape[2:]).index_copy(
        1, index, q
    )
    return compute(lower(full, k, v)).index_select(1, index)


def _index(numbers: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(numbers, device=like.device)


def _intersect(
    mask: IntervalMask | Tensor | None, allowed: Tensor, query: Tensor, key: Tensor
) -> Tensor:
    """The keys that both allow, dense."""
    dense = (
        mask.dense(query.shape[2], key.shape[2], query.device)
        if isinstance(mask, IntervalMask)
        else mask
    )
    return allowed if dense is None else dense & allowed


def lower_mask(
    mask: Tensor | None, is_causal: bool, dtype: torch.dtype
) -> tuple[IntervalMask | Tensor | None, Tensor | None]:
    """The mask that a model passes -> a mask, and numbers that are added to the scores."""
    if mask is None:
        return (causal() if is_causal else None), None
    if isinstance(mask, IntervalTensor):
        return mask.mask, None
    if mask.dtype == torch.bool:
        return mask, None
    return None, mask if mask.is_floating_point() else mask.to(dtype)


def register_attention() -> None:
    """Register "multihead" with transformers, so that `model.set_attn_implementation("multihead")`
    works. Reading does it by itself; calling it twice is harmless.

    >>> from multihead import load_builtin
    >>> register_attention()
    >>> model, _ = load_builtin()
    >>> model.set_attn_implementation("multihead")
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, forward)
    AttentionMaskInterface.register(NAME, mask_function)
