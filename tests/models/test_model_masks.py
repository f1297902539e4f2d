"""Masks that models pass: what may be read, whatever the numbers and axes, and queries that may read
nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from multihead.models.model_masks import (
    fill_empty,
    find_read_rows,
    find_readable_keys,
    padding_of_empty,
    split_mask,
)
from multihead.ops.call import AttentionCall, CallContext
from multihead.ops.functional import compute
from multihead.ops.masks import IntervalMask, causal

MAY = torch.ones(6, 6, dtype=torch.bool).tril()
LOW = [-1e4, -1e9, torch.finfo(torch.float32).min, -torch.inf]


def dense(mask: Any) -> Tensor:
    return mask.dense(6, 6, "cpu") if isinstance(mask, IntervalMask) else mask


@pytest.mark.parametrize("low", LOW)
def test_a_mask_of_numbers_becomes_intervals_whatever_its_axes(low: float) -> None:
    numbers = torch.zeros(6, 6).masked_fill(~MAY, low)
    for given in (numbers, numbers.expand(3, 4, 6, 6), numbers.expand(1, 4, 6, 6).clone()):
        split = split_mask(None, given, 6, 6)
        assert isinstance(split.mask, IntervalMask) and torch.equal(dense(split.mask)[0, 0], MAY)
        assert split.bias is None and split.empty is None
    bias = torch.randn(1, 4, 6, 6)
    split = split_mask(None, numbers + bias, 6, 6)
    assert torch.equal(dense(split.mask)[0, 0], MAY)
    torch.testing.assert_close(split.bias, bias.masked_fill(~MAY, 0), atol=1e-2, rtol=0)
    split = split_mask(MAY, bias, 6, 6)
    assert torch.equal(split.bias, bias) and torch.equal(dense(split.mask)[0, 0], MAY)
    windows = MAY & ~MAY.tril(-3)
    split = split_mask(causal(), torch.zeros(6, 6).masked_fill(~windows, low), 6, 6)
    assert torch.equal(dense(split.mask)[0, 0], windows)


def test_masks_that_differ_between_heads_stay_so() -> None:
    by_head = torch.stack([MAY, MAY.T])[None]
    split = split_mask(None, torch.zeros(1, 2, 6, 6).masked_fill(~by_head, -1e5), 6, 6)
    assert torch.equal(dense(split.mask), by_head) and split.empty is None


@pytest.mark.parametrize("one_head", [False, True])
@pytest.mark.parametrize("low", [*LOW, "bool"])
def test_queries_that_may_read_nothing(low: Any, one_head: bool) -> None:
    """Their output is what plain attention gives: uniform weights or those without a mask; 0 where
    nothing has a number.
    """
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 6, 8) for _ in range(3))
    may = MAY.expand(2, 4, 6, 6).clone()
    may[1, 2 if one_head else slice(None), :2] = False
    numbers = torch.zeros(2, 4, 6, 6).masked_fill(~may, -torch.inf if low == "bool" else low)
    split = split_mask(may, None, 6, 6) if low == "bool" else split_mask(None, numbers, 6, 6)
    assert split.empty is not None and torch.equal(split.empty.expand(2, 4, 6), ~may.any(-1))
    call = AttentionCall.lower(q, k, v, split.mask, bias=split.bias)
    call = call._replace(context=CallContext(empty=split.empty))
    got = fill_empty(compute(call), call, split)
    want = ((q @ k.mT * 8**-0.5 + numbers).softmax(-1)).nan_to_num() @ v
    torch.testing.assert_close(got, want, atol=2e-3 if low == -1e4 else 1e-5, rtol=0)
    assert (split.added is None) == (low in (-torch.inf, "bool"))


def test_padding_is_neither_query_nor_key() -> None:
    q = torch.randn(1, 1, 6, 4)
    may = MAY.clone()
    may[:2] = False
    read = AttentionCall.lower(q, q, q, may)
    read = read._replace(context=CallContext(empty=~may.any(-1)[None, None]))
    assert not bool(padding_of_empty(read, 0).any())  # later queries read their keys
    may[:, :1] = False
    left = AttentionCall.lower(q, q, q, may)._replace(context=read.context)
    assert padding_of_empty(left, 0).tolist() == [[True, False, False, False, False, False]]
    assert find_readable_keys(left).tolist() == [[False, True, True, True, True, True]]
    assert not bool(padding_of_empty(left._replace(context=CallContext()), 0).any())


def test_rows_of_a_mask_that_a_model_is_given() -> None:
    may = MAY.clone()
    may[:2] = False
    for mask in (may, torch.zeros(6, 6).masked_fill(~may, -1e9)):
        found = find_read_rows(mask.expand(2, 3, 6, 6))
        assert found is not None and found.tolist() == [[False] * 2 + [True] * 4] * 2
        assert find_read_rows(mask) is None  # [L, S] isn't one that models take
    assert find_read_rows(MAY[None, None]) is None
