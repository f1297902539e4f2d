"""Times of several ways to do one thing, taken in turns, so that a slow minute of the machine slows
all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

LONGEST = 12.0  # seconds of one comparison, unless that is less than
FEWEST = 9  # turns


def ratios(
    ways: dict[str, Callable[[], Any]], *, fewest: int = FEWEST, longest: float = LONGEST
) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of each way, and its median ratio to the first way's time within the same
    turn.

    A turn calls each way once: what is nearest in time is compared. Every other turn goes
        backwards, so that none is always
    the one that comes after another.
    """
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    begin = time.perf_counter()
    turn = 0
    while turn < fewest or (time.perf_counter() - begin < longest and turn < 400):
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
