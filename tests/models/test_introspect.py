"""Facts about any model: fingerprints, forward arguments, tolerances."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from torch import nn

import multihead
from multihead.models.introspect import (
    find_special_ids,
    fingerprint,
    forward_kwargs,
    is_encoder_decoder,
    require_model,
    text_config,
    tolerance,
)
from small import llama


def test_a_fingerprint_knows_a_model_by_its_numbers() -> None:
    model = llama()
    before = fingerprint(model)
    assert fingerprint(llama()) == before
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] += 1e-3
    assert fingerprint(model) != before
    assert fingerprint(llama().double()) != before


def test_forward_kwargs_ask_for_nothing_that_is_not_needed() -> None:
    model, ids = llama(), torch.tensor([[1, 2]])
    last = forward_kwargs(model, {"input_ids": ids})
    assert list(last) == ["use_cache", "logits_to_keep", "input_ids"]
    assert (last["use_cache"], last["logits_to_keep"]) == (False, 1)
    every = forward_kwargs(model, {"input_ids": ids, "logits_to_keep": 3}, logits="all", cache=True)
    assert list(every) == ["use_cache", "input_ids"] and every["use_cache"] is True
    # with labels the model computes its own loss, of all positions
    assert list(forward_kwargs(model, {"input_ids": ids, "labels": ids})) == ["input_ids", "labels"]
    # what the user passes is kept
    assert forward_kwargs(model, {"input_ids": ids, "use_cache": True})["use_cache"] is True
    plain = torch.nn.Linear(2, 2)
    assert list(forward_kwargs(plain, {"input": ids})) == ["input"]


def test_tolerances() -> None:
    assert tolerance(torch.float32) == 1e-4
    assert tolerance(torch.float32, 10) == pytest.approx(1e-3)
    assert tolerance(torch.float64, 0.1) == pytest.approx(1e-7)
    assert tolerance(torch.float16, 0.1) == tolerance(torch.float16) == 1e-2
    assert tolerance(torch.bfloat16) == tolerance(torch.float8_e4m3fn) == 6e-2


def test_special_ids_come_from_the_config() -> None:
    model, _ = multihead.load_builtin()
    model.config.eos_token_id = [7, 9]
    assert {7, 9} <= find_special_ids(model)
    assert find_special_ids(torch.nn.Linear(2, 2)) == set()


def test_a_name_is_no_model() -> None:
    with pytest.raises(TypeError, match="model is a str: expected a model"):
        require_model("gpt2")


def test_what_a_config_states_is_read_of_models_and_configs_alike() -> None:
    small = dict(d_model=8, encoder_layers=1, decoder_layers=1, vocab_size=9)
    small |= dict(encoder_attention_heads=2, decoder_attention_heads=2)
    bart = tf.BartConfig(**small, encoder_ffn_dim=8, decoder_ffn_dim=8)
    assert is_encoder_decoder(bart) and is_encoder_decoder(tf.BartModel(bart))
    assert not is_encoder_decoder(nn.Linear(2, 2)) and text_config(nn.Linear(2, 2)) is None
    assert not is_encoder_decoder(tf.LlamaConfig())
    clip = tf.CLIPConfig()
    assert text_config(clip).model_type == "clip_text_model"
