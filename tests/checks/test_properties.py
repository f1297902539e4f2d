"""The table of properties: names and claims, each with a test that can fail."""

from __future__ import annotations

import torch

import multihead
from checks.samples import Separate
from checks.seeds import SEEDS, report_of
from multihead.checks import PROPERTIES


def test_names_and_claims() -> None:
    names = [each.name for each in PROPERTIES]
    assert len(set(names)) == len(names) and all(each.claim.endswith(".") for each in PROPERTIES)


def test_a_report_lists_each_property_once() -> None:
    report = multihead.check(Separate(scale=1.0))
    found = [name for finding in report.findings for name in finding.found_by]
    listed = [*report.passed, *report.skipped, *(n for n in found if n != "the definition")]
    assert sorted(listed) == sorted(each.name for each in PROPERTIES)


def test_each_property_fails_for_some_code() -> None:
    """A test that can't fail tests nothing."""
    found = {name for seed in SEEDS for f in report_of(seed).findings for name in f.found_by}
    assert {each.name for each in PROPERTIES} <= found
    assert torch.get_num_threads() >= 1
