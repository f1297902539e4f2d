"""The block: one residual update for each sub-layer."""

import torch
from torch import nn

from multihead.layers.block import SwiGLU, TransformerBlock
from multihead.layers.positions import Rotary
from multihead.operator.masks import causal


def test_one_update_for_each_sub_layer() -> None:
    block = TransformerBlock(24, 4, hidden_dim=60, num_kv_heads=2, positions=Rotary(6))
    x = torch.randn(2, 7, 24)
    middle = x + block.attention(block.attention_norm(x), mask=causal())
    expected = middle + block.feed_forward(block.feed_forward_norm(middle))
    torch.testing.assert_close(block(x, mask=causal()), expected)
    nn.init.zeros_(block.attention.out_proj.weight)
    nn.init.zeros_(block.feed_forward.down_proj.weight)
    assert torch.equal(block(x, mask=causal()), x)  # no update: the residual stream passes unchanged


def test_the_mask_reaches_the_attention() -> None:
    block = TransformerBlock(24, 4, hidden_dim=60)
    x = torch.randn(1, 7, 24)
    changed = x.clone()
    changed[:, -1] += 1
    assert torch.equal(block(x, mask=causal())[:, :-1], block(changed, mask=causal())[:, :-1])
    assert not torch.allclose(block(x)[:, :-1], block(changed)[:, :-1])


def test_swiglu() -> None:
    layer = SwiGLU(3, 5)
    x = torch.randn(2, 3)
    gate, up = x @ layer.gate_proj.weight.T, x @ layer.up_proj.weight.T
    torch.testing.assert_close(layer(x), (gate * torch.sigmoid(gate) * up) @ layer.down_proj.weight.T)
