"""Column j of the weights of a call with a cache is the key at `cache.key_positions[:, j]`,
whatever came before the call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multihead import Cache, MultiHeadAttention, WindowCache
from multihead.layers.rotary import Rotary
from multihead.masks import IntervalMask, causal, window

CACHES: dict[str, Callable[[], Cache]] = {
    "grows": Cache,
    "reserved": lambda: Cache(32),
    "window": lambda: WindowCache(3),
    "window of none": lambda: WindowCache(0),
    "window and sinks": lambda: WindowCache(2, sinks=2),
    "window larger than the text": lambda: WindowCache(40, sinks=1),
    "more sinks than tokens": lambda: WindowCache(1, sinks=9),
}


def layer() -> MultiHeadAttention:
    torch.manual_seed(0)
    return MultiHeadAttention(12, 2, positions=Rotary(6)).double().eval()


def visible(cache: Cache) -> IntervalMask | Tensor:
    """The mask, over all positions, that a cache stands for."""
    if not isinstance(cache, WindowCache):
        return causal()
    near = (causal() & window(left=cache.left)).dense(32, 32)
    first = torch.arange(32) < cache.sinks
    return near | (causal().dense(32, 32) & first)


def by_position(weights: Tensor, positions: Tensor, keys: int) -> Tensor:
    """`[B, H, L, keys]`, of weights whose columns are at `positions`; those of empty slots are 0."""
    assert positions.ndim == 2 and positions.shape[1] == weights.shape[3]
    assert positions.shape[0] in (1, weights.shape[0])
    places = positions.expand(weights.shape[0], -1)[:, None, None].expand(weights.shape)
    assert not weights.masked_select(places < 0).any()
    found = weights.new_zeros(*weights.shape[:3], keys)
    return found.scatter_add(3, places.clamp(min=0), weights.masked_fill(places < 0, 0))


def whole(model: MultiHeadAttention, x: Tensor, cache: Cache) -> Tensor:
    mask = visible(cache)
    n = x.shape[1]
    mask = mask[..., :n, :n] if isinstance(mask, Tensor) else mask
    return model(x, mask=mask, return_weights=True)[1]


@pytest.mark.parametrize("kind", CACHES)
@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=7), data=st.data())
@settings(max_examples=12, deadline=None)
def test_after_every_call(kind: str, sizes: list[int], data: Any) -> None:
    """Steps of any size, between them undone steps, rows in another order, and crops."""
    model, cache = layer(), CACHES[kind]()
    total = min(sum(sizes), 24)
    x = torch.randn(2, total, 12, dtype=torch.float64)
    at = 0
    with torch.no_grad():
        for size in sizes:
            size = min(size, total - at)
            if size == 0:
                continue
            event = data.draw(st.sampled_from(["", "", "reorder", "crop", "fail", "copy"]))
            if event == "reorder":
                rows = data.draw(st.sampled_from([[1, 0], [0, 0], [1, 1]]))
                x = x[torch.tensor(rows)]
                cache.reorder(rows)
            elif event == "crop" and not (isinstance(cache, WindowCache) and at):
                at = data.draw(st.integers(0, at))
                cache.crop(at)
                size = min(size, total - at)
            elif event == "copy":
                cache = copy.deepcopy(cache)
            elif event == "fail":
                with pytest.raises(ValueError, match="mask"):
                    model(x[:, at : at + size], cache=cache, mask=torch.ones(7, 3).bool()[:0])
            _, weights = model(
                x[:, at : at + size], mask=causal(), cache=cache, return_weights=True
            )
            want = whole(model, x, cache)[:, :, at : at + size]
            got = by_position(weights, cache.key_positions, total)
            assert torch.allclose(got, want, atol=1e-12)
            at += size


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("sides", ["left", "right", "both"])
def test_rows_of_unequal_lengths(kind: str, sides: str) -> None:
    model, cache = layer(), CACHES[kind]()
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    real = {"left": [0, 3], "right": [0, 0], "both": [1, 2]}[sides]
    lengths = {"left": [6, 3], "right": [2, 6], "both": [4, 3]}[sides]
    valid = [[a <= i < a + n for i in range(6)] for a, n in zip(real, lengths)]
    with torch.no_grad():
        first = model(x[:, :6], mask=causal(), cache=cache, valid=valid, return_weights=True)
        calls = [(first[1], cache.key_positions, real, [0, 0], 6)]
        done = list(lengths)
        for i in (6, 7, 8):
            _, weights = model(x[:, i : i + 1], mask=causal(), cache=cache, return_weights=True)
            calls.append((weights, cache.key_positions, [0, 0], list(done), 1))
            done = [n + 1 for n in done]
        for row, (a, n) in enumerate(zip(real, lengths)):
            text = torch.cat([x[row : row + 1, a : a + n], x[row : row + 1, 6:]], 1)
            want = whole(model, text, cache)
            for weights, positions, skipped, before, size in calls:
                found = by_position(weights, positions, 16)[row]
                count = n if size == 6 else 1
                own = found[:, skipped[row] : skipped[row] + count, : text.shape[1]]
                place = before[row]
                assert torch.allclose(own, want[0, :, place : place + count], atol=1e-12)


def test_a_sequence_that_was_freed_and_one_that_goes_on() -> None:
    model, cache = layer(), WindowCache(2, sinks=1)
    x = torch.randn(2, 8, 12, dtype=torch.float64)
    with torch.no_grad():
        model(x[:, :5], mask=causal(), cache=cache)
        cache.crop([0, 5])
        assert cache.key_positions.tolist() == [[-1, -1, -1, -1], [0, 4, 2, 3]]
        _, weights = model(x[:, 5:6], mask=causal(), cache=cache, return_weights=True)
        positions = cache.key_positions
        alone = model(x[:1, 5:6], return_weights=True)[1]
        other = whole(model, x[1:, :6], cache)[:, :, 5:]
    found = by_position(weights, positions, 6)
    assert torch.allclose(found[:1, ..., :1], alone) and torch.allclose(found[1:], other)


def test_before_a_call_and_after_changes_the_stored_keys() -> None:
    cache = WindowCache(2, sinks=1)
    assert cache.key_positions.tolist() == [[-1] * 4]
    k = torch.randn(2, 1, 7, 4)
    assert cache.update(k, k).k.shape[2] == cache.key_positions.shape[1] == 7
    cache.reorder([1])
    assert cache.key_positions.tolist() == [[0, 4, 5, 6]]
    cache.crop(0)
    assert cache.key_positions.tolist() == [[-1] * 4]
    assert Cache().key_positions.shape == (1, 0)


def test_a_compiled_step() -> None:
    model = layer()
    x = torch.randn(1, 7, 12, dtype=torch.float64)
    for make in (lambda: WindowCache(2, sinks=1), Cache):
        cache = make()

        def step(x: Tensor, cache: Cache = cache) -> Tensor:
            return model(x, mask=causal(), cache=cache, return_weights=True)[1]

        compiled = torch.compile(step, backend="eager")
        with torch.no_grad():
            want = whole(model, x, cache)
            for part in (slice(0, 3), slice(3, 4), slice(4, 5), slice(5, 7)):
                weights = compiled(x[:, part])
                found = by_position(weights, cache.key_positions, 7)
                assert torch.allclose(found, want[:, :, part], atol=1e-12)
