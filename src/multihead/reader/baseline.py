"""Baseline for dependency relations: always reading the word at one fixed distance (Clark et al.
2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

OFFSETS = tuple(k for k in range(-10, 11) if k)  # words; below 0: to the left

Baseline = dict[str, Any]  # see `baseline`


def baseline(hits: Sequence[int], arcs: int) -> Baseline:
    """The offset of the target of most arcs, and the share of arcs that it predicts.

    `hits` are the numbers of arcs at each of `OFFSETS`, of `arcs` (1 or more) in all. They are
    kept, so that the baselines of two files add up: the best offset of both may be the best of
    neither.

    >>> found = baseline([0] * 9 + [3, 1] + [0] * 9, 5)
    >>> found["offset"], found["accuracy"], found["arcs"]
    (-1, 0.6, 5)
    """
    best = max(range(len(OFFSETS)), key=lambda n: (hits[n], -abs(OFFSETS[n])))
    return {
        "offset": OFFSETS[best],
        "accuracy": hits[best] / arcs,
        "arcs": arcs,
        "hits": list(hits),
    }


def is_baseline(data: Any) -> bool:
    """Whether something read from a file is a result of `baseline`."""
    if (
        not isinstance(data, dict)
        or not isinstance(data.get("hits"), list)
        or len(data["hits"]) != len(OFFSETS)
    ):
        return False
    numbers = [*data["hits"], data.get("arcs")]
    if (
        not all(isinstance(n, int) and n >= 0 for n in numbers)
        or sum(data["hits"]) > data["arcs"]
        or not data["arcs"]
    ):
        return False
    return data == baseline(data["hits"], data["arcs"])


def pooled(a: dict[str, Baseline], b: dict[str, Baseline]) -> dict[str, Baseline]:
    """The baselines of two readings, by column, over the arcs of both."""
    found = a | b
    for column in a.keys() & b.keys():
        hits = [x + y for x, y in zip(a[column]["hits"], b[column]["hits"], strict=True)]
        found[column] = baseline(hits, a[column]["arcs"] + b[column]["arcs"])
    return found
