"""Positions that enter by rotations: of i - j alone, by the angles that the code states."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from checks.samples import facts_of
from checks.test_judge import Odd, judged
from multihead.checks.evidence import Judged
from multihead.checks.judge import read_evidence
from multihead.checks.rotations import Rotations, judge_rotations


class Turned(Odd):
    """Rotations of queries and keys by angles of their places, here of a base of 50."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.change, self.rope_base = change, 50.0
        if change == "learned":
            self.angles = nn.Parameter(torch.tensor([1.3, 0.7, 0.2, 0.04], dtype=torch.float64))

    def places(self, length: int) -> tuple[Tensor, Tensor]:
        at = torch.arange(length, dtype=torch.float64)
        return {
            "queries alone": (at, 0 * at),
            "keys alone": (0 * at, at),
            "opposite": (at, -at),
            "squares": (at**2, at**2),
            "next": (at + 1, at),
            "none": (0 * at, 0 * at),
        }.get(self.change, (at, at))

    def turn(self, t: Tensor, at: Tensor) -> Tensor:
        steps = self.rope_base ** -(torch.arange(4, dtype=torch.float64) / 4)
        steps = self.angles if self.change == "learned" else steps
        steps = steps.sqrt() if self.change == "other angles" else steps
        a, b = t.chunk(2, -1)
        cos, sin = torch.outer(at, steps).cos(), torch.outer(at, steps).sin()
        if self.change == "halves aren't swapped":
            return torch.cat([a * cos + a * sin, b * cos - b * sin], -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def attend(self, x: Tensor, hidden: Tensor | None, late: bool = False) -> Tensor:
        q, k, v = (
            f(self.norm(x)).unflatten(-1, (-1, 8)).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        of_queries, of_keys = self.places(x.shape[1])
        s = self.turn(q, of_queries) @ self.turn(k, of_keys).mT / 8**0.5
        s = s / 2 if self.change == "scale" else s
        at = torch.arange(x.shape[1], dtype=torch.float64)
        if self.change == "temperature":
            s = s * (1 + at.log1p()[:, None])
        if self.change == "kernel":
            s = s.tanh() * 3
        if self.change == "biased":
            s = s - (at[:, None] - at).abs() / 4
        if self.change == "further terms":
            s = s + q.sum(-1, keepdim=True) * at / 20
        if self.change == "causal":
            s = s.masked_fill(torch.ones(s.shape[-2:]).triu(1).bool(), -torch.inf)
        return x + self.o_proj((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


def measured(change: str) -> tuple[Rotations | bool, Judged]:
    judged = Judged()
    with torch.no_grad():
        return judge_rotations(judged, read_evidence(facts_of(Turned(change)))), judged


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("", "by a rotation of i - j (angles are powers of 50, from 1)"),
        ("causal", "by a rotation of i - j (angles are powers of 50, from 1)"),
        ("learned", "by a rotation of i - j (angles are angles)"),
        ("biased", "(angles are powers of 50, from 1), with ALiBi slopes 0.25, 0.25, 0.25, 0.25"),
    ],
)
def test_rotations_of_the_distance(change: str, words: str) -> None:
    found, judged = measured(change)
    assert isinstance(found, Rotations) and words in found.words, (found, judged)
    assert torch.allclose(found.slopes, torch.tensor(8**-0.5).double())
    assert not judged.findings and not judged.unjudged, judged


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("queries alone", "on the query alone"),
        ("keys alone", "on the key alone"),
        ("opposite", "on the sum i + j"),
        ("halves aren't swapped", "no rotation and isn't that of the distance i - j either"),
    ],
)
def test_rotations_that_are_wrong(change: str, words: str) -> None:
    found, judged = measured(change)
    (finding,) = judged.findings
    assert found is True and finding.bug == "rotary positions are wrong"
    assert words in finding.message, finding


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("squares", "by no function of i - j"),
        ("next", "not by that of one step"),
        ("other angles", "no powers of a base that the code states"),
    ],
)
def test_others_are_not_judged(change: str, words: str) -> None:
    found, judged = measured(change)
    assert found and not judged.findings and words in judged.unjudged[0], judged


def test_what_is_no_rotation_of_positions() -> None:
    for change in ("kernel", "further terms", "none", "temperature"):
        found, judged = measured(change)
        assert found is False and judged == Judged(), change


def test_the_verdict_of_the_weights() -> None:
    result = judged(Turned())
    assert not result.findings and not result.unjudged, result
    assert any("times 0.3536, where positions enter by a" in line for line in result.passed)
    (finding,) = judged(Turned("scale")).findings
    assert finding.bug == "missing or wrong scale" and "by 0.1768 inst" in finding.message
