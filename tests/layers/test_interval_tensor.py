"""Masks that models pass around as two integers a query."""

from __future__ import annotations

import torch

from multihead.layers.interval_tensor import IntervalTensor, mask_function


def test_the_mask_holds_two_numbers_a_row_and_acts_as_a_dense_one() -> None:
    valid = torch.ones(2, 50, dtype=torch.bool)
    valid[0, :7] = False
    mask = mask_function(batch_size=2, q_length=50, kv_length=50, attention_mask=valid)
    assert (
        isinstance(mask, IntervalTensor)
        and mask.shape == (2, 1, 50, 50)
        and mask.dtype == torch.bool
    )
    dense = torch.ones(50, 50, dtype=torch.bool).tril() & valid[:, None, None]
    assert torch.equal(mask.materialize(), dense)
    for use in (
        lambda m: m[..., 3:9],
        lambda m: ~m,
        lambda m: m & m,
        lambda m: m.float().sum(-1),
        lambda m: torch.cat([m, m]),
    ):
        got = use(mask)
        assert not isinstance(got, IntervalTensor) and torch.equal(got, use(dense))


def test_a_mask_with_holes_stays_dense() -> None:
    valid = torch.ones(1, 9, dtype=torch.bool)
    valid[0, 4] = False
    mask = mask_function(batch_size=1, q_length=9, kv_length=9, attention_mask=valid)
    assert not isinstance(mask, IntervalTensor)
    assert torch.equal(mask, (torch.ones(9, 9, dtype=torch.bool).tril() & valid)[None, None])


def test_a_mask_that_is_added_to_scores_forbids() -> None:
    """A part of a model whose attention doesn't come through here adds the mask that it is
    handed.
    """
    valid = torch.ones(2, 6, dtype=torch.bool)
    valid[0, :2] = False
    mask = mask_function(batch_size=2, q_length=6, kv_length=6, attention_mask=valid)
    scores = torch.randn(2, 3, 6, 6)
    may = torch.ones(6, 6, dtype=torch.bool).tril() & valid[:, None, None]
    want = torch.where(may, scores, torch.finfo(scores.dtype).min)
    assert torch.equal(scores + mask, want)
