"""Latent attention of transformers as a layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import in_models
from families import enlarge

SIZES = dict(hidden_size=48, intermediate_size=40, num_hidden_layers=1, vocab_size=17)
WIDTHS = dict(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=10)
HEADS = dict(num_attention_heads=6, num_key_value_heads=6, first_k_dense_replace=1)
YARN = dict(
    rope_type="yarn", factor=4.0, original_max_position_embeddings=8, rope_theta=1e4, mscale=1.0
)


@pytest.mark.parametrize(
    "options",
    [
        dict(q_lora_rank=20),
        dict(q_lora_rank=None, attention_bias=True),
        dict(q_lora_rank=20, rope_interleave=False),
        dict(q_lora_rank=20, rope_parameters=YARN | {"mscale_all_dim": 0.8}),
    ],
    ids=["latent queries", "biases", "halves", "yarn"],
)
def test_latent_attention_of_deepseek(options: dict[str, Any]) -> None:
    config = DeepseekV3Config(**SIZES, **WIDTHS, **HEADS, **options, pad_token_id=0)
    model = DeepseekV3ForCausalLM(config).eval()
    enlarge(model, 3, 1.6)
    (call,) = in_models.calls_in(model, {"input_ids": torch.randint(17, (2, 11))})
    layer = in_models.convert(call.module)
    scale = float(call.out.abs().max())
    for got in (in_models.run_layer(layer, call), in_models.run_steps(layer, call)):
        assert float((got - call.out).abs().max()) < 1e-5 * scale
