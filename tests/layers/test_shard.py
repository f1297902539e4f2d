"""The heads of one rank; tests/layers/test_parallel.py computes with them."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from multihead.layers.shard import HeadShard
from multihead.masks import causal
from multihead.ops.heads import split_heads
from multihead.ops.slopes import AlibiBias


def shard(rank: int, ranks: int) -> HeadShard:
    mesh: Any = SimpleNamespace(size=lambda: ranks, get_local_rank=lambda: rank)
    return HeadShard(mesh)


@given(st.sampled_from([1, 2, 4]), st.integers(1, 3), st.sampled_from([1, 2, 4]))
def test_query_heads_of_a_rank_read_its_key_value_heads(
    ranks: int, share: int, num_kv_heads: int
) -> None:
    num_heads = num_kv_heads * share * ranks
    seen: list[int] = []
    for rank in range(ranks):
        heads = range(num_heads)[shard(rank, ranks).heads(num_heads)]
        groups = range(num_kv_heads)[shard(rank, ranks).heads(num_kv_heads)]
        seen += heads
        assert [h * num_kv_heads // num_heads for h in heads] == [
            groups[i * len(groups) // len(heads)] for i in range(len(heads))
        ]
    assert seen == list(range(num_heads))


@pytest.mark.parametrize("num_heads", [1, 2, 4, 8])
def test_splitting(num_heads: int) -> None:
    x = torch.randn(2, 3, num_heads * 5)
    for rank in range(4):
        columns = x.chunk(4, -1)[rank] if num_heads >= 4 else x
        mine = shard(rank, 4).own(shard(rank, 4).split(columns, num_heads), num_heads)
        assert torch.equal(mine, split_heads(x, num_heads)[:, shard(rank, 4).heads(num_heads)])


def test_masks_and_biases() -> None:
    mine, mask = shard(2, 4), torch.rand(2, 8, 3, 5) > 0.5
    assert torch.equal(mine.of_heads("mask", mask, 8), mask[:, 4:6])
    assert torch.equal(mine.of_heads("mask", mask[0], 8), mask[0, 4:6])
    for x in (mask[:, :1], mask[0, 0], mask[0, 0, 0], causal(), None):
        assert mine.of_heads("mask", x, 8) is x or torch.equal(mine.of_heads("mask", x, 8), x)
    slopes = mine.of_heads("attn_bias", AlibiBias(torch.arange(8.0), range(3), range(5)), 8)
    assert slopes.slopes.tolist() == [4.0, 5.0] and slopes.key_positions.shape == (1, 5)
    assert torch.equal(mine.parameter(torch.ones(3)), torch.ones(3))


def test_words() -> None:
    mine = shard(2, 4)
    assert repr(mine) == "HeadShard(rank 2 of 4)" and copy.deepcopy(mine) is mine
    with pytest.raises(
        ValueError, match=r"attn_bias\[2, 3, 4\]: expected one head, or the 8 .* rank 2 of 4 takes"
    ):
        mine.of_heads("attn_bias", torch.zeros(2, 3, 4), 8)
    with pytest.raises(ValueError, match=r"attn_bias: slopes\[2\] of AlibiBias.* each of the 8"):
        mine.of_heads("attn_bias", AlibiBias(torch.ones(2), range(3), range(5)), 8)
