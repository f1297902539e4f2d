"""Masks of a layer: they hold in every call, together with that of the call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multihead import Cache, MultiHeadAttention, WindowCache
from multihead.layers.inputs import join_masks
from multihead.layers.rotary import Rotary
from multihead.masks import causal, documents, padding, prefix, window

RULES: dict[str, Any] = {
    "causal": causal(),
    "window": causal() & window(left=2),
    "both sides": window(left=1, right=3),
    "prefix": prefix(2),
}
CALLS: dict[str, Any] = {
    "none": None,
    "causal": causal(),
    "padding": padding([5, 9]),
    "documents": documents([0, 0, 0, 1, 1, 1, 1, 1, 1]),
    "boolean": torch.rand(2, 2, 9, 9, generator=torch.Generator().manual_seed(0)) < 0.7,
    "numbers": torch.randn(9, 9, generator=torch.Generator().manual_seed(0)),
}


def pair(rule: Any, **options: Any) -> tuple[MultiHeadAttention, MultiHeadAttention]:
    """A layer with the mask and the same without."""
    layer = MultiHeadAttention(12, 2, mask=rule, positions=Rotary(6), **options)
    plain = MultiHeadAttention(12, 2, positions=Rotary(6), **options)
    plain.load_state_dict(layer.state_dict())
    return layer, plain


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("call", CALLS)
def test_a_layers_mask_is_joined_with_that_of_the_call(rule: str, call: str) -> None:
    layer, plain = pair(RULES[rule])
    x = torch.randn(2, 9, 12)
    mask, allowed = CALLS[call], RULES[rule].dense(9, 9)
    if mask is not None:
        if not isinstance(mask, torch.Tensor):
            allowed = allowed & mask.dense(9, 9)
        elif mask.dtype == torch.bool:
            allowed = allowed & mask
    numbers = mask if call == "numbers" else None
    want = plain(x, mask=allowed, attn_bias=numbers)
    torch.testing.assert_close(layer(x, mask=mask), want, atol=1e-5, rtol=1e-5)
    y, weights = layer(x, mask=mask, return_weights=True)
    torch.testing.assert_close(y, want, atol=1e-5, rtol=1e-5)
    assert (weights.masked_select(~allowed.expand_as(weights)) == 0).all()


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5), rule=st.sampled_from(list(RULES)))
@settings(max_examples=20, deadline=None)
def test_steps_with_a_cache_equal_one_pass(sizes: list[int], rule: str) -> None:
    layer, _ = pair(RULES[rule] & causal())
    x, cache = torch.randn(2, sum(sizes), 12), Cache()
    steps = [layer(part, cache=cache) for part in x.split(sizes, 1)]
    torch.testing.assert_close(torch.cat(steps, 1), layer(x), atol=1e-5, rtol=1e-5)


def test_caches_of_ragged_batches_of_windows_and_dense_masks() -> None:
    layer, plain = pair(RULES["window"])
    x = torch.randn(2, 9, 12)
    ring = WindowCache(left=2)
    steps = [layer(part, cache=ring) for part in x.split([4, 1, 3, 1], 1)]
    torch.testing.assert_close(torch.cat(steps, 1), layer(x), atol=1e-5, rtol=1e-5)
    valid = torch.ones(2, 5, dtype=torch.bool)
    valid[1, :2] = False
    cache = Cache()
    layer(x[:, :5], cache=cache, valid=valid)
    got = layer(x[:, 5:], cache=cache)
    torch.testing.assert_close(got[1:], layer(x[1:, 2:])[:, 3:], atol=1e-5, rtol=1e-5)
    # a dense mask of the second call is one of all keys so far
    mask, cache = torch.rand(2, 1, 4, 9) < 0.7, Cache()
    layer(x[:, :5], cache=cache)
    allowed = torch.cat([RULES["window"].dense(5, 9).expand(2, -1, -1, -1), mask], 2)
    allowed = allowed & RULES["window"].dense(9, 9)
    want = plain(x, mask=allowed)[:, 5:]
    torch.testing.assert_close(layer(x[:, 5:], mask=mask, cache=cache), want, atol=1e-5, rtol=1e-5)


def test_nested_inputs_are_masked_within_each_sequence() -> None:
    layer = MultiHeadAttention(12, 2, mask=prefix(2) & padding([3, 1, 4]))
    parts = [torch.randn(n, 12) for n in (3, 1, 5)]
    memory = [torch.randn(n, 12) for n in (4, 2, 6)]
    x, keys = (torch.nested.nested_tensor(y, layout=torch.jagged) for y in (parts, memory))
    rules = [prefix(2) & padding([n]) for n in (3, 1, 4)]
    plain = MultiHeadAttention(12, 2)
    plain.load_state_dict(layer.state_dict())
    for y, z, rule, own, cross in zip(
        parts, memory, rules, layer(x).unbind(), layer(x, keys).unbind()
    ):
        torch.testing.assert_close(own, plain(y[None], mask=rule)[0], atol=1e-5, rtol=1e-5)
        want = plain(y[None], z[None], mask=rule)[0]
        torch.testing.assert_close(cross, want, atol=1e-5, rtol=1e-5)


def test_nested_inputs_are_masked_by_layer_and_call() -> None:
    layer, plain = pair(RULES["window"])
    parts = [torch.randn(n, 12) for n in (3, 1, 5)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged)
    for part, got in zip(parts, layer(x, mask=window(left=1)).unbind()):
        want = plain(part[None], mask=causal() & window(left=1))[0]
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_a_mask_of_distances_needs_positions_of_the_queries() -> None:
    layer = MultiHeadAttention(12, 2, mask=causal())
    x = torch.randn(1, 3, 12)
    with pytest.raises(ValueError, match="the layer's mask is one of distances"):
        layer(x, torch.randn(1, 3, 12), cache=Cache())
    with pytest.raises(TypeError, match="mask is Tensor: expected an interval mask"):
        MultiHeadAttention(12, 2, mask=torch.ones(3, 3).bool())  # type: ignore[arg-type]


def test_join_masks() -> None:
    assert join_masks(None, None, 2, 2) is None
    joined = join_masks(torch.tensor([[True, False], [True, True]]), window(left=0), 2, 2)
    assert joined.squeeze().tolist() == [[True, False], [False, True]]  # type: ignore[union-attr]
