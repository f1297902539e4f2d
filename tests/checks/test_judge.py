"""Each property of the weights fails for some code that the definition doesn't reproduce."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multihead
from checks.samples import facts_of
from multihead.checks.judge import judge_weights


class Odd(nn.Module):
    """Attention beside a residual after a norm, whose scores or weights are changed: the residual
    hides bugs from the properties.
    """

    def __init__(self, scores: Any = None, weights: Any = None, groups: int = 4) -> None:
        super().__init__()
        self.num_heads, self.groups = 4, groups
        self.scores, self.weights = scores, weights
        self.norm = nn.LayerNorm(32)
        self.q_proj, self.o_proj = nn.Linear(32, 32), nn.Linear(32, 32)
        self.k_proj, self.v_proj = (nn.Linear(32, 8 * groups) for _ in range(2))

    def attend(self, x: Tensor, hidden: Tensor | None, late: bool = False) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            f(y).unflatten(-1, (-1, 8)).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (t.repeat_interleave(4 // self.groups, 1) for t in (k, v))
        s = q @ k.mT / 8**0.5
        s = self.scores(s) if self.scores else s
        if hidden is not None and not late:
            s = s.masked_fill(hidden, -torch.inf)
        a = self.weights(s) if self.weights else s.softmax(-1)
        if hidden is not None and late:
            a = a.masked_fill(hidden, 0.0)
        return x + self.o_proj((a @ v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, None)


class Masked(Odd):
    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late = late

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return self.attend(x, None if attn_mask is None else ~attn_mask, self.late)


def joint(s: Tensor) -> Tensor:
    return s.transpose(1, 2).flatten(2).softmax(-1).view(s.transpose(1, 2).shape).transpose(1, 2)


def hide(s: Tensor, diagonal: int) -> Tensor:
    return s.masked_fill(torch.ones(s.shape[-2:]).triu(diagonal).bool(), -torch.inf)


def strictly_causal(s: Tensor) -> Tensor:
    """Row 0 reads itself, all others only what is before them."""
    hidden = torch.ones(s.shape[-2:]).triu(0).bool()
    hidden[0, 0] = False
    return s.masked_fill(hidden, -torch.inf)


RIGHT = {
    "plain": Odd(),
    "grouped": Odd(groups=2),
    "causal": Odd(lambda s: hide(s, 1)),
    "biased": Odd(lambda s: s + torch.linspace(0, 1, s.shape[-1])),
    "masked": Masked(False),
}
WRONG = {
    "joint": (Odd(weights=joint), "softmax over the wrong axis", "heads and keys together"),
    "queries": (Odd(weights=lambda s: s.softmax(-2)), "softmax over the wrong axis", "queries"),
    "heads": (Odd(weights=lambda s: s.softmax(1)), "softmax over the wrong axis", "the heads"),
    "doubled": (
        Odd(weights=lambda s: 2 * s.softmax(-1)),
        "weights don't sum to one",
        "every head and query sum to 2 instead of 1",
    ),
    "squared": (
        Odd(weights=lambda s: s.softmax(-1) ** 2),
        "weights don't sum to one",
        "instead of 1",
    ),
    "negative": (
        Odd(weights=lambda s: 1.5 * s.softmax(-1) - 0.5 / s.shape[-1]),
        "weights are negative",
        "with the weight -",
    ),
    "strict": (Odd(strictly_causal), "can't attend to itself", "row 0 reads 1 keys"),
    "next": (Odd(lambda s: hide(s, 2)), "attends to the next token", "itself and the next one"),
    "scale": (Odd(lambda s: s / 8**0.5), "missing or wrong scale", "by 0.125 instead of 0.3536"),
    "same": (
        Odd(weights=lambda s: s.mean(1, keepdim=True).softmax(-1).expand_as(s)),
        "all heads have the same weights",
        "head 0",
    ),
    "fixed": (
        Odd(weights=lambda s: torch.linspace(0, 1, s.shape[-1]).softmax(-1).expand_as(s).double()),
        "weights don't depend on the input",
        "Two inputs",
    ),
    "crossed": (Odd(lambda s: s.flip(1)), "heads read each other's slices", "head 3 of the quer"),
    "late mask": (Masked(True), "mask after softmax, not renormalised", "without the mask to 1"),
}


def judged(target: nn.Module) -> Any:
    with torch.no_grad():
        return judge_weights(facts_of(target), [None])


@pytest.mark.parametrize("name", RIGHT)
def test_right_weights(name: str) -> None:
    result = judged(RIGHT[name])
    assert not result.findings and not result.unjudged, result
    assert any("added to the input" in line for line in result.passed)
    if name == "masked":
        assert any("weights are 0 where attn_mask" in line for line in result.passed)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_weights(name: str) -> None:
    target, bug, words = WRONG[name]
    findings = judged(target).findings
    assert bug in {f.bug for f in findings}, findings
    finding = next(f for f in findings if f.bug == bug)
    assert words in finding.message and finding.example and finding.look and not finding.certain


def test_what_the_weights_dont_show_is_not_judged() -> None:
    for target, words in [
        (Odd(lambda s: s.sin() * 3), "how the weights follow from queries and keys"),
        (Odd(lambda s: s.tanh() * 3), "whether scores are meant to be 3 tanh(s)"),
        (Odd(lambda s: s.masked_fill(torch.eye(5).flip(0).bool(), -torch.inf)), "in a pattern"),
    ]:
        result = judged(target)
        assert not result.findings and any(words in line for line in result.unjudged), result
    assert not judged(nn.functional.scaled_dot_product_attention).findings


class Factors(Odd):
    """A learned scale of the scores, or a factor of each head, or a gate of each feature."""

    def __init__(self, kind: str) -> None:
        factor = torch.tensor([0.5, 1.0, -1.5, 2.0])[:, None, None]
        super().__init__(
            scores=lambda s: s * self.temperature.exp() if kind == "learned" else s,
            weights=(lambda s: s.softmax(-1) * factor) if kind == "factors" else None,
        )
        if kind == "learned":
            self.temperature = nn.Parameter(torch.tensor(0.3))


def test_what_is_chosen_freely_is_no_bug() -> None:
    learned = judged(Factors("learned"))
    assert not learned.findings and not learned.unjudged
    assert any("times exp(temperature) / sqrt(E)" in line for line in learned.passed)
    added = judged(Odd(weights=lambda s: s.softmax(-1) + torch.eye(s.shape[-1])))
    assert not added.findings and "own values are meant to be added" in added.unjudged[0]
    factors = judged(Factors("factors"))
    assert not factors.findings and "times a factor of the head" in factors.passed[0], factors


class AddedGroups(nn.Module):
    """The scores of a group's queries are added up; W_O takes a head for each group."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = 8, 2
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(a, b) for a, b in ((64, 64), (64, 16), (64, 16), (16, 64))
        )

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (2, 4, 8))
        k, v = (f(x).unflatten(-1, (2, 8)) for f in (self.k_proj, self.v_proj))
        w = torch.einsum("blhgd,bshd->bhls", q / 8**0.5, k).softmax(-1)
        return self.o_proj(torch.einsum("bhls,bshd->blhd", w, v).flatten(2))


@pytest.mark.parametrize(
    ("target", "bugs"),
    [
        (AddedGroups(), {"a group's queries are added up"}),
        (WRONG["queries"][0], {"softmax over the wrong axis"}),
        (WRONG["joint"][0], {"softmax over the wrong axis"}),
    ],
)
def test_the_verdict_of_the_whole_check(target: nn.Module, bugs: set[str]) -> None:
    report = multihead.check(target)
    assert report.verdict == "wrong" and report.bugs == bugs, str(report)
    assert "the weights that were read out" in str(report)


def test_right_ones_are_right_as_a_whole() -> None:
    for name in ("plain", "grouped", "causal"):
        report = multihead.check(RIGHT[name])
        assert report.verdict == "right", str(report)
