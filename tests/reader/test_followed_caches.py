"""Ids of the positions in a cache, from pass to pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

from multihead.reader.followed_caches import FollowedCaches, length_of
from small import IDS, llama


def filled(ids: torch.Tensor) -> Any:
    with torch.no_grad():
        return llama()(ids).past_key_values


def test_a_cache_that_was_remembered_is_known() -> None:
    caches, cache = FollowedCaches(), filled(IDS)
    assert not caches.has_seen(cache) and caches.ids_of(cache, 12) is None
    caches.remember(cache, IDS)
    assert caches.has_seen(cache) and torch.equal(caches.ids_of(cache, 12), IDS)
    assert caches.continues(cache, IDS) and not caches.continues(cache, IDS.flip(0))
    cache.crop(-3)
    assert torch.equal(caches.ids_of(cache, 9), IDS[:, :9])


def test_rows_that_change_places_take_their_ids_along() -> None:
    caches, cache = FollowedCaches(), filled(IDS)
    caches.remember(cache, IDS)
    cache.reorder_cache(torch.tensor([1, 1]))
    assert torch.equal(caches.ids_of(cache, 12), IDS[[1, 1]])


def test_unknown_ids_are_seen_but_unknown() -> None:
    caches, cache = FollowedCaches(), filled(IDS)
    caches.remember(cache, None)
    assert caches.has_seen(cache) and caches.ids_of(cache, 12) is None
    assert not caches.continues(cache, IDS)


@pytest.mark.parametrize(
    ("cache", "length"),
    [
        (None, 0),
        (tf.DynamicCache(), 0),
        (((torch.zeros(1, 2, 7, 4), torch.zeros(1, 2, 7, 4)),), 7),
        ([], 0),
        ("past", 0),
        (torch.zeros(3), 0),
    ],
)
def test_lengths(cache: Any, length: int) -> None:
    assert length_of(cache) == length
