"""The definitions of the weights' shape on weights by hand."""

from __future__ import annotations

import math

import pytest
import torch

from multihead.reader.context import QueryBlock, TokenContext
from multihead.reader.statistics.base import Statistic
from multihead.reader.statistics.weights import Confidence, Distance, Entropy, EntropyRatio

WEIGHTS = torch.tensor([[[[1.0, 0, 0], [0.5, 0.5, 0], [0.25, 0.25, 0.5]]]], dtype=torch.float64)
CAUSAL = torch.ones(3, 3, dtype=torch.bool).tril()[None, None]


def block(first: int = 0, *, offset: int | None = 0) -> QueryBlock:
    real = torch.ones(1, 3, dtype=torch.bool)
    context = TokenContext(
        real, real, torch.zeros(1, dtype=torch.int64), None, None, None, None, offset
    )
    rows = slice(first, 3)
    return QueryBlock(WEIGHTS[:, :, rows], rows, slice(0, 3), CAUSAL[:, :, rows], context)


@pytest.mark.parametrize(
    ("statistic", "expected"),
    [
        (Entropy(), [0, math.log(2), 1.5 * math.log(2)]),
        (EntropyRatio(), [math.nan, 1, 1.5 * math.log(2) / math.log(3)]),
        (Confidence(), [1, 0.5, 0.5]),
        (Distance(), [0, 0.5, 0.75]),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
@pytest.mark.parametrize("first", [0, 1])
def test_by_hand(statistic: Statistic, expected: list[float], first: int) -> None:
    want = torch.tensor(expected[first:], dtype=torch.float64)
    torch.testing.assert_close(statistic.rows(block(first))[0, 0], want, equal_nan=True)


def test_without_a_mask_every_key_is_allowed() -> None:
    ratio = EntropyRatio().rows(block()._replace(allowed=None))[0, 0]
    torch.testing.assert_close(ratio[1].item(), math.log(2) / math.log(3))


def test_distance_needs_positions() -> None:
    assert Distance().rows(block(offset=None)).isnan().all()
    torch.testing.assert_close(
        Distance().rows(block(offset=2))[0, 0], torch.tensor([2, 2.5, 2.75]).double()
    )
