"""A layer of a transformers cache as the cache of our layer: what is stored, and where."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from multihead.layers import MultiHeadAttention
from multihead.layers.model_cache import ModelCache
from multihead.masks import causal

LAYER = MultiHeadAttention(16, 4, num_kv_heads=2, head_dim=4).requires_grad_(False)
X = torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(0))


def step(cache: Any, i: int, j: int, x: Tensor = X) -> Tensor:
    """Tokens i .. j, whose mask is the model's: causal, with the keys from 0 on."""
    mask = torch.ones(12, 12, dtype=torch.bool).tril()[i:j, :j]
    found: Tensor = LAYER(x[:, i:j], cache=ModelCache(cache, 0, mask[None, None]))
    return found


def held(cache: Any) -> tuple[Tensor, Tensor]:
    return cache.layers[0].keys, cache.layers[0].values


@torch.no_grad()
def test_steps_give_the_whole_in_memory_that_isnt_copied() -> None:
    cache, want = tf.DynamicCache(), LAYER(X, mask=causal())
    found = [step(cache, 0, 3)]
    places = set()
    for i in range(3, 12):
        found.append(step(cache, i, i + 1))
        places.add(held(cache)[0].data_ptr())
    torch.testing.assert_close(torch.cat(found, 1), want)
    assert len(places) == 1 and held(cache)[0].shape == (2, 2, 12, 4)


@torch.no_grad()
@pytest.mark.parametrize("change", ["reorder", "crop", "copy", "deepcopy", "pickle", "select"])
def test_what_else_is_done_to_a_cache_is_kept(change: str) -> None:
    """And two caches of one origin never write to one memory."""
    cache = tf.DynamicCache()
    for i in range(6):
        step(cache, i, i + 1)
    x, at, other = X, 6, None
    if change == "reorder":
        cache.reorder_cache(torch.tensor([1, 0]))
        x = X[[1, 0]]
    elif change == "crop":
        cache.crop(-2)
        at = 4
    elif change == "select":
        cache.batch_select_indices(torch.tensor([1]))
        x = X[1:]
    elif change == "copy":
        other = copy.copy(cache)
        other.layers = [copy.copy(layer) for layer in cache.layers]
    elif change == "deepcopy":
        other = copy.deepcopy(cache)
    else:
        other = pickle.loads(pickle.dumps(cache))  # noqa: S301
    want = LAYER(x, mask=causal())
    if other is not None:  # other tokens, into the copy
        strange = x.flip(1)
        step(other, at, at + 1, strange)
        step(cache, at, at + 1, x)
        mixed = torch.cat((x[:, :at], strange[:, at : at + 2]), 1)
        found = step(other, at + 1, at + 2, strange)
        torch.testing.assert_close(found, LAYER(mixed, mask=causal())[:, -1:])
        at += 1
    for i in range(at, 9):
        torch.testing.assert_close(step(cache, i, i + 1, x), want[:, i : i + 1])


def test_a_graph_keeps_what_it_saved() -> None:
    """With gradients nothing is written in place, also between steps without them."""
    cache = tf.DynamicCache()
    with torch.no_grad():
        step(cache, 0, 4)
        step(cache, 4, 5)
    x = X.clone().requires_grad_(True)
    found = step(cache, 5, 6, x)
    with torch.no_grad():
        step(cache, 6, 7)
        step(cache, 7, 8)
    found.sum().backward()
    want = X.clone().requires_grad_(True)
    LAYER(want, mask=causal())[:, 5].sum().backward()
    assert x.grad is not None and want.grad is not None
    torch.testing.assert_close(x.grad[:, 5], want.grad[:, 5])


def test_inference_mode_and_after() -> None:
    cache, want = tf.DynamicCache(), LAYER(X, mask=causal())
    with torch.inference_mode():
        for i in range(5):
            step(cache, i, i + 1)
    with torch.no_grad():
        for i in range(5, 8):
            torch.testing.assert_close(step(cache, i, i + 1), want[:, i : i + 1])


@torch.no_grad()
def test_other_caches_go_their_way() -> None:
    """A window of keys, and memory that is reserved, with the model's mask of their columns."""
    config = tf.LlamaConfig(num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
    static = tf.StaticCache(config=config, max_cache_len=12)
    for i in range(5):
        mask = torch.arange(12) <= i
        found = LAYER(X[:, i : i + 1], cache=ModelCache(static, 0, mask.view(1, 1, 1, 12)))
        torch.testing.assert_close(found, LAYER(X[:, : i + 1])[:, i:])
    config = tf.MistralConfig(num_hidden_layers=1, sliding_window=3)
    sliding = tf.DynamicCache(config=config)
    for i in range(6):
        found = LAYER(X[:, i : i + 1], cache=ModelCache(sliding, 0))
        torch.testing.assert_close(found, LAYER(X[:, max(0, i - 2) : i + 1])[:, -1:])


@torch.no_grad()
def test_filled_keys_are_read_and_none_is_stored() -> None:
    cache = tf.DynamicCache()
    want = LAYER(X[:, :2], X[:, 2:], cache=ModelCache(cache, 0))
    filled = ModelCache(cache, 0, is_filled=True)
    torch.testing.assert_close(LAYER(X[:, :2], X[:, :0], cache=filled), want)
    assert filled.num_keys == held(cache)[0].shape[2] == 10 and filled.length == 10
