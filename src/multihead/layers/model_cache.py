"""`ModelCache`: one layer of a transformers cache, used as the `Cache` of a layer."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.masks import IntervalMask
from ..ops.modes import transformed
from ..ops.tensors import TensorLike
from .cache import Cache, State
from .visible_keys import VisibleKeys

__all__ = ["ModelCache", "append_in_place"]

# Attribute of a layer of a transformers cache: the memory in which its keys and values grow.
_MEMORY = "_multihead_memory"
_FEW = 16  # tokens of a step; a prompt is stored as transformers does
_ROOM = 64  # tokens of further room, at least, or an eighth of those that are stored


class _Memory(NamedTuple):
    owner: int  # id of the cache's layer: a shallow copy of it gets separate memory
    shown: tuple[Tensor, Tensor]  # the views that the layer holds
    whole: tuple[Tensor, Tensor]
    room: int  # tokens


class ModelKeys(VisibleKeys):
    """Keys and values of a transformers cache, with the mask that the model made for them."""

    mask: IntervalMask | Tensor | None = None

    def _replace(self, **changes: Any) -> ModelKeys:
        made: ModelKeys = super()._replace(**changes)
        made.mask = self.mask
        return made

    def to_mask(
        self, mask: IntervalMask | Tensor | None, bias: object, length: int
    ) -> IntervalMask | Tensor | None:
        return self.mask


class ModelCache(Cache):
    """One layer of a transformers cache for one call of a layer.

    The model's cache decides what is kept and what the queries read; its mask is of the keys that
    it returns, wherever they lie in the sequence, so it replaces the layer's.

    Args:
        cache: the transformers cache, such as a `DynamicCache`.
        layer_idx: number of the layer in it.
        mask: the model's mask, `[B, 1, L, S]` or an interval mask.
        is_filled: whether the keys are there and nothing is to be stored, as in the steps of cross
            attention.
        counts: whether the layer needs the position of the first query.
    """

    def __init__(
        self,
        cache: Any,
        layer_idx: int,
        mask: IntervalMask | Tensor | None = None,
        *,
        is_filled: bool = False,
        counts: bool = False,
    ) -> None:
        super().__init__()
        self._cache, self._layer_idx, self._mask = cache, layer_idx, mask
        self._is_filled, self._counts = is_filled, counts
        self.num_keys = 0  # that the last call read

    def claim(self, layer: object) -> None:
        """The model has one layer of its cache for each attention module."""

    @property
    def length(self) -> int:
        return int(self._cache.get_seq_length(self._layer_idx))

    def offset(self, valid: TensorLike | None = None) -> int | Tensor:
        return self.length if self._counts else 0

    def state(self) -> State:
        return 0, None, None, None, False

    def restore(self, state: State) -> None:
        """A call that fails may have stored its tokens, as in transformers."""

    def hold(self) -> None:
        """Memory that a graph may hold isn't written to: see `append_in_place`."""

    def update(self, k: Tensor, v: Tensor, valid: TensorLike | None = None) -> VisibleKeys:
        offset = self.offset()
        if self._is_filled:
            layer = self._cache.layers[self._layer_idx]
            found = layer.keys, layer.values
        else:
            found = append_in_place(self._cache, self._layer_idx, k, v) or self._cache.update(
                k, v, self._layer_idx
            )
        self.num_keys = found[0].shape[2]
        keys = ModelKeys(*found, offset, self.num_keys)
        keys.mask = self._mask
        return keys


@functools.cache
def _transformers() -> tuple[Any, Any]:
    from transformers.cache_utils import Cache, DynamicLayer

    return Cache, DynamicLayer


def append_in_place(cache: Any, layer_idx: int, k: Tensor, v: Tensor) -> Any:
    """Store the tokens of a step in memory that has room for more, so that a step doesn't copy all
    earlier tokens. The layer of the cache shows a view of the memory, and whatever else is done to
    it (reordered, cropped, moved) puts other tensors there, after which the memory is made anew.

    Returns:
        Keys and values of all tokens; None where the cache's own way is needed: the first tokens,
        other kinds of caches, a graph that might hold the memory.
    """
    length = k.shape[2]
    if length > _FEW or torch.is_grad_enabled() or torch.compiler.is_compiling() or transformed():
        return None
    base, plain = _transformers()
    if type(cache).update is not base.update or cache.offloading or len(cache.layers) <= layer_idx:
        return None
    layer = cache.layers[layer_idx]
    if type(layer) is not plain or not layer.is_initialized or not layer.keys.numel():
        return None
    shown, shape = (layer.keys, layer.values), k.shape
    memory: _Memory | None = vars(layer).get(_MEMORY)
    for old, x in zip(shown, (k, v)):
        if type(x) is not Tensor or old.dtype != x.dtype or old.device != x.device:
            return None
        if old.shape[:2] != shape[:2] or old.shape[3] != x.shape[3]:
            return None
    start = shown[0].shape[2]
    total = start + length
    if (
        memory is not None
        and memory.owner == id(layer)
        and memory.shown[0] is shown[0]
        and memory.shown[1] is shown[1]
        and memory.room >= total
        and (torch.is_inference_mode_enabled() or not memory.whole[0].is_inference())
    ):
        whole, room = memory.whole, memory.room
    elif type(shown[0]) is type(shown[1]) is Tensor:
        room = total + max(_ROOM, total // 8)
        whole = k.new_empty(*shape[:2], room, shape[3]), v.new_empty(*shape[:2], room, v.shape[3])
        for part, old in zip(whole, shown):
            part.narrow(2, 0, start).copy_(old)
    else:
        return None
    for part, x in zip(whole, (k, v)):
        part.narrow(2, start, length).copy_(x)
    layer.keys, layer.values = shown = whole[0].narrow(2, 0, total), whole[1].narrow(2, 0, total)
    setattr(layer, _MEMORY, _Memory(id(layer), shown, whole, room))
    return shown
