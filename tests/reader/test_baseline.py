"""The baseline of a relation: the best fixed distance."""

from __future__ import annotations

import json
from typing import Any

import pytest

from multihead.reader.baseline import OFFSETS, baseline, is_baseline, pooled


def hits(**offsets: int) -> list[int]:
    """Arcs at distances such as `l2=3` (two to the left) or `r1=5`."""
    found = [0] * len(OFFSETS)
    for name, count in offsets.items():
        offset = int(name[1:]) * (-1 if name[0] == "l" else 1)
        found[OFFSETS.index(offset)] = count
    return found


def test_the_offset_of_most_arcs() -> None:
    found = baseline(hits(l1=3, r2=4), 10)
    assert (found["offset"], found["accuracy"], found["arcs"]) == (2, 0.4, 10)


def test_of_equal_offsets_the_shortest() -> None:
    assert baseline(hits(l3=2, r1=2), 4)["offset"] == 1


def test_two_files_add_up_to_an_offset_that_is_best_in_neither() -> None:
    a, b = baseline(hits(l1=5, r1=4), 9), baseline(hits(l2=5, r1=4), 9)
    both = pooled({"relation:x": a, "relation:y": a}, {"relation:x": b})
    assert both["relation:x"] == baseline(hits(l1=5, l2=5, r1=8), 18)
    assert both["relation:x"]["offset"] == 1 and both["relation:y"] == a


def test_what_was_saved_is_a_baseline() -> None:
    good = baseline(hits(r1=2), 3)
    assert is_baseline(json.loads(json.dumps(good)))


@pytest.mark.parametrize(
    "change",
    [{"hits": [1]}, {"hits": None}, {"arcs": 1}, {"arcs": 0}, {"offset": 2}, {"accuracy": 0.5}],
    ids=str,
)
def test_anything_else_is_none(change: dict[str, Any]) -> None:
    assert not is_baseline(baseline(hits(r1=2), 3) | change)
    assert not is_baseline([])
