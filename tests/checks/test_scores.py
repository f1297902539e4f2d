"""Regression of log A against q k'."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from multihead.checks.readout import Readout
from multihead.checks.scores import fit_scores

N, H, L, E = 3, 4, 5, 6
GENERATOR = torch.Generator().manual_seed(0)
Q, K = (torch.randn(N, h, L, E, dtype=torch.float64, generator=GENERATOR) for h in (H, 2))
BIAS = torch.randn(H, L, L, dtype=torch.float64, generator=GENERATOR)


def readouts(scores: Tensor) -> list[Readout]:
    none = torch.zeros(0)
    return [Readout(s.softmax(-1), (), 0.0, none, none, none) for s in scores]


def scores_of(query_heads: list[int], key_heads: list[int]) -> Tensor:
    return 0.3 * Q[:, query_heads] @ K[:, key_heads].mT


def test_the_scale_with_and_without_a_bias() -> None:
    scores = scores_of([0, 1, 2, 3], [0, 0, 1, 1])
    fit = fit_scores(Q, K, readouts(scores))
    assert fit.holds and not fit.has_bias and not fit.pairs and not fit.added
    torch.testing.assert_close(fit.slopes, torch.full((H,), 0.3))
    hidden = torch.ones(L, L).triu(1).bool()
    fit = fit_scores(Q, K, readouts((scores + BIAS).masked_fill(hidden, -torch.inf)))
    assert fit.holds and fit.has_bias and not fit.pairs
    torch.testing.assert_close(fit.slopes, torch.full((H,), 0.3))


def test_other_heads_and_sums_of_heads() -> None:
    fit = fit_scores(Q, K, readouts(scores_of([0, 1, 2, 3], [0, 1, 0, 1])))
    assert fit.holds and fit.pairs == ((0, 0), (1, 1), (2, 0), (3, 1))
    added = scores_of([0, 2], [0, 1]) + scores_of([1, 3], [0, 1])
    assert fit_scores(Q, K, readouts(added)).added
    assert fit_scores(Q, K, readouts(added.repeat_interleave(2, 1))).added


@pytest.mark.parametrize(
    "change", [torch.square, torch.tanh, lambda s: s.flip(-1), torch.zeros_like]
)
def test_what_isnt_a_product_doesnt_fit(change: object) -> None:
    assert callable(change)
    assert not fit_scores(Q, K, readouts(change(scores_of([0, 1, 2, 3], [0, 0, 1, 1])))).holds
