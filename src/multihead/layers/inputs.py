"""Checks and masks of a call of an attention layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..errors import MultiheadError
from ..ops.masks import IntervalMask, padding
from ..ops.tensors import TensorLike, require_tensor
from .cache import Cache
from .position_bias import PositionBias
from .position_ids import check_position_ids
from .visible_keys import to_valid

__all__ = ["check_cache", "check_inputs", "check_width", "join_masks", "with_padding"]


def check_inputs(
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position_ids: TensorLike | None,
    valid: TensorLike | None,
) -> tuple[Tensor | None, Tensor | None]:
    """`position_ids` and `valid` as tensors; raises unless all fit."""
    for name, x, module in (
        ("query", query, layer.q_proj),
        ("key", key, layer.k_proj),
        ("value", value, layer.v_proj),
    ):
        check_width(name, x, module, "L" if name == "query" else "S")
    if not query.shape[0] == key.shape[0] == value.shape[0] or key.shape[1] != value.shape[1]:
        raise MultiheadError(
            f"query{list(query.shape)}, key{list(key.shape)}, value{list(value.shape)}:"
            " expected one batch size, and one length of key and value; the first axis is the"
            " batch, the second the length"
        )
    if valid is not None:
        valid = to_valid(valid, key.shape[0], key.shape[1], key.device)
    if position_ids is None:
        return None, valid
    return check_position_ids(layer.positions, position_ids, query), valid


def check_width(name: str, x: object, module: nn.Module, axis: str) -> None:
    """Raise unless x is a tensor `[B, axis, D]`, D being what the projection `module` takes."""
    require_tensor(name, x, "a tensor (a mask is passed as mask=, a cache as cache=)")
    assert isinstance(x, Tensor)
    width = getattr(module, "in_features", x.shape[-1] if x.ndim else 0)
    if x.ndim != 3 or x.shape[-1] != width:
        raise MultiheadError(f"{name}{list(x.shape)}: expected [B, {axis}, {width}], batch first")


def check_cache(
    layer: Any,
    cache: Cache,
    mask: IntervalMask | Tensor | None,
    position_ids: Tensor | None,
    is_self: bool,
) -> None:
    """Check for what is unknown, or would be counted twice, once the cache holds keys; `mask` is
    that of the call.
    """
    if not isinstance(cache, Cache):
        raise TypeError(
            f"cache={cache!r}: expected a Cache() or WindowCache(...), one for each layer"
        )
    cache.claim(layer)
    if not is_self and layer.positions is not None and position_ids is None:
        raise MultiheadError(
            "position_ids: with a cache and a separate key= the positions of the queries are"
            " unknown; give position_ids="
        )
    if is_self and isinstance(layer.positions, PositionBias) and position_ids is not None:
        raise MultiheadError(
            "position_ids: a cache counts its tokens and keeps no other positions; leave"
            " position_ids= out, or use Rotary, which rotates keys before they are stored"
        )
    if not is_self:
        for name, rule in (("mask", mask), ("the layer's mask", layer.mask)):
            if isinstance(rule, IntervalMask) and (rule.low, rule.high) != (None, None):
                raise MultiheadError(
                    f"{name} is one of distances, but with a cache and a separate key= the"
                    " positions of the queries are unknown; give padding(...) or a dense mask"
                )
    if not isinstance(mask, IntervalMask):
        return
    if is_self and cache.length and mask.high == 1 + cache.length:
        raise MultiheadError(
            f"mask is causal(offset={cache.length}), but the layer itself counts the"
            f" {cache.length} tokens of the cache, so queries would read those after them; give"
            " causal()"
        )


def join_masks(
    mask: IntervalMask | Tensor | None, rule: IntervalMask | None, length: int, num_keys: int
) -> IntervalMask | Tensor | None:
    """The mask that allows what both allow, of `length` queries and `num_keys` keys."""
    if rule is None:
        return mask
    if isinstance(mask, Tensor):
        return mask & rule.dense(length, num_keys, mask.device)
    return rule if mask is None else rule & mask


def with_padding(
    mask: IntervalMask | Tensor | None, valid: Tensor, length: int, num_keys: int
) -> IntervalMask | Tensor | None:
    """The mask without the keys that aren't `valid [B, S]`."""
    return join_masks(mask, padding(valid=valid), length, num_keys)
