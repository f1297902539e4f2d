"""The cache of a model without values, against that of the model itself, run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

from multihead.costs.probe import Held, _compare, probe_cache
from multihead.costs.shape import Kept

SMALL: dict[str, Any] = dict(
    hidden_size=48,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=8,
    vocab_size=17,
)


def held(kind: str, **sizes: Any) -> dict[str, Held]:
    config = tf.AutoConfig.for_model(kind, **SMALL | sizes)
    with torch.device("meta"):
        model = tf.AutoModel.from_config(
            config, dtype=torch.bfloat16, experts_implementation="batched_mm"
        )
    return probe_cache(model)


def test_keys_and_values() -> None:
    assert held("llama") == {
        f"layers.{layer}.self_attn": Held(keys=(24, 24), layers=1) for layer in range(2)
    }


def test_states_and_their_dtypes() -> None:
    found = held(
        "qwen3_next",
        layer_types=["linear_attention", "full_attention"],
        num_experts=2,
        num_experts_per_tok=1,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
    )
    channels = 2 * 2 * 8 + 4 * 16
    assert dict(found["layers.0.linear_attn"].states) == {
        "conv_states": Kept(4 * channels),
        "recurrent_states": Kept(4 * 8 * 16, 4),  # in float32, whatever the model's dtype
    }
    assert found["layers.1.self_attn"].keys == (24, 24)


def test_what_can_not_be_run_holds_nothing() -> None:
    assert probe_cache(torch.nn.Linear(2, 2, device="meta")) == {}
    assert held("bert") == {}


@pytest.mark.parametrize("topk", [5, 4096])
def test_keys_of_an_indexer(topk: int) -> None:
    found = held(
        "deepseek_v32",
        num_key_value_heads=6,
        kv_lora_rank=16,
        q_lora_rank=20,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=10,
        index_n_heads=2,
        index_head_dim=8,
        index_topk=topk,
        first_k_dense_replace=2,
    )
    (one,) = {repr(h): h for h in found.values()}.values()
    assert len(found) == 2 and one.others == (Kept(8),) and sum(one.keys) == 20


def test_layers_that_share_a_module() -> None:
    """It holds the keys of each of them."""
    layers = {
        f".layers.{layer}.{name}": torch.empty(1, 2, 3, 4, dtype=torch.bfloat16)
        for layer in range(2)
        for name in ("keys", "values")
    }
    assert _compare(layers, layers) == Held(keys=(8, 8), layers=2)
