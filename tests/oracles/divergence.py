"""The Jensen-Shannon divergence of two heads' weights, row by row, by its definition: H((p + q) /
2) - (H(p) + H(q)) / 2.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .statistics import Floats


def entropy(p: Floats) -> float:
    return float(-sum(x * np.log(x) for x in p if x > 0))


def divergence(p: Floats, q: Floats) -> float:
    """Of two rows of weights; what is missing from 1 is an outcome of its own."""
    p, q = (np.append(x, max(0.0, 1 - x.sum())) for x in (p, q))
    return entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2


def divergences(weights: Floats, rows: Iterable[tuple[int, int]]) -> Floats:
    """weights [B, H, L, S], over (text, row): sums for heads i < j, [H, H]."""
    heads = weights.shape[1]
    found = np.zeros((heads, heads))
    for text, row in rows:
        for i in range(heads):
            for j in range(i + 1, heads):
                found[i, j] += divergence(weights[text, i, row], weights[text, j, row])
    return found
