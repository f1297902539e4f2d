"""Positions of one and of several axes: shapes, counted ones, messages."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from multihead.layers.position_ids import check_position_ids, count_positions, fit_axes, num_axes_of
from multihead.layers.rotary import Rotary


class TwoAxes(nn.Module):
    num_axes = 2


X = torch.zeros(3, 4, 8)
ROWS = torch.arange(4)


def test_shapes() -> None:
    assert [num_axes_of(e) for e in (None, nn.Identity(), Rotary(8), TwoAxes())] == [1, 1, 1, 2]
    assert check_position_ids(Rotary(8), [0, 1, 2, 3], X).tolist() == [0, 1, 2, 3]
    for given, shape in (
        (ROWS, (4,)),
        (ROWS.expand(2, 4), (2, 1, 4)),
        (ROWS.expand(3, 4), (2, 3, 4)),
        (ROWS.expand(1, 4), (2, 1, 4)),
        (ROWS.expand(2, 1, 4), (2, 1, 4)),
        (ROWS.expand(2, 3, 4), (2, 3, 4)),
    ):
        assert check_position_ids(TwoAxes(), given, X).shape == shape


def test_counted() -> None:
    assert count_positions(None, X, 2).tolist() == [2, 3, 4, 5]
    offsets = torch.tensor([0, -2, 5])
    rows = count_positions(Rotary(8), X, offsets)
    assert rows.tolist() == [[0, 1, 2, 3], [0, 0, 0, 1], [5, 6, 7, 8]]
    padded = count_positions(TwoAxes(), X, offsets.clamp(max=0))
    assert torch.equal(padded, rows.where(offsets[:, None] <= 0, torch.arange(4)).expand(2, 3, 4))
    assert count_positions(TwoAxes(), X, 0).tolist() == [0, 1, 2, 3]
    assert count_positions(TwoAxes(), X, -offsets.abs()).shape == (2, 3, 4)
    for offset in (2, torch.tensor([0, -1, 2])):
        with pytest.raises(ValueError, match=r"position_ids is missing.*2 tokens.*position_ids="):
            count_positions(TwoAxes(), X, offset)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: check_position_ids(None, ROWS, X), ["no position encoding"]),
        (lambda: check_position_ids(Rotary(8), ROWS[:3], X), ["position_ids[3]", "[3, 4]"]),
        (lambda: check_position_ids(Rotary(8), ROWS.expand(1, 4), X), ["position_ids[1, 4]"]),
        (
            lambda: check_position_ids(TwoAxes(), ROWS.expand(5, 4), X),
            ["position_ids[5, 4]", "B=3"],
        ),
        (lambda: fit_axes("ids", ROWS.expand(2, 4), 2, 4, 2), ["ids[2, 4]", "ids.expand(2, 2, 4)"]),
        (lambda: fit_axes("ids", ROWS.expand(3, 2, 4), 2, 4, 2), ["ids[3, 2, 4]", "[2, B, L]"]),
    ],
)
def test_messages(call: Any, words: list[str]) -> None:
    with pytest.raises(ValueError, match=".*".join(map(re.escape, words))):
        call()
