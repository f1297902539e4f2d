"""Differences of two softmaxes, with lambda as the code declares it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from checks.samples import facts_of
from multihead.checks.differences import judge_difference
from multihead.checks.evidence import Judged
from multihead.checks.judge import read_evidence


class Difference(nn.Module):
    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.num_heads, self.change, self.lambda_init = 2, change, 0.6
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(32, 32) for _ in range(4))
        names = [] if change == "attribute" else ["q1", "k1", "q2", "k2"]
        for name in names:
            setattr(self, f"lambda_{name}", nn.Parameter(0.1 * torch.randn(8)))
        if change in ("norm", "other factor", "no factor"):
            self.norm = nn.RMSNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (f(x).unflatten(-1, (4, 8)).transpose(1, 2) for f in (self.q_proj, self.k_proj))
        v = self.v_proj(x).unflatten(-1, (2, 16)).transpose(1, 2)
        scale = 8**-0.25 if self.change == "scale" else 8**-0.5
        a = (q @ k.mT * scale).softmax(-1).unflatten(1, (2, 2))
        number = torch.tensor(self.lambda_init)
        if self.change != "attribute":
            first = (self.lambda_q1 * self.lambda_k1).sum().exp()
            second = (self.lambda_q2 * self.lambda_k2).sum().exp()
            start = 0.0 if self.change == "no start" else self.lambda_init
            number = first - second + start
        y = (a[:, :, 0] - number * a[:, :, 1]) @ v
        if self.change == "norm":
            y = self.norm(y) * (1 - self.lambda_init)
        if self.change == "no factor":
            y = self.norm(y)
        if self.change == "other factor":
            y = self.norm(y) * (1 + self.lambda_init)
        return x + self.o_proj(y.transpose(1, 2).flatten(2))


def judged(change: str) -> tuple[bool, Judged]:
    judged = Judged()
    with torch.no_grad():
        return judge_difference(judged, read_evidence(facts_of(Difference(change))), [None]), judged


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("", "+ 0.6), and the heads' outputs are multiplied by 1"),
        ("attribute", "the second times 0.6 (an attribute)"),
        ("norm", "multiplied by 0.4"),
    ],
)
def test_what_is_declared_is_right(change: str, words: str) -> None:
    found, result = judged(change)
    assert found and words in result.passed[0] and "weights are negative" in result.explained


@pytest.mark.parametrize("change", ["scale", "no start", "other factor", "no factor"])
def test_others_are_not_judged(change: str) -> None:
    assert judged(change) == (False, Judged())
