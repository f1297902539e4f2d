"""Interval masks: the same as the dense masks that they stand for, alone and joined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import multihead
from multihead.operator import masks


@given(length=st.integers(0, 9), keys=st.integers(0, 12), offset=st.integers(-3, 6), left=st.integers(0, 4),
       right=st.integers(0, 4), lengths=st.lists(st.integers(0, 12), min_size=2, max_size=2))
def test_against_the_definition(length: int, keys: int, offset: int, left: int, right: int, lengths: list[int]) -> None:
    i, j = torch.arange(length)[:, None], torch.arange(keys)
    want = {
        "causal": (masks.causal(offset), j <= i + offset),
        "window": (masks.window(left, right, offset=offset), (j >= i + offset - left) & (j <= i + offset + right)),
        "left only": (masks.window(left, offset=offset), j >= i + offset - left),
        "padding": (masks.padding(torch.tensor(lengths)), (j < torch.tensor(lengths)[:, None])[:, None].expand(2, length, keys)),
    }
    for name, (mask, dense) in want.items():
        assert torch.equal(mask.dense(length, keys).expand(dense.shape if dense.ndim == 3 else (1, length, keys)),
                           dense if dense.ndim == 3 else dense[None]), name
    joined = want["causal"][0] & want["window"][0] & want["padding"][0]
    assert torch.equal(joined.dense(length, keys), want["causal"][1] & want["window"][1] & want["padding"][1])


def test_offset_by_batch_element() -> None:
    mask = multihead.causal(torch.tensor([0, 2])).dense(2, 4)
    assert mask.int().tolist() == [[[1, 0, 0, 0], [1, 1, 0, 0]], [[1, 1, 1, 0], [1, 1, 1, 1]]]


@given(data=st.data())
def test_from_dense_finds_intervals_and_only_those(data: Any) -> None:
    length, keys = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    dense = torch.tensor(data.draw(st.lists(st.lists(st.booleans(), min_size=keys, max_size=keys), min_size=length,
                                            max_size=length)))[None, None]
    found = masks.from_dense(dense)
    runs = all("101" not in "".join("1" if x else "0" for x in row).replace("00", "0").replace("00", "0")
               for row in dense[0, 0])
    assert isinstance(found, masks.IntervalMask) == runs
    if runs:
        assert torch.equal(found.dense(length, keys)[:, None], dense)


def test_from_function_goes_block_by_block() -> None:
    asked = []

    def function(i: int, j: int) -> torch.Tensor:
        asked.append((i, j))
        return torch.ones(1, 1, 7, 7, dtype=torch.bool).tril()[..., i:j, :]

    found = masks.from_function(function, 7, 7, step=3)
    assert asked == [(0, 3), (3, 6), (6, 7)]
    assert torch.equal(found.dense(7, 7), torch.ones(1, 7, 7, dtype=torch.bool).tril())


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: multihead.causal(1.5), TypeError, ["offset=1.5", "int"]),
        (lambda: multihead.causal(True), TypeError, ["offset=True"]),
        (lambda: multihead.window(left=-1), ValueError, ["left=-1", "at least 0"]),
        (lambda: multihead.window(left=1.5), TypeError, ["left=1.5", "int"]),
        (lambda: multihead.padding(), ValueError, ["exactly one"]),
        (lambda: multihead.padding(valid=torch.ones(1, 3)), TypeError, ["float32", "valid.bool()"]),
        (lambda: multihead.padding(valid=torch.tensor([[True, False, True]])), ValueError, ["valid[0]", "holes", "dense"]),
        (lambda: multihead.intervals(torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.int64)), TypeError, ["start", "float32"]),
        (lambda: multihead.causal() & torch.ones(3, 3, dtype=torch.bool), TypeError, ["Tensor", ".dense(L, S)"]),
    ],
)
def test_words(make: Any, error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        make().dense(2, 3)
    assert all(word in str(caught.value) for word in words), str(caught.value)
