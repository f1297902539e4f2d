"""Configs that ask for more than their weight files can hold are refused, and real ones aren't."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, BertConfig, LlamaConfig

from multihead.errors import MultiheadError
from multihead.models.weigh import WeightFiles, build_on_meta, weigh_counts, weigh_model


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 10**6},
        {"n_layer": 10**6},
        {"encoder_layers": 5000},
        {"num_layers": 1e9},
        {"depths": [2, 2, 10**6]},
        {"depths": [1000] * 100},
        {"num_blocks": 10**6},
        {"text_config": {"num_hidden_layers": 10**6}},
        {"llama.block_count": 10**6},
        {"num_experts": 10**9},
        {"n_routed_experts": 10**9},
        {"num_attention_heads": 10**9},
        {"num_hidden_layers": 1000, "num_local_experts": 60_000},
        {"num_labels": 10**9},
        {"num_hidden_layers": float("inf")},
        {"num_hidden_layers": float("nan")},
        {"num_hidden_layers": 10**400},
    ],
    ids=str,
)
@pytest.mark.parametrize("weights", [None, WeightFiles(30, 10**6)], ids=["alone", "with weights"])
def test_counts_that_no_weights_hold(config: dict[str, Any], weights: WeightFiles | None) -> None:
    with pytest.raises(MultiheadError, match="expected at most") as caught:
        weigh_counts("x", "config.json", config, weights)
    assert ("30 tensors" in str(caught.value)) == (weights is not None)


def test_as_many_layers_as_there_are_tensors_may_be_meant() -> None:
    config = {"num_hidden_layers": 3000}
    weigh_counts("x", "config.json", config, WeightFiles(30_000, 10**9))
    with pytest.raises(MultiheadError):
        weigh_counts("x", "config.json", config, WeightFiles(300, 10**9))


def test_what_is_no_count_may_be_large() -> None:
    config = {
        "max_position_embeddings": 10**7,
        "rope_theta": 10**12,
        "vocab_size": 10**6,
        "layer_norm_eps": 1e-6,
        "block_size": 10**5,
        "eos_token_id": 10**6,
        "num_hidden_layers": -1,
        "tie_word_embeddings": True,
    }
    weigh_counts("x", "config.json", config, None)


def test_no_default_config_of_transformers_is_refused() -> None:
    refused, seen = [], 0
    for name in CONFIG_MAPPING:
        try:
            config = CONFIG_MAPPING[name]().to_dict()
        except Exception:  # a config that needs arguments or packages
            continue
        seen += 1
        try:
            weigh_counts(name, "config.json", config, None)
        except MultiheadError as error:
            refused.append(str(error))
    assert refused == [] and seen > 300


def test_a_model_of_more_parameters_than_its_files_have_bits() -> None:
    config = BertConfig(hidden_size=1536, num_attention_heads=12, num_hidden_layers=2)
    from transformers import BertModel

    model = build_on_meta(BertModel, config, "x")
    assert all(p.is_meta for p in model.parameters())
    asked = sum(p.numel() for p in model.parameters())
    weigh_model("x", model, WeightFiles(40, asked // 8))  # a bit each
    with pytest.raises(MultiheadError, match=f"asks for {asked:,} parameters"):
        weigh_model("x", model, WeightFiles(40, 1000))


def test_tables_that_fill_the_memory() -> None:
    model = nn.Module()
    model.register_buffer("mask", torch.empty(10**6, 10**6, device="meta"))
    with pytest.raises(MultiheadError, match="tables and masks of 1,000,000,000,000 elements"):
        weigh_model("x", model, WeightFiles(1, 10**6))


def test_a_config_that_cant_be_built() -> None:
    from transformers import LlamaForCausalLM

    config = LlamaConfig(hidden_act="evil")
    with pytest.raises(MultiheadError, match=r"^what: KeyError: .*evil.*hint$"):
        build_on_meta(LlamaForCausalLM, config, "what", " hint")
