"""Times of several ways to do one thing, taken in turns, so that a slow minute of the machine slows
all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple


class Turns(NamedTuple):
    """How long a comparison takes: at least `fewest` turns, and more until `longest` seconds."""

    fewest: int = 9
    longest: float = 12.0


TOY = Turns(1, 0.0)  # once each, to see that a benchmark runs


def ratios(
    ways: dict[str, Callable[[], Any]],
    turns: Turns = Turns(),  # noqa: B008
) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of each way, and its median ratio to the first way's time within the same
    turn.

    A turn calls each way once: what is nearest in time is compared. Every other turn goes
    backwards, so that none always follows another.
    """
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    begin = time.perf_counter()
    turn = 0
    while turn < turns.fewest or (time.perf_counter() - begin < turns.longest and turn < 400):
        for name in ways if turn % 2 else reversed(ways):
            start = time.perf_counter()
            ways[name]()
            taken[name].append(time.perf_counter() - start)
        turn += 1
    first = next(iter(ways))
    return (
        {name: statistics.median(t) for name, t in taken.items()},
        {
            name: statistics.median(a / b for a, b in zip(t, taken[first], strict=True))
            for name, t in taken.items()
        },
    )
