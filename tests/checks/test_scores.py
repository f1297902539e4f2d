"""Regression of log A against q k'."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from multihead.checks.scores import fit_cap, fit_scores

N, H, L, E = 3, 4, 5, 6
GENERATOR = torch.Generator().manual_seed(0)
Q, K = (torch.randn(N, h, L, E, dtype=torch.float64, generator=GENERATOR) for h in (H, 2))
BIAS = torch.randn(H, L, L, dtype=torch.float64, generator=GENERATOR)


def scores_of(query_heads: list[int], key_heads: list[int]) -> Tensor:
    return 0.3 * Q[:, query_heads] @ K[:, key_heads].mT


def test_the_scale_with_and_without_a_bias() -> None:
    scores = scores_of([0, 1, 2, 3], [0, 0, 1, 1])
    fit = fit_scores(Q, K, scores.softmax(-1))
    assert fit.holds and not fit.has_bias and not fit.pairs and not fit.added
    torch.testing.assert_close(fit.slopes, torch.full((H,), 0.3))
    hidden = torch.ones(L, L).triu(1).bool()
    fit = fit_scores(Q, K, (scores + BIAS).masked_fill(hidden, -torch.inf).softmax(-1))
    assert fit.holds and fit.has_bias and not fit.pairs
    torch.testing.assert_close(fit.slopes, torch.full((H,), 0.3))


def test_other_heads_and_sums_of_heads() -> None:
    fit = fit_scores(Q, K, scores_of([0, 1, 2, 3], [0, 1, 0, 1]).softmax(-1))
    assert fit.holds and fit.pairs == ((0, 0), (1, 1), (2, 0), (3, 1))
    added = scores_of([0, 2], [0, 1]) + scores_of([1, 3], [0, 1])
    assert fit_scores(Q, K, added.softmax(-1)).added
    assert fit_scores(Q, K, added.repeat_interleave(2, 1).softmax(-1)).added


@pytest.mark.parametrize(
    "change", [torch.square, torch.tanh, lambda s: s.flip(-1), torch.zeros_like]
)
def test_what_isnt_a_product_doesnt_fit(change: object) -> None:
    assert callable(change)
    weights = change(scores_of([0, 1, 2, 3], [0, 0, 1, 1])).softmax(-1)
    assert not fit_scores(Q, K, weights).holds


def test_the_bias_by_position() -> None:
    hidden = torch.ones(L, L).triu(1).bool()
    scores = (scores_of([0, 1, 2, 3], [0, 0, 1, 1]) + BIAS).masked_fill(hidden, -torch.inf)
    bias = fit_scores(Q, K, scores.softmax(-1)).bias
    assert bias is not None and torch.equal(bias.isnan()[0], hidden)
    torch.testing.assert_close(bias.nan_to_num(), (BIAS - BIAS[..., :1]).where(~hidden, 0.0))


@pytest.mark.parametrize("cap", [0.5, 3.0, 30.0])
def test_a_soft_cap_is_found_by_regression(cap: float) -> None:
    products = Q @ K.repeat_interleave(2, 1).mT
    fit = fit_cap(products, (cap * (0.3 * products / cap).tanh()).softmax(-1))
    assert fit.holds
    torch.testing.assert_close(fit.caps, torch.full((H,), cap), rtol=1e-3, atol=0)
    torch.testing.assert_close(fit.slopes, torch.full((H,), 0.3), rtol=1e-3, atol=0)
    assert not fit_cap(products, products.square().softmax(-1)).holds
