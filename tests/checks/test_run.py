"""`check` as a whole: options, several bugs, additions from outside, repeated runs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multihead
from checks.samples import Separate
from multihead.checks import BUGS, PROPERTIES, Bug, Finding, NotApplicable, Property


def test_a_scale_that_is_meant_and_causality_that_is_said() -> None:
    assert multihead.check(Separate(scale=1.0), scale=1.0).ok
    assert multihead.check(Separate(), causal=False).ok
    report = multihead.check(Separate(causal=True), causal=False)
    assert report.ok  # a mask can be more than was asked for


def test_a_causal_mask_that_was_lost_is_found_where_it_is_said() -> None:
    class Plain(Separate):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)

    assert multihead.check(Plain()).ok and multihead.check(Plain(causal=True), causal=True).ok
    assert multihead.check(Plain(), causal=True).bugs == {"attends to future tokens"}


def test_two_bugs_are_both_named() -> None:
    report = multihead.check(Separate(scale=1.0, mixed=True))
    assert report.bugs == {"missing or wrong scale", "tokens and heads mixed"} and all(
        f.certain for f in report.findings
    )


def test_tiny_weights_hide_no_bug() -> None:
    layer = Separate(mixed=True)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=1e-4)
    before = {n: p.clone() for n, p in layer.named_parameters()}
    assert multihead.check(layer).bugs == {"tokens and heads mixed"}
    assert (
        all(torch.equal(p, before[n]) for n, p in layer.named_parameters()) and layer.training
    )  # it worked on a copy


def test_the_examples_of_the_page() -> None:
    text = (Path(__file__).parents[2] / "docs" / "check.md").read_text()
    example, *_, additions = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["report"].bugs == {"missing or wrong scale"}
    exec(additions, names)
    layer, bug, claim = names["Doubled"](), names["doubled"], names["moderate"]
    assert multihead.check(layer, bugs=[bug]).bugs == {"head outputs doubled"}
    assert multihead.check(layer).bugs == {"weights don't sum to one"}  # not a known bug
    assert "moderate outputs" in multihead.check(layer, properties=[claim]).passed


def test_runs_repeat_and_leave_no_trace() -> None:
    layer, threads = Separate(mixed=True), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        state = torch.get_rng_state()
        assert str(multihead.check(layer)) == str(multihead.check(layer))
        assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_a_bug_from_outside_is_found_like_the_librarys_own() -> None:
    class Squared(Separate):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            q, k, v = (
                f(x).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)
            )
            weights = (q @ k.mT / 6**0.5).softmax(-1) ** 2
            return self.o((weights @ v).transpose(1, 2).flatten(2))

    squared = Bug(
        "weights squared",
        "The weights are squared after the softmax.",
        "Between the softmax and the product with the values.",
        {"reweight": torch.square},
        explains=("weights don't sum to one",),
    )
    assert multihead.check(Squared()).bugs == {"weights don't sum to one"}
    report = multihead.check(Squared(), bugs=[squared])
    assert report.bugs == {"weights squared"}, str(report)
    assert report.findings[0].certain and "weights sum to one" in report.findings[0].found_by
    assert multihead.check(Separate(), bugs=[squared]).ok
    assert squared not in BUGS  # nothing is registered


def test_a_property_from_outside_is_tested_like_the_librarys_own() -> None:
    def find_growth(facts: Any) -> list[Finding]:
        if facts.callee.numpy:
            raise NotApplicable("NumPy isn't of interest")
        ratio = facts.callee(facts.callee.x()).norm() / facts.callee.x().norm()
        return [] if ratio < 10 else [Finding("outputs grow", f"By {ratio:.0f}.", "any", "W_O.")]

    moderate = Property("moderate outputs", "Outputs have a moderate size.", find_growth)
    assert "moderate outputs" in multihead.check(Separate(), properties=[moderate]).passed

    class Large(Separate):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return 1000 * super().forward(x)

    report = multihead.check(Large(), properties=[moderate])
    grown = next(finding for finding in report.findings if finding.bug == "outputs grow")
    assert grown.found_by == ["moderate outputs"] and not grown.certain
    assert moderate not in PROPERTIES

    def attention(q: Any, k: Any, v: Any) -> Any:
        import numpy as np

        e = np.exp(q @ k.T / np.sqrt(k.shape[1]))
        return e / e.sum(axis=1, keepdims=True) @ v

    skipped = multihead.check(attention, properties=[moderate]).skipped
    assert skipped["moderate outputs"] == "NumPy isn't of interest"


def test_what_fails_inside_the_check_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise KeyError("lost")

    report = multihead.check(Separate(), properties=[Property("broken", "It fails.", fail)])
    assert report.verdict == "partly judged" and "KeyError: 'lost'" in report.unjudged[0]
    monkeypatch.setattr("multihead.checks.run.recompute", fail)
    assert "weights were read out" in multihead.check(Separate()).passed[-1]
    monkeypatch.setattr("multihead.checks.run.judge_weights", fail)
    report = multihead.check(Separate())
    assert report.verdict == "partly judged" and "recomputing" in report.unjudged[0]


def test_known_differences_are_listed_and_not_counted() -> None:
    report = multihead.check(nn.MultiheadAttention(16, 2))
    assert report.ok and [f.bug for f in report.known] == ["fully masked rows give NaN"]
    assert "by its definition" in report.known[0].known


class CausalAttention(Separate):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


def test_a_class_called_causal_is_meant_to_be() -> None:
    assert multihead.check(CausalAttention()).bugs == {"attends to future tokens"}
    assert multihead.check(CausalAttention(), causal=False).ok
    assert multihead.check(CausalAttention(causal=True)).ok


def test_outputs_by_name() -> None:
    @dataclass
    class Output:
        hidden: Tensor

    class Named(Separate):
        def forward(self, x: Tensor) -> Output:  # type: ignore[override]
            return Output(super().forward(x))

    assert multihead.check(Named()).ok
