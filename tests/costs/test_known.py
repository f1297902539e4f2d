"""Costs of well-known models, from their configs as published: bytes that a token takes in the
cache at 2 bytes a number.
"""

from __future__ import annotations

import socket
from typing import Any

import pytest

from multihead import cost

GIB, MIB = 2**30, 2**20
GPT2 = dict(
    model_type="gpt2", n_embd=768, n_head=12, n_layer=12, n_positions=1024, vocab_size=50257
)
LLAMA2_7B = dict(
    model_type="llama",
    hidden_size=4096,
    intermediate_size=11008,
    num_attention_heads=32,
    num_hidden_layers=32,
    num_key_value_heads=32,
    max_position_embeddings=4096,
    vocab_size=32000,
)
LLAMA3_8B = dict(
    model_type="llama",
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_hidden_layers=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    vocab_size=128256,
)
LLAMA3_70B = dict(
    model_type="llama",
    hidden_size=8192,
    intermediate_size=28672,
    num_attention_heads=64,
    num_hidden_layers=80,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    vocab_size=128256,
)
MISTRAL_7B = dict(
    model_type="mistral",
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_hidden_layers=32,
    num_key_value_heads=8,
    sliding_window=4096,
    max_position_embeddings=32768,
    vocab_size=32000,
)
DEEPSEEK_V2 = dict(
    model_type="deepseek_v2",
    hidden_size=5120,
    intermediate_size=12288,
    num_attention_heads=128,
    num_hidden_layers=60,
    num_key_value_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    first_k_dense_replace=1,
    n_routed_experts=160,
    moe_intermediate_size=1536,
    n_shared_experts=2,
    n_group=8,
    topk_group=3,
    num_experts_per_tok=6,
    topk_method="group_limited_greedy",
    max_position_embeddings=163840,
    vocab_size=102400,
)
DEEPSEEK_V3 = dict(
    model_type="deepseek_v3",
    hidden_size=7168,
    intermediate_size=18432,
    num_attention_heads=128,
    num_hidden_layers=61,
    num_key_value_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    first_k_dense_replace=3,
    n_routed_experts=256,
    moe_intermediate_size=2048,
    max_position_embeddings=163840,
    vocab_size=129280,
)
QWEN3_235B = dict(
    model_type="qwen3_moe",
    hidden_size=4096,
    intermediate_size=12288,
    num_attention_heads=64,
    num_hidden_layers=94,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=1536,
    max_position_embeddings=40960,
    vocab_size=151936,
)
GPT_OSS_120B = dict(
    model_type="gpt_oss",
    hidden_size=2880,
    intermediate_size=2880,
    num_attention_heads=64,
    num_hidden_layers=36,
    num_key_value_heads=8,
    head_dim=64,
    sliding_window=128,
    num_local_experts=128,
    num_experts_per_tok=4,
    layer_types=["sliding_attention", "full_attention"] * 18,
    max_position_embeddings=131072,
    vocab_size=201088,
)
GPT_OSS_20B = GPT_OSS_120B | dict(
    num_hidden_layers=24,
    num_local_experts=32,
    layer_types=["sliding_attention", "full_attention"] * 12,
)
GEMMA3_27B = dict(
    model_type="gemma3_text",
    hidden_size=5376,
    intermediate_size=21504,
    num_attention_heads=32,
    num_hidden_layers=62,
    num_key_value_heads=16,
    head_dim=128,
    sliding_window=1024,
    layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 10 + ["sliding_attention"] * 2,
    max_position_embeddings=131072,
    vocab_size=262208,
)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("a cost asked the network")

    monkeypatch.setattr(socket.socket, "connect", refused)


