"""Attention as people write it: each right one passes, and each bug put into it is named, alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import multihead
from checks.seeds import CAUSAL, NAMES, SEEDS, Seed, bug_table, load, property_table, report_of

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", NAMES)
def test_a_right_one_passes(name: str) -> None:
    report = multihead.check(load(name), causal=name in CAUSAL, strict=True)
    assert report.ok, str(report)
    assert any(line.startswith("recomputed by the definition") for line in report.passed), str(
        report
    )


@pytest.mark.parametrize("seed", SEEDS, ids=str)
def test_a_bug_is_named(seed: Seed) -> None:
    report = report_of(seed)
    assert [f.bug for f in report.findings] == [seed.bug], str(report)
    assert report.findings[0].certain or not seed.certain, str(report)
    assert not report and report.findings[0].example and report.findings[0].look


@pytest.mark.parametrize("table", [bug_table, property_table])
def test_the_tables_of_the_page(table: Callable[[], str]) -> None:
    page = (DOCS / "check.md").read_text()
    assert table() in page, "write it again: PYTHONPATH=src:tests python tests/checks/seeds.py"
