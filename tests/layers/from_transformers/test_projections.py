"""Rows of fused projections, and what isn't a plain linear map."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from multihead.layers.from_transformers.projections import part, place, query_key_value


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_fused_projection_is_read_in_blocks_and_in_groups(groups: int) -> None:
    owner = nn.ModuleDict({"qkv": nn.Linear(8, (4 + 2 * groups) * 3)})
    weight = owner["qkv"].weight
    blocks, grouped, *_ = query_key_value(owner, owner, 4, 3)
    assert torch.equal(torch.cat([x.weight() for x in blocks]), weight)
    share = 4 // groups
    for g, rows in enumerate(weight.unflatten(0, (groups, -1))):
        q, k, v = rows.split([share * 3, 3, 3])
        for x, want in zip(grouped, (q, k, v)):
            assert torch.equal(x.weight().unflatten(0, (groups, -1))[g], want)


def test_parts_are_copied_with_their_biases() -> None:
    owner = nn.ModuleDict({"c_attn": Conv1D(18, 8)})
    owner["c_attn"].bias.requires_grad_(False)
    (q, _, v), *_ = query_key_value(owner, owner, 2, 3)
    x = torch.randn(5, 8)
    torch.testing.assert_close(q(x), owner["c_attn"](x)[:, :6])
    linear = nn.Linear(8, 6, bias=False)
    place(linear, v)
    torch.testing.assert_close(linear(x), owner["c_attn"](x)[:, 12:])
    assert linear.weight.requires_grad and not linear.bias.requires_grad


def test_an_adapter_is_refused_by_name() -> None:
    class Adapter(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    owner = nn.ModuleDict({"q_proj": Adapter(3, 3)})
    with pytest.raises(ValueError, match="q_proj is a Adapter and not a plain"):
        part(owner, owner, "q_proj")