@pytest.mark.parametrize(
    ("config", "bytes_per_token"),
    [
        (GPT2, 36_864),
        (LLAMA2_7B, 524_288),
        (LLAMA3_8B, 131_072),
        (LLAMA3_70B, 327_680),
        (MISTRAL_7B, 131_072),
        (DEEPSEEK_V2, 69_120),
        (DEEPSEEK_V3, 70_272),
        (QWEN3_235B, 192_512),
        (GPT_OSS_120B, 73_728),
    ],
    ids=[
        "GPT-2",
        "Llama-2-7B",
        "Llama-3-8B",
        "Llama-3-70B",
        "Mistral-7B",
        "DeepSeek-V2",
        "DeepSeek-V3",
        "Qwen3-235B",
        "gpt-oss-120b",
    ],
)
def test_bytes_that_a_token_takes(config: dict[str, Any], bytes_per_token: int) -> None:
    found = cost(config, context_length=1, dtype="bfloat16")
    assert found.cache_per_token == found.cache() == bytes_per_token
    assert cost(config, context_length=1, dtype="float32").cache() == 2 * bytes_per_token


def test_a_window_caps_the_cache() -> None:
    assert [cost(MISTRAL_7B, context_length=n, dtype="float16").cache() for n in (4096, 32768)] == [
        512 * MIB
    ] * 2
    found = cost(MISTRAL_7B, context_length=32768, dtype="float16")
    assert found.context_length * found.cache_per_token == 8 * found.cache()
    assert found.cache("transformers") == 4095 * 131_072  # the next token brings its own
    assert found.cache("paged") == (4096 + 16) * 131_072  # 4,095 tokens lie on at most 257 pages


def test_windows_in_every_other_layer() -> None:
    found = cost(GPT_OSS_20B, context_length=8192, batch_size=32, dtype="bfloat16")
    assert (
        found.cache() == (6 + 12 * 32 * 128 * 2048 / GIB) * GIB
        and f"{found.cache() / GIB:.2f}" == "6.09"
    )
    assert found.batch_size * found.context_length * found.cache_per_token == 12 * GIB
    kinds = [(labels.split()[0], count, shape.window) for labels, count, shape in found.kinds()]
    assert kinds == [("L0", 12, 128), ("L1", 12, None)]


def test_windows_in_five_layers_of_six() -> None:
    found = cost(GEMMA3_27B, context_length=131072, dtype="bfloat16")
    full = 131072 * found.cache_per_token
    assert full == 131072 * 62 * 8192 and found.cache() == (10 * 131072 + 52 * 1024) * 8192
    assert 5.9 < full / found.cache() < 6


def test_parameters_of_a_latent() -> None:
    found = cost(DEEPSEEK_V3, context_length=1)
    layer = found.shapes[0]
    assert (
        sum(layer.parameters.values()) == 187_107_328
        and sum(found.parameters.values()) == 61 * 187_107_328
    )
    assert layer.parameters["norms"] == 1536 + 512 and (layer.head_dim, layer.value_dim) == (
        192,
        128,
    )
    expanded = 128 * (192 + 128) * 2 * 61
    assert expanded / found.cache_per_token == pytest.approx(71.1, abs=0.05)


def test_parameters_of_plain_heads_whatever_their_number() -> None:
    assert cost(GPT2).parameters == dict.fromkeys(
        ("query", "key", "value", "output"), 12 * (768**2 + 768)
    )
    for heads in (1, 2, 12, 48, 768):
        found = cost(embed_dim=768, num_heads=heads, context_length=100)
        assert sum(found.parameters.values()) == 4 * 768**2
        assert found.prefill() == cost(embed_dim=768, num_heads=1, context_length=100).prefill()


def test_heads_that_are_wider_than_their_share() -> None:
    found = cost(QWEN3_235B, context_length=1)
    per_layer = {part: number / 94 for part, number in found.parameters.items()}
    assert per_layer == {
        "query": 4096 * 64 * 128,
        "key": 4096 * 4 * 128,
        "value": 4096 * 4 * 128,
        "output": 64 * 128 * 4096,
        "q_norm": 128,
        "k_norm": 128,
    }
