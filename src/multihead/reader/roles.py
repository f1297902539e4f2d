"""Roles: what a head's pooled contribution says that it does, never more than was measured.

A role's score is the pooled contribution on a class of keys minus what the same head would score if
it read its allowed keys evenly. `induction` and `duplicate` come only from the probe, where chance
can't help. Weights don't decide a role: by weight alone most heads of a real model "read the first
token", and do nothing there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .table import Table

# role -> the mass that shows it
ROLES = {
    "induction": "probe:induction",
    "duplicate": "probe:duplicate",
    "previous": "previous",
    "self": "self",
    "next": "next",
    "first": "first",
    "special": "special",
}
THRESHOLD = 0.3  # a role is given from this score on
RESTING_WEIGHT = 0.5  # at least this part of the weight lies on the first or a special key ...
RESTING_REACH = 0.5  # ... and what it reads is at most this part of what an even reading would read


def scores(table: Table) -> dict[str, NDArray[np.float64]]:
    """Each role's score for each head; NaN where it wasn't measured."""
    return {
        role: table.value(f"contribution:{mass}") - table.value(f"even:{mass}")
        for role, mass in ROLES.items()
    }


def roles(table: Table) -> list[list[str]]:
    """The roles of each head, strongest first; empty for a head of mixed use."""
    found = scores(table)
    return [
        sorted((r for r in ROLES if found[r][n] >= THRESHOLD), key=lambda r: -found[r][n])
        for n in range(len(table.heads))
    ]


def resting(table: Table) -> NDArray[np.bool_]:
    """Heads that keep most of their weight on the first or a special key, and read little there."""
    parked = np.fmax(table.value("first"), table.value("special"))
    return (parked >= RESTING_WEIGHT) & (table.value("reach") <= RESTING_REACH)
