"""The text of a report."""

from __future__ import annotations

import torch

import multihead
from checks.samples import Separate
from multihead.checks import Finding
from multihead.checks.report import CallWeights, Report


def test_verdicts() -> None:
    finding = Finding("a bug", "...", "any", "...")
    for findings, unjudged, verdict, ok in [
        ([], [], "right", True),
        ([finding], [], "wrong", False),
        ([finding], ["x"], "wrong", False),
        ([], ["x"], "partly judged", None),
    ]:
        report = Report("f", "f(x)", findings=findings, unjudged=unjudged)
        assert report.verdict == verdict and report.ok is ok and bool(report) == (ok is True)
        assert ("all held" in str(report)) == (verdict == "right") and verdict in str(report)


def test_a_report_says_what_is_wrong_the_smallest_input_and_where_to_look() -> None:
    report = multihead.check(Separate(scale=1.0))
    words = str(report)
    assert not report.ok and not report and report.bugs == {"missing or wrong scale"}
    for piece in (
        "Separate: wrong 1 found: missing or wrong scale called as f(x)",
        "1. missing or wrong scale Scores aren't",
        "certainty certain: the definition",
        "Scores aren't scaled",
        "smallest input x [1, 2, 24]",
        "where to look Scores are multiplied by 1 / sqrt(E)",
        "found by the definition",
        "W_Q is q",
        "4 heads",
        "not applicable ",
        "KV cache: no cache was recognised",
    ):
        assert piece in " ".join(words.split()), words
    assert max(map(len, words.splitlines())) <= 100


def test_weights_are_those_of_the_first_call() -> None:
    report = Report("f", "f(x)")
    assert report.weights is None and report.expected_weights is None
    a = torch.full((1, 2, 3, 3), 1 / 3, dtype=torch.float64)
    report.calls = [CallWeights("with its inputs alone", a, 2 * a), CallWeights("masked", 3 * a)]
    assert report.weights is a and report.expected_weights is not None
    assert report.expected_weights.equal(2 * a)
