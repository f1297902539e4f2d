"""Wrong steps have the shapes of right ones, and other values."""

from __future__ import annotations

import torch

from multihead.checks import wrong_steps
from multihead.checks.definition import merge_by_transpose, split_by_transpose

X = torch.randn(2, 5, 12, dtype=torch.float64)


def test_splits_and_merges() -> None:
    right = split_by_transpose(X, 3)
    for name in ("by_view", "by_feature", "overlapping", "first"):
        split = getattr(wrong_steps, f"split_{name}")(X, 3)
        assert split.shape == right.shape if name != "overlapping" else split.shape[:3] == (2, 3, 5)
        assert not torch.equal(split, right)
    for name in ("view", "feature"):
        merged = getattr(wrong_steps, f"merge_by_{name}")(right)
        assert merged.shape == X.shape and not torch.equal(merged, merge_by_transpose(right))


def test_masks() -> None:
    causal = torch.ones(4, 4).tril().bool()
    assert torch.equal(wrong_steps.transpose_mask(causal), causal.T)
    assert torch.equal(wrong_steps.mask_diagonal(causal), torch.ones(4, 4).tril(-1).bool())
    assert torch.equal(wrong_steps.allow_next(causal), torch.ones(4, 4).tril(1).bool())
