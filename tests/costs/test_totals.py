"""Sums over layers, and what other heads cost beside such a model."""

from __future__ import annotations

from typing import Any

import transformers as tf

import multihead
from multihead import cost

SMALL = dict(
    hidden_size=48,
    intermediate_size=40,
    num_hidden_layers=3,
    vocab_size=17,
    max_position_embeddings=64,
)


def test_memory() -> None:
    found = cost(
        embed_dim=64,
        num_heads=8,
        num_kv_heads=2,
        num_layers=3,
        context_length=100,
        batch_size=5,
        dtype="float32",
    )
    rows = 5 * 100
    assert found.memory == {
        "probabilities": rows * 8 * 100 * 4,
        "probabilities, all layers": 3 * rows * 8 * 100 * 4,
        "streamed": rows * 8 * 4,
        "streamed, all layers": 3 * rows * 8 * 4,
        "activations": (
            rows * (64 + 64 + 16 + 16 + 64 + 64) * 4
        ),  # input, queries, keys, values, heads' outputs, output
        "activations, all layers": 3 * rows * 288 * 4,
    }
    assert (
        cost(embed_dim=64, num_heads=8, context_length=100).memory["streamed"] == 100 * 8 * 4
    )  # in float32, whatever the dtype


def llama(groups: int, heads: int = 6, head_dim: int = 8) -> tf.LlamaConfig:
    return tf.LlamaConfig(
        **SMALL,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        attention_bias=True,
    )


def numbers(found: multihead.costs.Cost) -> tuple[Any, ...]:
    return (
        found.parameters,
        found.prefill(),
        found.prefill(full=True),
        found.decode(),
        found.cache(),
        found.memory,
    )


def test_other_heads_cost_what_such_a_model_costs() -> None:
    found = cost(llama(2), context_length=20)
    ways = found.alternatives()
    assert [name for name, _ in ways] == [
        "MHA",
        "GQA",
        "GQA",
        "MQA",
        "MLA",
        "MHA, fewer heads",
        "MHA, more heads",
    ]
    for (_, one), groups in zip(ways, (6, 3, 2, 1), strict=False):
        assert numbers(one) == numbers(cost(llama(groups), context_length=20)), groups
    for (_, one), (heads, wide) in zip(ways[5:], ((3, 16), (12, 4)), strict=True):
        assert numbers(one) == numbers(cost(llama(heads, heads, wide), context_length=20)), heads
        assert (one.parameters, one.prefill()) == (
            ways[0][1].parameters,
            ways[0][1].prefill(),
        )  # whatever the number of heads


def test_a_latent_costs_what_such_a_model_costs() -> None:
    plain = tf.LlamaConfig(**SMALL, num_attention_heads=6, num_key_value_heads=2, head_dim=8)
    latent = tf.DeepseekV3Config(
        **SMALL,
        num_attention_heads=6,
        num_key_value_heads=6,
        q_lora_rank=None,
        kv_lora_rank=32,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        first_k_dense_replace=3,
    )
    found = dict(cost(plain, context_length=20).alternatives())["MLA"]
    assert numbers(found) == numbers(cost(latent, context_length=20))
    assert found.cache_per_token == 3 * (32 + 4) * 2
    back = dict(cost(latent, context_length=20).alternatives())["MHA"]
    assert numbers(back) == numbers(dict(cost(plain, context_length=20).alternatives())["MHA"])


def test_the_source_of_an_encoder_decoder() -> None:
    config = tf.WhisperConfig(
        d_model=48,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=6,
        encoder_ffn_dim=40,
        decoder_ffn_dim=40,
    )
    found = cost(config, context_length=100, dtype="float16")
    assert found.source_length == 1500 and [s.cross for s in found.shapes].count(True) == 3
    assert (
        found.cache() == 3 * 2 * 48 * 2 * (100 + 1500) and found.cache_per_token == 3 * 2 * 48 * 2
    )
    assert cost(config, context_length=200).at_length(100).source_length == 1500
    assert (
        found.decode().projections == 2 * 3 * (4 + 2) * 48 * 48
    )  # nothing of the source is projected again
