"""Shapes read off modules: layers that differ, hybrids, shared modules and caches."""

from __future__ import annotations

from typing import Any

import pytest
import transformers as tf
from torch import nn

import multihead
from multihead import MultiHeadAttention, cost

SMALL = dict(
    hidden_size=48,
    intermediate_size=40,
    num_hidden_layers=3,
    vocab_size=17,
    max_position_embeddings=64,
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


def test_a_model_whose_layers_differ() -> None:
    """As after pruning: every module is its own shape."""
    layers = nn.ModuleList(
        MultiHeadAttention(24, heads, num_kv_heads=groups, head_dim=8)
        for heads, groups in ((3, 1), (2, 2))
    )
    found = cost(layers, context_length=7)
    assert [(s.num_heads, s.num_kv_heads, s.head_dim) for s in found.shapes] == [
        (3, 1, 8),
        (2, 2, 8),
    ]
    assert sum(found.parameters.values()) == sum(p.numel() for p in layers.parameters())
    assert cost(nn.MultiheadAttention(24, 3)).parameters == dict.fromkeys(
        ("query", "key", "value", "output"), 24 * 25
    )


@pytest.mark.parametrize(
    "config",
    [
        tf.BloomConfig(hidden_size=48, n_head=6, n_layer=2, vocab_size=17),
        tf.FalconConfig(
            hidden_size=48,
            num_attention_heads=6,
            num_hidden_layers=2,
            vocab_size=17,
            multi_query=True,
        ),
        tf.GPTNeoConfig(
            hidden_size=48,
            num_heads=6,
            num_layers=2,
            attention_types=[[["global", "local"], 1]],
            vocab_size=17,
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_attention_that_cannot_be_read_is_counted(config: Any) -> None:
    found = cost(config)
    model = tf.AutoModel.from_config(config)
    names = [shape.name for shape in found.shapes]
    assert (
        len(names) == 2
        and "other" not in found.parameters
        and all(s.causal and s.cached for s in found.shapes)
    )
    assert sum(found.parameters.values()) == sum(
        p.numel() for n in names for p in model.get_submodule(n).parameters()
    )


def test_hybrids_and_shared_modules() -> None:
    types = ["linear_attention", "full_attention"]
    hybrid = cost(
        tf.Qwen3NextConfig(
            **SMALL | {"num_hidden_layers": 2},
            num_attention_heads=6,
            num_key_value_heads=3,
            head_dim=8,
            layer_types=types,
            num_experts=2,
            num_experts_per_tok=1,
        )
    )
    assert [s.label for s in hybrid.shapes] == ["L1"] and hybrid.parameters["gate"] == 48 * 48
    assert [s.kind for s in hybrid.states] == ["linear attention"] and not hybrid.notes
    sizes = dict(
        embedding_size=16,
        hidden_size=48,
        num_attention_heads=6,
        intermediate_size=40,
        vocab_size=17,
    )
    albert = cost(tf.AlbertConfig(**sizes, num_hidden_layers=5), context_length=7)
    one = cost(tf.AlbertConfig(**sizes, num_hidden_layers=1), context_length=7)
    assert albert.parameters == one.parameters and albert.prefill().total == 5 * one.prefill().total


def test_layers_that_share_a_cache() -> None:
    sizes = dict(
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=8,
        laurel_rank=4,
        hidden_size_per_layer_input=4,
    )
    config = tf.Gemma3nTextConfig(
        **SMALL | {"num_hidden_layers": 4},
        **sizes,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        sliding_window=5,
        activation_sparsity_pattern=[0.0] * 4,
        vocab_size_per_layer_input=17,
    )
    found = cost(config, context_length=20, dtype="bfloat16")
    assert [s.has_keys for s in found.shapes] == [True, True, False, False]
    assert found.cache() == (5 + 20) * 3 * 16 * 2 and found.shapes[2].parameters["key"] == 0
    assert [s.window for s in found.shapes] == [5, None, 5, None]
