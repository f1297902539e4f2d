"""What explains that the definition doesn't reproduce an output, and what doesn't."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import multihead
from checks.samples import Separate, facts_of
from multihead.checks.finding import BugName
from multihead.checks.unexplained import find_reasons


class Odd(Separate):
    """Scores times their magnitude, which nothing names."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = (
            f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        scores = self.changed(q @ k.mT / q.shape[-1] ** 0.5)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def changed(self, scores: Tensor) -> Tensor:
        return scores * scores.abs()


class Third(Odd):
    def changed(self, scores: Tensor) -> Tensor:
        return 3 * scores.tanh() ** 3


class Table(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(4, 1, 1))

    def changed(self, scores: Tensor) -> Tensor:
        return scores * scores.abs() * self.table


def test_words_and_tensors_are_reasons() -> None:
    assert find_reasons(facts_of(Odd())) == []
    assert find_reasons(facts_of(Third())) == ["tanh"]
    assert find_reasons(facts_of(Table())) == ["table"]
    assert find_reasons(facts_of(nn.MultiheadAttention(8, 2)))  # a library's has its reasons


def test_without_a_reason_it_is_wrong() -> None:
    report = multihead.check(Odd())
    assert report.bugs == {BugName.DIFFERS}, str(report)
    assert "nothing explains the difference" in report.findings[0].message
    for kind in (Third, Table):
        assert multihead.check(kind()).verdict == "partly judged"
