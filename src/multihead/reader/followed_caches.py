"""Token ids of the positions in a KV cache, which models don't keep: `FollowedCaches` remembers
them from pass to pass, also after rows of the cache were reordered, repeated or cut.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

__all__ = ["FollowedCaches", "follow", "length_of", "marks"]

Marks = tuple[Tensor, Tensor]  # ids [B, past] and marks of a cache


class FollowedCaches:
    """The caches that a reading has seen, with the token ids of their positions where they are
    known. A cache is forgotten with its object.

    >>> FollowedCaches().has_seen(None)
    False
    """

    def __init__(self) -> None:
        self._histories: weakref.WeakKeyDictionary[Any, Marks | None] = weakref.WeakKeyDictionary()
        self._latest: Any = None  # weak reference to the cache of the last pass

    def has_seen(self, cache: Any) -> bool:
        """Whether a pass of this reading had the cache, so that its rows belong to documents."""
        return hasattr(cache, "get_seq_length") and cache in self._histories

    def remember(self, cache: Any, ids: Tensor | None) -> None:
        """A pass has written to the cache: `ids` `[B, past + L]` of its positions, if known."""
        self._histories.pop(cache, None)
        self._latest = weakref.ref(cache)
        self._histories[cache] = None if ids is None else (ids, marks(cache))

    def ids_of(self, cache: Any, past: int) -> Tensor | None:
        """Ids of the `past` positions, `[B, past]`; None where they are unknown."""
        known = self._histories.get(cache) if self.has_seen(cache) else None
        return None if known is None else follow(*known, marks(cache), past)

    def continues(self, cache: Any, ids: Tensor) -> bool:
        """Whether the last pass had this cache, with these ids `[B, past]`, each row in its
        place.
        """
        if self._latest is None or self._latest() is not cache:
            return False
        known = self._histories[cache]
        return known is not None and known[0].shape == ids.shape and torch.equal(known[0], ids)


def marks(cache: Any) -> Tensor:
    """A number for each of the last cached positions, `[B, n]`, by which a cache is recognised
    after rows were reordered, repeated or cut.

    It is taken from the layer that holds most positions, and of such layers the last: its keys
    depend on what other layers have dropped, too.
    """
    inner, length = getattr(cache, "self_attention_cache", cache), length_of(cache)
    best = torch.empty(0, 0, device="cpu")
    for layer in getattr(inner, "layers", ()):
        keys = getattr(layer, "keys", None)
        if not isinstance(keys, Tensor) or keys.ndim != 4 or not keys.numel():
            continue
        if min(keys.shape[2], length) >= best.shape[1]:
            best = keys[:, 0, :length, 0].detach()
    return best.clone()


def follow(ids: Tensor, before: Tensor, now: Tensor, past: int) -> Tensor | None:
    """Ids of the `past` positions in a cache whose marks are `now`, from `ids` and the marks
    `before`; None where the cache holds other sequences.
    """
    length = ids.shape[1]
    # marks cover the last positions: before has length - n .. length, now has past - m .. past
    start = max(length - before.shape[1], past - now.shape[1])
    if past > length or past <= start or not before.numel() or not now.numel():
        return None
    old = before[:, start - (length - before.shape[1]) : past - (length - before.shape[1])]
    new = now[:, start - (past - now.shape[1]) :]
    same = (old[None] == new[:, None]).all(-1)
    # of rows that look alike, the one in its own place
    stays = torch.eye(*same.shape, device=same.device) * same
    return ids[(same + stays).argmax(1), :past] if bool(same.any(1).all()) else None


def length_of(cache: Any) -> int:
    """Positions in a transformers cache, or in a tuple of keys and values `[B, G, S, E]` of each
    layer; 0 for anything else.
    """
    if hasattr(cache, "get_seq_length"):
        return int(cache.get_seq_length())
    while isinstance(cache, (tuple, list)) and cache:
        cache = cache[0]
    return cache.shape[2] if isinstance(cache, Tensor) and cache.ndim == 4 else 0
