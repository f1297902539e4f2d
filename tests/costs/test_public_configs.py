"""Caches of public models, from the entries of their configs, by hand."""

from __future__ import annotations

import pytest

from costs.public_configs import ROWS, public_cost


@pytest.mark.parametrize("name", ROWS)
def test_the_cache_by_hand(name: str) -> None:
    row = ROWS[name]
    found = public_cost(name)
    assert found.cache_per_token == row.per_token
    assert found.cache_per_sequence == row.per_sequence
    assert not any("not counted" in note for note in found.notes)
    if row.note:
        assert any(row.note in note for note in found.notes), found.notes
    for length in (1, 100):
        at = found.at_length(length)
        source = sum(s.cache("bfloat16", 1, at.source_length) for s in at.shapes if s.cross)
        assert at.cache() == length * row.per_token + row.per_sequence + source
    assert all(number > 0 for number in found.parameters.values())
