"""Modules cut to some of their heads run, count positions, and refuse attention that would read other
keys."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import transformers as tf

import multihead
from families import FAMILIES, batches_of, model_of, real_outputs
from multihead.models.head_layout import HeadLayout
from multihead.models.resize import LayerConfig, head_layout, resize_as_configured, resize_heads
from multihead.models.site import find_sites
from multihead.pruning.surgery import remove_heads

BY_NAME = {family.name: family for family in FAMILIES}


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_uneven_heads_with_a_cache(name: str) -> None:
    """Steps of decoding read each key once, other passes gather keys: both give the same."""
    family = BY_NAME[name]
    model, batch = model_of(family), batches_of(family, "none")[0]
    smaller = remove_heads(model, {site.name: [1, 5] for site in find_sites(model)}, batch)
    ids = batch["input_ids"]
    with torch.no_grad():
        whole = smaller(ids).logits
        first = smaller(ids[:, :4], use_cache=True)
        cache, found = first.past_key_values, [first.logits]
        for i in range(4, ids.shape[1]):
            found.append(smaller(ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=0, atol=1e-4)


def test_uneven_heads_refuse_other_attention() -> None:
    family = BY_NAME["llama"]
    model, batch = model_of(family), batches_of(family, "none")[0]
    smaller = remove_heads(model, {find_sites(model)[0].name: [1]}, batch)
    smaller.set_attn_implementation("sdpa")
    words = (
        r"'sdpa': this model's query heads share key/value heads in a way that only .*'multihead'"
        r" computes"
    )
    with pytest.raises(ValueError, match=words):
        smaller(**batch)


def test_heads_that_are_even_again_take_any_attention() -> None:
    family = BY_NAME["llama"]
    model, batch = model_of(family), batches_of(family, "none")[0]
    name = find_sites(model)[0].name
    smaller = remove_heads(
        remove_heads(model, {name: [1]}, batch), {name: [1, 3]}, batch
    )  # heads 0, 3 and 5 of three groups
    expected = real_outputs(smaller, batch)
    smaller.set_attn_implementation("sdpa")
    np.testing.assert_allclose(real_outputs(smaller, batch), expected, rtol=0, atol=1e-4)


def test_a_dropped_layer_still_counts_positions() -> None:
    """Generation asks the first layer's cache how far the text is."""
    family = BY_NAME["llama"]
    model, batch = model_of(family), batches_of(family, "none")[0]
    smaller = remove_heads(model, {find_sites(model)[0].name: list(range(6))}, batch)
    ids = batch["input_ids"][:1, :5]
    plain = smaller.generate(
        ids, max_new_tokens=6, do_sample=False, use_cache=False, pad_token_id=5
    )
    assert (
        smaller.generate(
            ids, max_new_tokens=6, do_sample=False, use_cache=True, pad_token_id=5
        ).tolist()
        == plain.tolist()
    )


def test_labels_stay_when_a_whole_stack_loses_its_heads() -> None:
    family = BY_NAME["bart"]
    model, batch = model_of(family), batches_of(family, "none")[0]
    sites = find_sites(model)
    smaller = remove_heads(
        model,
        {s.name: list(range(s.num_heads)) for s in sites if s.label.startswith("encoder")},
        batch,
    )
    assert [s.label for s in find_sites(smaller)] == [
        s.label for s in sites if s.label.startswith("decoder")
    ]


def test_heads_are_cut_in_their_new_order() -> None:
    """Query heads 5, 0 and 3 read key/value heads 2, 0 and 1 of three: the same as 6 heads with the
    others at zero, whatever the order.
    """
    family = BY_NAME["llama"]
    model, batch = model_of(family), batches_of(family, "none")[0]
    smaller = copy.deepcopy(model)
    site = find_sites(smaller)[0]
    resize_heads(smaller, site, HeadLayout((5, 0, 3), (2, 0, 1), (0, 1, 2), (5, 0, 3), 3))
    layout = head_layout(find_sites(smaller)[0])
    assert layout.original_heads == (5, 0, 3) and layout.config_num_heads == 6 and layout.is_even
    off = [find_sites(model)[0].head_label(h) for h in (1, 2, 4)]
    with multihead.ablate_heads(model, off):
        expected = real_outputs(model, batch)
    np.testing.assert_allclose(real_outputs(smaller, batch), expected, rtol=0, atol=1e-5)


def test_a_layer_config_is_the_models_own_but_for_its_counts() -> None:
    config = tf.LlamaConfig(num_attention_heads=8)
    layer = LayerConfig(config, {"num_attention_heads": 3})
    layer.rope_theta = 7.0
    assert layer.num_attention_heads == 3 and config.num_attention_heads == 8
    assert config.rope_theta == 7.0 and layer.hidden_size == config.hidden_size
    assert copy.deepcopy(layer).num_attention_heads == 3


def test_entries_of_a_config_name_modules_that_exist() -> None:
    model = copy.deepcopy(model_of(BY_NAME["llama"]))
    with pytest.raises(ValueError, match="the config has a pruned attention module 'nowhere'"):
        resize_as_configured(model, {"nowhere": {}})
