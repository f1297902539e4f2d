"""Roles of heads (induction, previous token, ...), derived from what their contributions measured.

A role's score is the pooled contribution on a class of keys minus the score of the same head with
uniform attention over its allowed keys. `induction` and `duplicate` come only from the probe, where
chance can't help. Attention weights don't decide a role: by weight alone most heads of a real model
"read the first token", and add next to nothing from it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .sums import HeadSums

# role -> the mass that it is derived from
ROLES = {
    "induction": "probe:induction",
    "duplicate": "probe:duplicate",
    "previous": "previous",
    "self": "self",
    "next": "next",
    "first": "first",
    "special": "special",
}
THRESHOLD = 0.3  # a role is assigned from this score on
# A resting head has at least this part of its weight on the first or a special key ...
RESTING_WEIGHT = 0.5
# ... and reads at most this part of what uniform attention would read.
RESTING_REACH = 0.5


def score_roles(table: HeadSums) -> dict[str, NDArray[np.float64]]:
    """Score of each role for each head, `[heads]`; NaN where it was not measured."""
    return {
        role: table.value(f"contribution:{mass}") - table.value(f"even:{mass}")
        for role, mass in ROLES.items()
    }


def assign_roles(table: HeadSums) -> list[list[str]]:
    """Roles of each head, strongest first; empty for a head of mixed use."""
    scores = score_roles(table)
    return [
        sorted((r for r in ROLES if scores[r][n] >= THRESHOLD), key=lambda r: -scores[r][n])
        for n in range(len(table.heads))
    ]


def is_resting(table: HeadSums) -> NDArray[np.bool_]:
    """Mask of the heads that rest, bool `[heads]`: most of its weight is on the first or a special
    key, and it reads little there (an attention sink).
    """
    sink_weight = np.fmax(table.value("first"), table.value("special"))
    return (sink_weight >= RESTING_WEIGHT) & (table.value("reach") <= RESTING_REACH)
