"""Interval masks: the same as the dense masks that they stand for, alone and joined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import multihead
from multihead.ops import masks


@given(
    length=st.integers(0, 9),
    keys=st.integers(0, 12),
    offset=st.integers(-3, 6),
    left=st.integers(0, 4),
    right=st.integers(0, 4),
    lengths=st.lists(st.integers(0, 12), min_size=2, max_size=2),
    data=st.data(),
)
def test_against_the_definition(
    length: int, keys: int, offset: int, left: int, right: int, lengths: list[int], data: Any
) -> None:
    """Each rule, and all of them joined, alone and moved behind earlier positions: as bounds and as
    the dense mask.
    """
    i, j = torch.arange(length)[:, None], torch.arange(keys)
    two = torch.tensor(lengths)
    runs = data.draw(st.lists(st.integers(0, 3), min_size=keys, max_size=keys).map(sorted))
    ids = torch.tensor(runs, dtype=torch.int64)
    moved = data.draw(st.sampled_from([0, 2, torch.tensor([1, 3])]))
    before = moved.view(-1, 1, 1) if isinstance(moved, torch.Tensor) else moved
    own = torch.full((1, length, keys), False)
    at = i + before  # the rows' positions
    inside = (at >= 0) & (at < keys)
    own = (ids[at.clamp(0, max(keys - 1, 0))] == ids) & inside if keys else own
    want = {
        "causal": (masks.causal(offset), j <= at + offset),
        "window": (
            masks.window(left, right, offset=offset),
            (j >= at + offset - left) & (j <= at + offset + right),
        ),
        "left only": (masks.window(left, offset=offset), j >= at + offset - left),
        "by row": (masks.causal(two), j <= at + two[:, None, None]),
        "lengths": (masks.padding(two), j < two[:, None, None]),
        "valid": (masks.padding(valid=j < two[:, None]), j < two[:, None, None]),
        "documents": (multihead.masks.documents(ids), own),
        "prefix": (masks.prefix(left), (j <= at) | (j < left)),
        "prefixes": (masks.prefix(two), (j <= at) | (j < two[:, None, None])),
    }
    joined, all_of = masks.IntervalMask(), torch.ones(2, length, keys, dtype=torch.bool)
    for name, (mask, dense) in want.items():
        mask, dense = mask.after(moved), dense.expand(2, length, keys)
        joined, all_of = joined & mask, all_of & dense
        for one, expected in ((mask, dense), (joined, all_of)):
            assert torch.equal(one.dense(length, keys).expand(2, 1, -1, -1)[:, 0], expected), name
            assert torch.equal(
                masks.bounds_to_dense(*one.bounds(length, keys), j).expand(2, -1, -1), expected
            ), name
            known = one.static(length, keys)
            assert known is None or torch.equal(
                expected,
                (j <= i).expand_as(expected) if known == "causal" else torch.ones_like(expected),
            ), name


@pytest.mark.parametrize(
    ("mask", "known"),
    [
        (multihead.masks.causal(), "causal"),
        (multihead.masks.causal(6), "all"),
        (multihead.masks.causal(1), None),
        (masks.IntervalMask(), "all"),
        (multihead.masks.causal() & multihead.masks.window(left=6), "causal"),
        (multihead.masks.causal() & multihead.masks.window(left=5), None),
        (multihead.masks.window(right=6), "all"),
        (multihead.masks.causal() & multihead.masks.padding(torch.tensor([7])), None),
    ],
)
def test_what_is_known_without_a_look(mask: masks.IntervalMask, known: str | None) -> None:
    assert mask.static(7, 7) == known


def test_bounds_of_empty_rows_and_positions_before_the_text() -> None:
    empty = multihead.masks.causal(-2) & multihead.masks.window(left=0, right=0, offset=5)
    start, stop = empty.bounds(4, 6)
    assert (start <= stop).all() and not empty.dense(4, 6)[0, 0, :2].any()
    mask = multihead.masks.documents(torch.tensor([3, 3, 4])).after(torch.tensor([-2, 1]))
    assert mask.dense(3, 3).int().tolist() == [
        [[[0, 0, 0], [0, 0, 0], [1, 1, 0]]],
        [[[1, 1, 0], [0, 0, 1], [0, 0, 0]]],
    ]
    assert torch.equal(
        masks.bounds_to_dense(*mask.bounds(3, 3), torch.arange(3))[:, None], mask.dense(3, 3)
    )


def test_a_mask_keeps_what_it_was_made_of() -> None:
    valid, ids = torch.tensor([[True, False, False]]), torch.tensor([0, 0, 1])
    made = (multihead.masks.padding(valid=valid), multihead.masks.documents(ids))
    before = [(m.dense(3, 3), *m.bounds(3, 3)) for m in made]
    valid[0, 1], ids[1] = True, 1
    assert all(
        torch.equal(a, b)
        for m, old in zip(made, before)
        for a, b in zip((m.dense(3, 3), *m.bounds(3, 3)), old)
    )
    assert made[0] == made[0] and made[0] != made[1]


def test_what_is_no_interval_has_a_dense_mask_all_the_same() -> None:
    holes = multihead.masks.padding(valid=torch.tensor([[True, False, True]]))
    mixed = multihead.masks.documents(torch.tensor([1, 2, 1]))
    assert holes.dense(1, 3).int().tolist() == [[[[1, 0, 1]]]]
    assert (mixed & multihead.masks.causal()).dense(3, 3).int().tolist() == [
        [[[1, 0, 0], [0, 1, 0], [1, 0, 1]]]
    ]
    q = torch.randn(1, 2, 3, 4)
    for mask in (holes, mixed):
        with pytest.raises(ValueError, match=r"mask\.dense\(L, S\)"):
            multihead.attention(q, q, q, mask)
        want = multihead.attention(q, q, q, mask.dense(3, 3), backend="reference")
        assert torch.allclose(multihead.attention(q, q, q, mask.dense(3, 3)), want, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: multihead.masks.causal(1.5), TypeError, ["offset=1.5", "int"]),
        (lambda: multihead.masks.causal(True), TypeError, ["offset=True"]),
        (lambda: multihead.masks.window(left=-1), ValueError, ["left=-1", "at least 0"]),
        (lambda: multihead.masks.window(left=1.5), TypeError, ["left=1.5", "int"]),
        (lambda: multihead.masks.padding(), ValueError, ["exactly one"]),
        (
            lambda: multihead.masks.padding(valid=torch.ones(1, 3)),
            TypeError,
            ["float32", "valid.bool()"],
        ),
        (
            lambda: multihead.masks.padding(
                valid=torch.tensor([[True, True, True], [True, False, True]])
            ),
            ValueError,
            ["valid[1]", "holes", "mask.dense(L, S)"],
        ),
        (
            lambda: multihead.masks.padding(valid=torch.tensor([[True, True]])),
            ValueError,
            ["valid[1, 2]", "2 keys", "S = 3"],
        ),
        (
            lambda: multihead.masks.padding([[1], [1, 2]]),
            TypeError,
            ["lengths is a list", "rectangle"],
        ),
        (lambda: multihead.masks.padding(torch.ones(2)), TypeError, ["lengths", "float32", "[B]"]),
        (
            lambda: multihead.masks.documents(torch.tensor([0, 1, 0])),
            ValueError,
            ["documents(ids)", "several pieces", "mask.dense(L, S)"],
        ),
        (
            lambda: multihead.masks.documents(torch.tensor([0, 1])),
            ValueError,
            ["ids[1, 2]", "2 keys", "S = 3"],
        ),
        (
            lambda: multihead.masks.documents(torch.tensor([0.0, 1, 0])),
            TypeError,
            ["ids", "float32", "[B, S]"],
        ),
        (lambda: multihead.masks.prefix(1.5), TypeError, ["n=1.5", "int"]),
        (lambda: multihead.masks.causal().after(0.5), TypeError, ["offset=0.5"]),
        (
            lambda: multihead.masks.intervals(
                torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.int64)
            ),
            TypeError,
            ["start", "float32"],
        ),
        (
            lambda: multihead.masks.causal() & torch.ones(3, 3, dtype=torch.bool),
            TypeError,
            ["Tensor", ".dense(L, S)"],
        ),
    ],
)
def test_words(make: Any, error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        make().bounds(2, 3)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_mask_is_printed_as_the_calls_that_build_it() -> None:
    shown = {
        "causal()": masks.causal(),
        "causal() & window(left=7)": masks.causal() & masks.window(left=7),
        "window(left=2, right=5)": masks.window(left=2, right=5),
        "window(left=3)": masks.window(left=3),
        "window(right=3)": masks.causal(offset=3),
        "IntervalMask()": masks.IntervalMask(),
        "causal() & padding(...)": masks.causal() & masks.padding([3, 4]),
    }
    assert [str(mask) for mask in shown.values()] == list(shown)
