"""Attention takes any number of tokens, or has a tensor that fixes it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from checks.samples import Separate, facts_of
from multihead.checks.finding import BugName, NotApplicable
from multihead.checks.sizes import find_refused_lengths


class Confused(Separate):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, dim = x.shape
        return super().forward(x.reshape(batch, dim, length), mask)


class Square(Separate):
    """Tokens of an image of 3 x 3, with a bias for each pair."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(9, 9))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, self.table)


def test_code_that_runs_where_two_axes_have_one_size() -> None:
    (finding,) = find_refused_lengths(facts_of(Confused()))
    assert finding.bug == BugName.SIZES
    assert "runs with 24 tokens, as many as it has features, and fails with 25" in finding.message


def test_tokens_of_one_window_and_any_number_are_right() -> None:
    assert find_refused_lengths(facts_of(Separate())) == []
    with pytest.raises(NotApplicable, match="9 tokens, as table has"):
        find_refused_lengths(facts_of(Square()))
    with pytest.raises(NotApplicable, match="library"):
        find_refused_lengths(facts_of(nn.MultiheadAttention(8, 2, batch_first=True)))
