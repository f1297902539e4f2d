"""Findings: certain ones are those of the definition; names of bugs are unique."""

from __future__ import annotations

from multihead.checks import Finding
from multihead.checks.finding import DEFINITION, READ_OUT, BugName


def test_certainty_is_that_of_the_definition() -> None:
    finding = Finding(BugName.SCALE, "Scores aren't scaled.", "x [1, 2, 8]", "1 / sqrt(E)")
    assert not finding.certain and not finding.known and finding.found_by == []
    finding.found_by.append("causality")
    assert not finding.certain and finding.certainty == "judged by a property"
    finding.found_by.append(READ_OUT)
    assert finding.certainty == "judged by the weights that were read out"
    finding.found_by.append(DEFINITION)
    assert finding.certain and finding.certainty.startswith("certain: the definition")


def test_names_are_unique() -> None:
    names = [value for name, value in vars(BugName).items() if not name.startswith("_")]
    assert len(names) == len(set(names)) and all(isinstance(name, str) for name in names)
