"""Attention by its sizes alone."""

from __future__ import annotations

from typing import Any

import pytest

from multihead import LatentAttention, cost

WIDTH, HEADS = 64, 4
MLA: dict[str, Any] = dict(kv_latent_dim=24, rotary_dim=6, head_dim=8)


@pytest.mark.parametrize(
    "options", [{}, {"q_latent_dim": 12}, {"v_head_dim": 5}], ids=lambda options: ",".join(options)
)
def test_a_latent_costs_what_the_layer_costs(options: dict[str, int]) -> None:
    layer = cost(LatentAttention(WIDTH, HEADS, **MLA | options), context_length=50)
    found = cost(embed_dim=WIDTH, num_heads=HEADS, **MLA | options, context_length=50)
    assert found.parameters == layer.parameters and found.prefill() == layer.prefill()
    assert found.cache() == layer.cache() == 50 * (24 + 6) * 2


def test_deepseek_v3_by_its_sizes() -> None:
    found = cost(
        embed_dim=7168,
        num_heads=128,
        head_dim=128,
        kv_latent_dim=512,
        rotary_dim=64,
        q_latent_dim=1536,
        num_layers=61,
    )
    assert found.cache_per_token == 70_272
    assert sum(found.parameters.values()) == 61 * 187_107_328


def test_windows_in_some_of_the_layers() -> None:
    sizes: dict[str, Any] = dict(embed_dim=64, num_heads=4, num_layers=6, context_length=100)
    found = cost(**sizes, window=10, num_window_layers=5)
    assert [s.window for s in found.shapes] == [10] * 5 + [None]
    assert found.cache() == (5 * 10 + 100) * 2 * 64 * 2
    assert cost(**sizes, window=10).cache() == 6 * 10 * 2 * 64 * 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rotary_dim": 6}, "rotary_dim=6: goes with a latent; give its width too, kv_latent_dim"),
        ({"v_head_dim": 6}, "v_head_dim=6: goes with a latent"),
        ({"kv_latent_dim": 8, "num_kv_heads": 2}, "with a latent each query head has its own key"),
        ({"num_window_layers": 2}, "num_window_layers=2: give the window of these layers too"),
        ({"window": 2, "num_window_layers": 2}, "num_window_layers=2, num_layers=1: there are few"),
        ({"kv_latent_dim": 0}, "kv_latent_dim=0: expected a whole number, at least 1"),
    ],
)
def test_what_does_not_go_together(options: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        cost(embed_dim=WIDTH, num_heads=HEADS, **options)


def test_sizes_next_to_a_model() -> None:
    with pytest.raises(ValueError, match="kv_latent_dim=8: goes with embed_dim, not with a model"):
        cost({"model_type": "llama"}, kv_latent_dim=8)
