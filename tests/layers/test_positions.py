"""Rotary positions: transformers' pairing, distances alone in the scores, the words of the errors."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multihead.layers.positions import Rotary


@given(
    head_dim=st.sampled_from([2, 6, 24, 64]),
    length=st.integers(1, 70),
    offset=st.integers(0, 5000),
    theta=st.sampled_from([10000.0, 500000.0, 37.0]),
)
@settings(max_examples=30, deadline=None)
def test_equals_llama(head_dim: int, length: int, offset: int, theta: float) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )  # fmt: skip
    q, k = torch.randn(2, 2, 4, length, head_dim)
    positions = torch.arange(offset, offset + length)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    theirs = apply_rotary_pos_emb(q, k, cos, sin)
    rotary = Rotary(head_dim, theta=theta)
    torch.testing.assert_close(rotary(q, positions), theirs[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rotary(k, positions), theirs[1], atol=1e-5, rtol=1e-5)


def test_scores_depend_on_the_distance_alone() -> None:
    rotary = Rotary(8)
    q, k = torch.randn(2, 1, 1, 1, 8).expand(-1, -1, -1, 9, -1)  # one query and one key vector, at nine positions
    scores = rotary(q) @ rotary(k).mT
    later = rotary(q, torch.arange(100, 109)) @ rotary(k, torch.arange(100, 109)).mT
    torch.testing.assert_close(scores, later, atol=1e-4, rtol=1e-4)
    for distance in range(-8, 9):
        diagonal = scores[0, 0].diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-4, rtol=1e-4)
    assert scores[0, 0, 0].std() > 1e-2  # it does depend on it


def test_positions_of_each_row() -> None:
    x = torch.randn(2, 3, 5, 8)
    positions = torch.stack((torch.arange(5), torch.arange(7, 12)))
    turned = Rotary(8)(x, positions)
    for b in range(2):
        torch.testing.assert_close(turned[b : b + 1], Rotary(8)(x[b : b + 1], positions[b]))


def test_angles_stay_exact_in_bfloat16() -> None:
    # bfloat16 cannot tell positions 1000 and 1001 apart
    rotary = Rotary(8).to(torch.bfloat16)
    x = torch.ones(1, 1, 2, 8)
    turned = rotary(x.bfloat16(), torch.tensor([1000, 1001]))
    assert turned.dtype == torch.bfloat16
    torch.testing.assert_close(turned.float(), Rotary(8)(x, torch.tensor([1000, 1001])), atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Rotary(7), ["head_dim=7", "even"]),
        (lambda: Rotary(8, theta=0.0), ["theta=0.0", "positive"]),
        (lambda: Rotary(8)(torch.randn(1, 1, 2, 6)), ["6 wide", "head_dim=8"]),
    ],
)
def test_words_of_errors(make, words: list[str]) -> None:
    with pytest.raises(ValueError, match=".*".join(map(re.escape, words))):
        make()
