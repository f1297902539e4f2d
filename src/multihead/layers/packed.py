"""Nested inputs of layers and blocks: computed as packed sequences, and nested again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..ops.masks import IntervalMask
from ..ops.nested import Sequences, pack_bias, pack_mask, refuse_nested, unpack
from .position_ids import num_axes_of

__all__ = ["attend_packed", "run_block_packed"]

_WITHOUT = {
    "cos_sin": ("each sequence has positions from 0 on", "leave it out"),
    "cache": (
        "a cache holds tokens of one length a step",
        "pad the sequences and give valid=, which a cache takes",
    ),
    "valid": ("they hold no padding", "leave it out"),
    "return_weights": (
        "the weights of each sequence have another size",
        "ask for those of one sequence, x.unbind()[b][None]",
    ),
}


def _refuse(**given: object) -> None:
    for name, value in given.items():
        if value is not None and value is not False:
            refuse_nested(name, *_WITHOUT[name.removeprefix("memory_")])


def _other_lengths(name: str, than: str, token: str) -> str:
    why = f"it has other lengths{than}; give one for each {token}"
    return f"{name} is given with nested tensors: {why}"


def _positions(position_ids: Any, sequences: Sequences, encoding: Any) -> Tensor:
    """The position of each packed token, `[1, total]` or of several axes `[axes, 1, total]`: from 0
    on in each sequence, unless given.
    """
    if position_ids is None:
        return sequences.position[None]
    num_axes = num_axes_of(encoding)
    shape = "[B, j]" if num_axes == 1 else f"[B, j] or [B, j, {num_axes}]"
    if not (isinstance(position_ids, Tensor) and position_ids.is_nested):
        refuse_nested(
            "position_ids",
            "sequences of different lengths have different positions",
            f"give a nested tensor {shape} of integers, or leave it out",
        )
    has_axes = num_axes > 1 and position_ids.ndim == 3
    packed, own = unpack("position_ids", position_ids, 1, "[B, j, axes]" if has_axes else "[B, j]")
    if has_axes and packed.shape[-1] != num_axes:
        refuse_nested(
            "position_ids",
            f"it has {packed.shape[-1]} positions a token",
            f"give one, [B, j], or {num_axes}, [B, j, {num_axes}]",
        )
    packed = sequences.align(packed, own, lambda: _other_lengths("position_ids", "", "token"))
    return packed.movedim(1, 0)[:, None] if has_axes else packed[None]


def attend_packed(
    layer: Any,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    *,
    mask: Any,
    attn_bias: Any,
    position_ids: Any,
    **without: object,
) -> Tensor:
    """`MultiHeadAttention.forward` of nested inputs `[B, j, D]`.

    Raises:
        MultiheadError: arguments that have no meaning with nested inputs, by name.
    """
    _refuse(**without)
    is_self = key is None or key is query
    packed, queries = unpack("query", query, 1, "[B, j, D]")
    packed_query = packed[None]
    given: list[Tensor] = []
    keys, more = queries, {}
    if not is_self:
        assert key is not None
        packed, keys = unpack("key", key, 1, "[B, j, kdim]")
        given.append(packed[None])
        if layer.positions is not None:  # from 0 on in each sequence, as without packing
            more["key_ids"] = keys.position[None]
    if value is not None and value is not key and not (is_self and value is query):
        packed, values = unpack("value", value, 1, "[B, j, vdim]")
        packed = keys.align(
            packed, values, lambda: _other_lengths("value", " than the keys", "key")
        )
        given = [*(given or [packed_query]), packed[None]]
    if position_ids is not None or layer.positions is not None:
        position_ids = _positions(position_ids, queries, layer.positions)
    if layer.mask is not None and (mask is None or isinstance(mask, IntervalMask)):
        mask = layer.mask if mask is None else layer.mask & mask
    out = layer._forward(
        packed_query,
        *given,
        mask=pack_mask(mask, queries, keys),
        attn_bias=pack_bias(attn_bias, queries, keys, "attn_bias"),
        position_ids=position_ids,
        **more,
    )
    return queries.nest(out[0])


def run_block_packed(
    block: Callable[..., Tensor],
    x: Tensor,
    memory: Tensor | None,
    *,
    mask: Any,
    memory_mask: Any,
    position_ids: Any,
    encoding: Any,
    **without: object,
) -> Tensor:
    """`TransformerBlock.forward`, as `block`, of nested inputs `[B, j, D]`.

    Raises:
        MultiheadError: arguments that have no meaning with nested inputs, by name.
    """
    _refuse(**without)
    packed, queries = unpack("x", x, 1, "[B, j, D]")
    if position_ids is not None or encoding is not None:
        position_ids = _positions(position_ids, queries, encoding)
    if memory is not None:
        packed_memory, keys = unpack("memory", memory, 1, "[B, j, memory_dim]")
        memory, memory_mask = packed_memory[None], pack_mask(memory_mask, queries, keys)
    out = block(
        packed[None],
        memory,
        mask=pack_mask(mask, queries, queries),
        memory_mask=memory_mask,
        position_ids=position_ids,
    )
    return queries.nest(out[0])
