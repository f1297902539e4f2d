"""Passes that repeat the last one's text with one token more."""

from __future__ import annotations

import pytest
import torch

from multihead.reader.repeated_text import RepeatedText

IDS = torch.tensor([[5, 6, 7, 8], [5, 7, 7, 5]])


def counts(repeated: RepeatedText, *passes: torch.Tensor, use_cache: bool | None) -> list[int]:
    found = []
    for ids in passes:
        repeated.begin_pass()
        found.append(repeated.count("", ids, past=0, use_cache=use_cache))
        assert repeated.count("inner", ids, past=0, use_cache=None) == found[-1]
    return found


@pytest.mark.parametrize(
    ("expected", "use_cache", "want"),
    [
        (None, False, [0, 2, 3]),
        (None, True, [0, 0, 0]),
        (None, None, [0, 0, 0]),
        (True, None, [0, 2, 3]),
        (False, False, [0, 0, 0]),
    ],
)
def test_one_token_more(expected: bool | None, use_cache: bool | None, want: list[int]) -> None:
    repeated = RepeatedText()
    repeated.expected = expected
    assert counts(repeated, IDS[:, :2], IDS[:, :3], IDS, use_cache=use_cache) == want


def test_another_text_repeats_nothing() -> None:
    for first, second in (
        (IDS[:, :2], IDS),  # two tokens more
        (IDS[:, :2], IDS[:, :2]),
        (IDS[:, :2], IDS.flip(1)[:, :3]),
        (IDS[:, :2], IDS[:1, :3]),
        (IDS[:, :2], IDS.flip(0)[:, :3]),
        (IDS[:, :3], IDS[:, :2]),
    ):
        assert counts(RepeatedText(), first, second, use_cache=False) == [0, 0]


def test_what_follows_a_cache_or_has_no_ids_repeats_nothing() -> None:
    repeated = RepeatedText()
    repeated.expected = True
    assert repeated.count("", None, past=0, use_cache=None) == 0
    assert repeated.count("", IDS[:, :2], past=0, use_cache=None) == 0
    assert repeated.count("", IDS[:, :3], past=3, use_cache=None) == 0
