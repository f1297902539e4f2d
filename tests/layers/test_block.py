"""The transformer block: its definition, torch's encoder and decoder layers, and caches through all
of it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from multihead import Cache, TransformerBlock, WindowCache
from multihead.layers import Rotary
from multihead.layers.block import MLP
from multihead.masks import causal, padding


def test_one_update_for_each_sub_layer() -> None:
    block = TransformerBlock(16, 2, hidden_dim=24, positions=Rotary(8))
    x = torch.randn(2, 5, 16)
    after = x + block.attention(block.attention_norm(x), mask=causal())
    torch.testing.assert_close(
        block(x, mask=causal()), after + block.feed_forward(block.feed_forward_norm(after))
    )


def test_rms_norm_and_swiglu_are_what_they_are_called() -> None:
    block = TransformerBlock(8, 2, hidden_dim=24, norm_eps=0.5)
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(
        block.attention_norm(x), x / (x.square().mean(-1, keepdim=True) + 0.5).sqrt()
    )
    ff = block.feed_forward
    expected = ff.down_proj(F.silu(ff.gate_proj(x)) * ff.up_proj(x))
    torch.testing.assert_close(ff(x), expected)
    assert block.attention.q_proj.bias is None and ff.up_proj.bias is None


def _copy_attention(ours: Any, theirs: nn.MultiheadAttention) -> None:
    state = dict(
        zip(
            ("q_proj", "k_proj", "v_proj"),
            zip(theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3)),
        )
    )
    with torch.no_grad():
        for name, (weight, bias) in state.items():
            getattr(ours, name).weight.copy_(weight)
            getattr(ours, name).bias.copy_(bias)
    ours.out_proj.load_state_dict(theirs.out_proj.state_dict())


@given(
    norm_first=st.booleans(),
    activation=st.sampled_from([F.relu, F.gelu]),
    decoder=st.booleans(),
    is_causal=st.booleans(),
)
def test_equals_torchs_encoder_and_decoder_layers(
    norm_first: bool, activation: Any, decoder: bool, is_causal: bool
) -> None:
    kind = nn.TransformerDecoderLayer if decoder else nn.TransformerEncoderLayer
    theirs = kind(
        12, 3, 20, dropout=0.0, activation=activation, norm_first=norm_first, batch_first=True
    )
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours = TransformerBlock(
        12,
        3,
        hidden_dim=20,
        bias=True,
        norm="layer",
        norm_eps=1e-5,
        norm_first=norm_first,
        cross_attention=decoder,
        feed_forward=MLP(12, 20, activation=activation),
    )
    norms = [ours.attention_norm, ours.feed_forward_norm]
    _copy_attention(ours.attention, theirs.self_attn)
    if decoder:
        _copy_attention(ours.cross_attention, theirs.multihead_attn)
        norms.insert(1, ours.cross_attention_norm)
    for i, norm in enumerate(norms):
        norm.load_state_dict(getattr(theirs, f"norm{i + 1}").state_dict())
    ours.feed_forward.up_proj.load_state_dict(theirs.linear1.state_dict())
    ours.feed_forward.down_proj.load_state_dict(theirs.linear2.state_dict())
    x, memory = torch.randn(2, 5, 12), torch.randn(2, 7, 12)
    off = torch.ones(5, 5, dtype=torch.bool).triu(1) if is_causal else None
    lengths = torch.tensor([7, 4])
    padded = torch.arange(7) >= lengths[:, None]
    want = theirs(x, memory, off, memory_key_padding_mask=padded) if decoder else theirs(x, off)
    got = ours(
        x,
        memory if decoder else None,
        mask=causal() if is_causal else None,
        memory_mask=padding(lengths),
    )
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_cached_steps_of_a_decoder_equal_one_pass() -> None:
    block = TransformerBlock(
        12,
        3,
        hidden_dim=20,
        num_kv_heads=1,
        cross_attention=True,
        memory_dim=5,
        positions=Rotary(4),
    )
    x, memory = torch.randn(2, 6, 12), torch.randn(2, 7, 5)
    cache, memory_cache = Cache(), Cache()
    with torch.no_grad():
        first = block(x[:, :2], memory, mask=causal(), cache=cache, memory_cache=memory_cache)
        steps = [
            block(x[:, i : i + 1], mask=causal(), cache=cache, memory_cache=memory_cache)
            for i in range(2, 5)
        ]
        again = block(x[:, 5:], mask=causal(), cache=cache, memory_cache=memory_cache)
        for wrong in (cache, WindowCache(2)):
            with pytest.raises(ValueError, match="memory_cache: expected a separate Cache"):
                block(x[:, 5:], memory, mask=causal(), cache=cache, memory_cache=wrong)
        with pytest.raises(
            ValueError, match=r"memory is given, but memory_cache already holds one"
        ):
            block(x[:, 5:], memory, mask=causal(), cache=Cache(), memory_cache=memory_cache)
    torch.testing.assert_close(
        torch.cat([first, *steps, again], 1), block(x, memory, mask=causal()), atol=1e-5, rtol=1e-5
    )


def test_padded_steps_and_positions_reach_the_attention() -> None:
    block = TransformerBlock(12, 3, hidden_dim=20, positions=Rotary(4))
    x, valid = torch.randn(1, 5, 12), torch.tensor([[False, False, True, True, True]])
    got = block(x, mask=causal(), valid=valid)[:, 2:]
    torch.testing.assert_close(got, block(x[:, 2:], mask=causal()), atol=1e-5, rtol=1e-5)
    far = block(x, mask=causal(), position_ids=torch.tensor([0, 1, 2, 3, 40]))
    assert not torch.allclose(far[:, -1], block(x, mask=causal())[:, -1], atol=1e-3)


@pytest.mark.parametrize(
    "change",
    [
        {"norm_first": False},
        {"norm": "layer"},
        {"norm_eps": 1.0},
        {"feed_forward": "mlp"},
        {"feed_forward": nn.Identity()},
        {"bias": True},
        {"qk_norm": "rms"},
        {"positions": Rotary(4)},
        {"softcap": 0.5},
        {"sinks": True},
        {"gate": "head"},
        {"num_kv_heads": 1},
        {"head_dim": 6},
        {"hidden_dim": 30},
        {"dropout": 0.5},
    ],
    ids=str,
)
def test_every_argument_changes_the_output(change: dict[str, Any]) -> None:
    def make(**options: Any) -> TransformerBlock:
        torch.manual_seed(0)
        return TransformerBlock(12, 3, **{"hidden_dim": 20, **options})

    x = torch.randn(2, 5, 12)
    assert (make(**change)(x, mask=causal()) - make()(x, mask=causal())).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TransformerBlock(10, 4, hidden_dim=20), ["embed_dim=10", "num_heads=4"]),
        (lambda: TransformerBlock(12, 3, hidden_dim=20, norm="batch"), ["norm='batch'", "'rms'"]),
        (
            lambda: TransformerBlock(12, 3, hidden_dim=20, feed_forward="moe"),
            ["feed_forward='moe'", "'swiglu'"],
        ),
        (lambda: TransformerBlock(12, 3, hidden_dim=0), ["hidden_dim=0", "at least 1"]),
        (
            lambda: TransformerBlock(12, 3, hidden_dim=20, memory_dim=5),
            ["memory_dim=5", "cross_attention=True"],
        ),
        (
            lambda: TransformerBlock(12, 3, hidden_dim=20)(
                torch.zeros(1, 2, 12), torch.zeros(1, 2, 12)
            ),
            ["memory is given"],
        ),
        (
            lambda: TransformerBlock(12, 3, hidden_dim=20, cross_attention=True)(
                torch.zeros(1, 2, 12)
            ),
            ["memory is missing"],
        ),
    ],
)
def test_words(make: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        make()
    assert all(word in str(caught.value) for word in words), str(caught.value)
