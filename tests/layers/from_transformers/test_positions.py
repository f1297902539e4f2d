"""Position encodings that a module may have."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, T5Config
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.t5.modeling_t5 import T5Attention

from multihead import Cache, MultiHeadAttention
from multihead.layers.from_transformers.positions import rotaries, rotary_tables, t5_bias
from multihead.masks import causal

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


def of_three_axes(family: str, name: str, sections: list[int]) -> tuple[nn.Module, Any]:
    """An attention module and what computes its cosines and sines."""
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config = getattr(modeling, f"{name}Config")(
        **SIZES, head_dim=8, max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 5e3, "mrope_section": sections},
    )  # fmt: skip
    config._attn_implementation = "eager"
    attention = {
        "Qwen2VLText": "Qwen2VLAttention",
        "HunYuanVLText": "HunYuanVLDenseV1Attention",
    }.get(name, f"{name}Attention")
    torch.manual_seed(0)
    rotary = {"Qwen2VLText": "Qwen2VL", "HunYuanVLText": "HunYuanVL"}.get(name, name)
    module = getattr(modeling, attention)(config, 0).eval()
    return module, getattr(modeling, f"{rotary}RotaryEmbedding")(config)


@pytest.mark.parametrize(
    ("family", "name", "interleaved"),
    [("qwen2_vl", "Qwen2VLText", False), ("qwen3_vl", "Qwen3VLText", True)],
)
def test_axes_are_in_the_order_of_the_models_code(
    family: str, name: str, interleaved: bool
) -> None:
    module, rotary = of_three_axes(family, name, [2, 1, 1])
    for projection in (module.q_proj, module.k_proj):
        nn.init.normal_(projection.weight, std=0.5)
    layer = MultiHeadAttention.from_transformers(module)
    assert bool(layer.positions.scaling.get("mrope_interleaved")) == interleaved  # type: ignore[union-attr]
    x, ids = torch.randn(2, 6, 32), torch.randint(0, 30, (3, 2, 6))
    mask = torch.zeros(6, 6).masked_fill(~causal().dense(6, 6)[0, 0], float("-inf"))
    with torch.no_grad():
        want = module(x, attention_mask=mask[None, None], position_embeddings=rotary(x, ids))[0]
        torch.testing.assert_close(
            layer(x, mask=causal(), position_ids=ids), want, atol=1e-5, rtol=1e-4
        )
        assert not torch.allclose(layer(x, mask=causal(), position_ids=ids[0]), want, atol=1e-2)
        cache = Cache()
        steps = [
            layer(x[:, i : i + 1], mask=causal(), position_ids=ids[..., i : i + 1], cache=cache)
            for i in range(6)
        ]
    torch.testing.assert_close(torch.cat(steps, 1), want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "name"), [("ernie4_5_vl_moe", "Ernie4_5_VLMoeText"), ("hunyuan_vl", "HunYuanVLText")]
)
def test_other_orders_of_axes_are_refused(family: str, name: str) -> None:
    """They are the same for text, where all three positions of a token are equal."""
    module, _ = of_three_axes(family, name, [1, 1, 2])
    with pytest.raises(ValueError, match=r"mrope_section.*whose cosines and sines aren't those"):
        MultiHeadAttention.from_transformers(module)


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
