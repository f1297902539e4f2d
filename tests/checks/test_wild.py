"""Attention as people write it: each right one passes, and each bug put into it is named, alone."""

from __future__ import annotations

from pathlib import Path

import pytest

import multihead
from checks.seeds import CAUSAL, NAMES, SEEDS, Seed, load, report_of, table

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", NAMES)
def test_a_right_one_passes(name: str) -> None:
    report = multihead.check(load(name), causal=name in CAUSAL)
    assert report.ok, str(report)
    assert any(line.startswith("recomputed by the definition") for line in report.held), str(report)


@pytest.mark.parametrize("seed", SEEDS, ids=str)
def test_a_bug_is_named(seed: Seed) -> None:
    report = report_of(seed)
    assert [f.bug for f in report.findings] == [seed.bug], str(report)
    assert report.findings[0].certain or not seed.certain, str(report)
    assert not report and report.findings[0].shown and report.findings[0].look


def test_the_table_of_the_page_is_what_was_found() -> None:
    assert table() in (DOCS / "check.md").read_text(), (
        "write it anew: PYTHONPATH=src:tests python tests/checks/seeds.py"
    )
