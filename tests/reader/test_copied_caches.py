"""Copies of caches: what they share with those that were given, and what they don't."""

from __future__ import annotations

import torch
import transformers as tf

from multihead.reader.copied_caches import copy_caches
from small import IDS


def test_caches_are_copied_and_other_inputs_are_not() -> None:
    cache = tf.DynamicCache()
    cache.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    inputs = {"input_ids": IDS, "past_key_values": cache, "features": {"cache": cache}}
    copied = copy_caches(inputs)
    assert copied["input_ids"] is IDS and copied["past_key_values"] is not cache
    assert copied["features"]["cache"] is not cache and inputs["features"]["cache"] is cache
    copied["past_key_values"].update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    assert cache.get_seq_length() == 2
    assert copy_caches((IDS, [cache]))[1][0] is not cache


def test_caches_that_hold_a_stream_or_a_graph_are_copied() -> None:
    """`deepcopy` alone refuses both: offloaded caches, and those of a pass with gradients."""
    cache = tf.DynamicCache()
    keys = torch.ones(1, 1, 2, 4, requires_grad=True) * 2
    cache.update(keys, keys, 0)
    cache.prefetch_stream = torch.Stream("cpu")
    copied = copy_caches({"past_key_values": cache})["past_key_values"]
    assert copied.prefetch_stream is cache.prefetch_stream
    assert torch.equal(copied.layers[0].keys, keys) and not copied.layers[0].keys.requires_grad
