"""Position encodings that a module may have."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, T5Config
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.t5.modeling_t5 import T5Attention

from multihead.layers.from_transformers.positions import rotaries, rotary_tables, t5_bias

SIZES = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, rope_theta=5e3)


def llama(**rope: object) -> LlamaAttention:
    return LlamaAttention(LlamaConfig(**SIZES, rope_parameters=rope), 0)


def test_rotary_positions_are_those_of_the_config() -> None:
    module = llama(**YARN)
    tables = rotary_tables(module, torch.arange(3)[None], torch.float32)
    half, interleaved = rotaries(module, 8, tables)
    assert (half.rope_type, half.theta) == ("yarn", 5e3)
    assert not half.interleaved and interleaved.interleaved
    cos, sin = half.cos_sin(torch.arange(3))
    torch.testing.assert_close(tables[0][0, :, :4], cos)
    torch.testing.assert_close(tables[1][0, :, :4], sin)


def test_rotary_positions_of_another_kind_are_refused() -> None:
    module = llama(rope_type="default", rope_theta=1e4, llama_4_scaling_beta=0.1)
    tables = rotary_tables(module, torch.arange(3)[None], torch.float32)
    with pytest.raises(ValueError, match=r"LlamaAttention: rope_parameters=.*scaling_beta"):
        rotaries(module, 8, tables)


@pytest.mark.parametrize("is_decoder", [False, True])
def test_t5s_table_has_its_buckets_at_all_distances(is_decoder: bool) -> None:
    config = T5Config(d_model=16, d_kv=4, num_heads=3, is_decoder=is_decoder)
    module = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    bias = t5_bias(module, 3)
    assert bias is not None and bias.weight is not module.relative_attention_bias.weight
    ids = torch.arange(300)
    torch.testing.assert_close(bias(ids, ids), module.compute_bias(300, 300))
    module.relative_attention_max_distance = 64
    assert t5_bias(module, 3).max_distance == 64  # type: ignore[union-attr]
    assert t5_bias(T5Attention(config, layer_idx=1), 3) is None
