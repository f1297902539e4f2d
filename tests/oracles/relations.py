"""The relations that heads read, from stored probabilities, sentence by sentence and arc by arc
(Clark et al. 2019).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .statistics import Flags, Floats

Span = tuple[int, int]  # letters
Arc = tuple[int, int, str]  # dependent, head, relation; words from 0


@dataclass
class Found:
    """Of one site: by column, one pair of arrays [H] a sentence: arcs read rightly, arcs that
    count.
    """

    documents: dict[str, list[tuple[Floats, Floats]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def accuracy(self, column: str) -> Floats:
        right, arcs = (np.sum([pair[n] for pair in self.documents[column]], axis=0) for n in (0, 1))
        return right / arcs

    def arcs(self, column: str) -> Floats:
        return np.sum([pair[1] for pair in self.documents[column]], axis=0)


def word_of(token: Span, words: Sequence[Span]) -> int:
    """The word with most letters of a token, -1 for none."""
    shared = [max(0, min(token[1], stop) - max(token[0], start)) for start, stop in words]
    return int(np.argmax(shared)) if max(shared) > 0 else -1


def between_words(
    weights: Floats, allowed: Flags, owner: Sequence[int], count: int
) -> tuple[Floats, Flags]:
    """Weights [H, L, L] and the mask [L, L] -> the same between words, [H, W, W] and [W, W]."""
    found = np.zeros((weights.shape[0], count, count))
    may = np.zeros((count, count), bool)
    for reader in range(count):
        rows = [i for i, word in enumerate(owner) if word == reader]
        for target in range(count):
            keys = [j for j, word in enumerate(owner) if word == target]
            found[:, reader, target] = np.mean(
                [sum(weights[:, i, j] for j in keys) for i in rows], axis=0
            )
            may[reader, target] = any(allowed[i, j] for i in rows for j in keys)
    return found, may


def columns_of(deprel: str) -> dict[str, bool]:
    """The columns that an arc counts in, and whether it is turned round there."""
    names = {"all", deprel, deprel.split(":")[0]}
    return {f"relation:{name}": False for name in names} | {
        f"relation:^{name}": True for name in names
    }


def add_sentence(into: Found, weights: Floats, may: Flags, arcs: Sequence[Arc]) -> None:
    """One sentence's arcs, of one site."""
    heads, count = weights.shape[0], weights.shape[1]
    here: dict[str, tuple[Floats, Floats]] = {}
    for dependent, head, deprel in arcs:
        for column, turned in columns_of(deprel).items():
            reader, target = (head, dependent) if turned else (dependent, head)
            if not may[reader, target]:
                continue
            right, counted = here.setdefault(column, (np.zeros(heads), np.zeros(heads)))
            others = [word for word in range(count) if word != reader and may[reader, word]]
            for h in range(heads):
                right[h] += max(others, key=lambda word: weights[h, reader, word]) == target
                counted[h] += 1
    for column, pair in here.items():
        into.documents[column].append(pair)


def best_offset(distances: Sequence[int], reach: int = 10) -> tuple[int, float]:
    """The distance in words that is right most often (the nearer of two, the left of two as near),
    and how often.
    """
    order = [k for n in range(1, reach + 1) for k in (-n, n)]
    best = max(order, key=lambda k: distances.count(k))
    return best, distances.count(best) / len(distances)
