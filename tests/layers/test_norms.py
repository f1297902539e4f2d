"""Norms of queries and keys: over a head, with weights for each head, and over all heads."""

from __future__ import annotations

import pytest
import torch

from multihead import MultiHeadAttention
from multihead.layers.norms import NORMS, HeadNorm, create_norm, spans_heads


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_norm_with_weights_for_each_head_is_one_norm_a_head(kind: str) -> None:
    norm = HeadNorm(kind, 3, 5)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
    x = torch.randn(2, 3, 4, 5)
    for head in range(3):
        alone = {"rms": torch.nn.RMSNorm, "layer": torch.nn.LayerNorm}[kind](5)
        alone.load_state_dict({name: p[head] for name, p in norm.named_parameters()})
        torch.testing.assert_close(norm(x)[:, head], alone(x[:, head]))


@pytest.mark.parametrize("name", NORMS)
def test_queries_and_keys_are_normalised_over_what_the_name_says(name: str) -> None:
    layer = MultiHeadAttention(24, 4, num_kv_heads=2, head_dim=5, qk_norm=name)
    x = torch.randn(2, 7, 24)
    q, k, _ = layer._project(x, x, x)
    assert q.shape == (2, 4, 7, 5) and k.shape == (2, 2, 7, 5)
    for y, raw in ((q, layer.q_proj(x)), (k, layer.k_proj(x))):
        if name.startswith("layer"):
            raw = raw - (raw if name.endswith("_all") else raw.unflatten(-1, (-1, 5))).mean(
                -1, keepdim=True
            ).expand(*raw.shape[:-1], -1, *([5] if not name.endswith("_all") else [])).flatten(2)
        heads = raw.unflatten(-1, (-1, 5)).transpose(1, 2)
        extent = (1, 3) if name.endswith("_all") else (3,)
        want = heads / heads.pow(2).mean(extent, keepdim=True).sqrt()
        torch.testing.assert_close(y, want, atol=1e-3, rtol=1e-3)
    assert spans_heads(name) == name.endswith("_all")


def test_a_callable_is_called_with_the_width_of_a_head() -> None:
    assert create_norm(torch.nn.RMSNorm, 3, 5).normalized_shape == (5,)  # type: ignore[union-attr]
    assert create_norm(None, 3, 5) is None
    with pytest.raises(ValueError, match=r"qk_norm='max'.*'rms_all'"):
        MultiHeadAttention(8, 2, qk_norm="max")
