"""Causal masks that are missing, inverted or off by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from checks.samples import Separate, facts_of
from multihead.checks import NotApplicable
from multihead.checks.causality import find_non_finite, find_wrong_causality


class Masked(Separate):
    """With the given boolean mask of a square."""

    def __init__(self, rule: str) -> None:
        super().__init__()
        self.rule = rule

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        ones = torch.ones(x.shape[1], x.shape[1]).bool()
        allowed = {
            "causal": ones.tril(),
            "next": ones.tril(1),
            "not itself": ones.tril(-1),
            "inverted": ones.triu(),
            "some": ones.tril(2),
        }[self.rule]
        return super().forward(x, allowed)


@pytest.mark.parametrize(
    ("rule", "bugs"),
    [
        ("causal", []),
        ("next", ["attends to the next token"]),
        ("inverted", ["inverted mask"]),
        ("some", ["attends to future tokens"]),
    ],
)
@torch.no_grad()
def test_masks(rule: str, bugs: list[str]) -> None:
    findings = find_wrong_causality(facts_of(Masked(rule), causal=True))
    assert [finding.bug for finding in findings] == bugs
    assert all(finding.example and finding.look for finding in findings)


@torch.no_grad()
def test_a_query_without_a_key() -> None:
    facts = facts_of(Masked("not itself"), causal=True)
    findings = [*find_non_finite(facts), *find_wrong_causality(facts)]
    assert {finding.bug for finding in findings} == {"can't attend to itself"}
    assert not find_non_finite(facts_of(Masked("causal")))


@pytest.mark.parametrize(("rows", "named"), [([0], "query 0"), ([1, 3], "queries 1, 3")])
@torch.no_grad()
def test_outputs_that_are_not_finite_are_numbered(rows: list[int], named: str) -> None:
    class Broken(Separate):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            out = super().forward(x, torch.ones(x.shape[1], x.shape[1]).tril().bool())
            return out.index_fill(1, torch.tensor([r for r in rows if r < x.shape[1]]), torch.nan)

    facts = facts_of(Masked("causal"))
    facts.callee.function = Broken().double()
    (finding,) = find_non_finite(facts)
    assert f"The output of {named} is NaN or infinite, though the" in finding.message


@torch.no_grad()
def test_attention_that_is_not_causal() -> None:
    class Bare(Separate):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)

    with pytest.raises(NotApplicable, match="it isn't causal"):
        find_wrong_causality(facts_of(Bare()))
    (finding,) = find_wrong_causality(facts_of(Bare(), causal=True))
    assert finding.bug == "attends to future tokens" and "Later tokens change" in finding.message
