"""The order of heads and the labels that a digest gives them."""

from __future__ import annotations

import numpy as np

from multihead.reader.console import text_table
from multihead.reader.digest import Digest
from multihead.reader.table import Table
from multihead.terminal import format_number


def rows_of(text, table):
    """The lines of the text that begin with a head's label."""
    labels = {h.head for h in table.heads}
    return {
        line.split()[0]: line
        for line in text.splitlines()
        if line.split() and line.split()[0] in labels
    }


def test_a_mixed_head_names_the_role_that_it_comes_nearest_to(made):
    table = made.table(4, 8, strength=0.4)
    digest, rows = Digest(table), rows_of(text_table(table), table)
    for n, head in enumerate(table.heads):
        if not digest.roles[n]:
            nearest = max(
                (score[n], role) for role, score in digest.scores.items() if not np.isnan(score[n])
            )
            assert f"mixed (nearest: {nearest[1]} {format_number(nearest[0])})" in rows[head.head]


def test_a_resting_head_is_as_telling_as_what_it_does_besides(made):
    """An induction head without work on this text rests on the first token, and is still worth its
    place.
    """
    table = Table(made.heads(1, 3))
    for column, values in {
        "first": [0.9, 0.9, 0.1],
        "reach": [0.1, 0.1, 0.9],
        "contribution:first": [0.9, 0.9, 0.0],
        "even:first": [0, 0, 0],
        "contribution:probe:induction": [0.0, 0.8, 0.1],
        "even:probe:induction": [0, 0, 0],
    }.items():
        table.add(column, 0, x=values, y=[1, 1, 1], rows=[1, 1, 1])
    assert Digest(table).resting.tolist() == [True, True, False]
    assert Digest(table).order() == [1, 2, 0]
