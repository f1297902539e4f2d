"""Rows that a model adds to its tokens: before, after and between them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from multihead.reader.row_alignment import align_rows

EMBED = nn.Embedding(20, 4)
IDS = torch.tensor([[4, 5, 4, 9], [7, 7, 7, 7]])


def extra(count: int) -> torch.Tensor:
    return torch.randn(2, count, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("before", "after"), [(0, 0), (3, 0), (0, 2), (2, 3), (1, 1)])
def test_rows_before_and_after(before: int, after: int) -> None:
    rows = torch.cat([extra(before), EMBED(IDS), extra(after)], 1)
    got = align_rows(IDS, rows, EMBED)
    want = [-1] * before + [0, 1, 2, 3] + [-1] * after
    assert got is not None and got.tolist() == [want, want]


def test_a_prompt_that_repeats_the_text_comes_before_it() -> None:
    rows = EMBED(torch.cat([IDS, IDS], 1))
    got = align_rows(IDS, rows, EMBED)
    assert got is not None and got.tolist() == [[-1] * 4 + [0, 1, 2, 3]] * 2


def test_a_placeholder_that_is_expanded() -> None:
    """Rows of a picture in the place of the token 9, in each text elsewhere."""
    ids = torch.tensor([[4, 9, 5, 6], [4, 5, 9, 6]])
    picture = extra(3)
    rows = torch.stack(
        [
            torch.cat([EMBED(ids[0, :1]), picture[0], EMBED(ids[0, 2:])]),
            torch.cat([EMBED(ids[1, :2]), picture[1], EMBED(ids[1, 3:])]),
        ]
    )
    got = align_rows(ids, rows, EMBED)
    assert got is not None and got.tolist() == [[0, -1, -1, -1, 2, 3], [0, 1, -1, -1, -1, 3]]


@pytest.mark.parametrize(
    "rows",
    [
        torch.cat([extra(2), 2 * EMBED(IDS)], 1),  # scaled
        EMBED(IDS)[:, ::2],  # downsampled
        torch.randn(2, 6, 3),  # of another width
        EMBED(IDS)[:1],  # of another batch
    ],
    ids=["scaled", "downsampled", "width", "batch"],
)
def test_rows_that_do_not_show_the_tokens(rows: torch.Tensor) -> None:
    assert align_rows(IDS, rows.detach(), EMBED) is None
