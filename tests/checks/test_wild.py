"""Attention as people write it: each right one passes, and each bug put into it is named."""

from __future__ import annotations

import pytest

import multihead
from checks.seeds import CAUSAL, NAMES, SEEDS, Seed, load


@pytest.mark.parametrize("name", NAMES)
def test_a_right_one_passes(name: str) -> None:
    report = multihead.check(load(name), causal=True if name in CAUSAL else None)
    assert report.ok, str(report)
    assert any(line.startswith("recomputed by the definition") for line in report.held), str(report)


@pytest.mark.parametrize("seed", SEEDS, ids=str)
def test_a_bug_is_named(seed: Seed) -> None:
    report = multihead.check(load(seed.where, seed.old, seed.new))
    found = {f.bug: f for f in report.findings}
    assert seed.bug in found, str(report)
    assert found[seed.bug].certain or not seed.certain, str(report)
    assert list(found) == [seed.bug], str(report)
