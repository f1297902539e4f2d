"""Times of several ways to do one thing, taken in turns, so that a slow minute of the machine slows all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

TURNS = 15
LEAST = 0.05  # seconds of a turn: what is shorter is repeated


def ratios(ways: dict[str, Callable[[], Any]], turns: int = TURNS) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of each way, and its median ratio to the first way's time within the same turn."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    repeats = {}
    for name, way in ways.items():
        way()
        start = time.perf_counter()
        way()
        repeats[name] = max(1, round(LEAST / (time.perf_counter() - start)))
    for turn in range(turns + 1):
        # back and forth, so that none is always the one that finds the caches warm
        for name in ways if turn % 2 else reversed(ways):
            start = time.perf_counter()
            for _ in range(repeats[name]):
                ways[name]()
            if turn:
                taken[name].append((time.perf_counter() - start) / repeats[name])
    first = next(iter(ways))
    return ({name: statistics.median(t) for name, t in taken.items()},
            {name: statistics.median(a / b for a, b in zip(t, taken[first], strict=True)) for name, t in taken.items()})
