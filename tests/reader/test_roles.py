"""Roles follow from contributions over uniform attention; resting from weight on a sink."""

from __future__ import annotations

import pytest

from multihead.reader.roles import THRESHOLD, assign_roles, is_resting
from multihead.reader.sums import Head
from multihead.reader.table import Table

HEADS = [Head(f"L0.H{n}", "attn", 0, n, n // 2, "self") for n in range(3)]


def fill(**values: float) -> Table:
    """A table of one head with these values."""
    found = Table(HEADS[:1])
    for name, value in values.items():
        found.add(name.replace("__", ":"), 0, x=[value * 100], y=[100], rows=[100])
    return found


def test_a_role_is_contribution_over_an_even_reading() -> None:
    assert assign_roles(fill(previous=0.9, contribution__previous=0.2, even__previous=0.1)) == [
        []
    ]  # by weight alone: no role
    assert assign_roles(
        fill(previous=0.1, contribution__previous=0.1 + THRESHOLD, even__previous=0.1)
    ) == [["previous"]]
    assert assign_roles(
        fill(contribution__self=0.9, even__self=0.1, contribution__first=0.99, even__first=0.05)
    ) == [["first", "self"]]


def test_induction_comes_only_from_the_probe() -> None:
    assert assign_roles(fill(contribution__induction=0.9, even__induction=0.0)) == [[]]
    assert assign_roles(fill(contribution__probe__induction=0.9, even__probe__induction=0.0)) == [
        ["induction"]
    ]


@pytest.mark.parametrize(
    ("first", "reach", "rests"), [(0.6, 0.2, True), (0.6, 0.9, False), (0.3, 0.2, False)]
)
def test_resting_takes_weight_on_the_first_key_and_little_read(
    first: float, reach: float, rests: bool
) -> None:
    assert is_resting(fill(first=first, reach=reach)).tolist() == [rests]
    assert is_resting(fill(special=first, reach=reach)).tolist() == [rests]
