"""The definition reproduces outputs, and where projections are unreadable nothing is judged."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import multihead
from checks.samples import Separate, facts_of
from checks.test_variants import Low
from multihead.checks.recompute import recompute


def test_without_readable_projections_scale_is_not_judged() -> None:
    report = multihead.check(Low())
    assert (
        report.ok is None
        and "not judged" in str(report)
        and "were not judged" in " ".join(str(report).split())
    )


def test_a_single_head_without_an_output_projection_is_no_bug() -> None:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(20, 20) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return (self.query(x) @ self.key(x).mT / 20**0.5).softmax(-1) @ self.value(x)

    assert multihead.check(Single()).ok


def recomputed(target: Any, scale: float | None = None) -> Any:
    with torch.no_grad():
        return recompute(facts_of(target), scale)


def test_every_trial_call_is_reproduced() -> None:
    result = recomputed(Separate())
    assert not result.findings and not result.note and len(result.calls) == 3, result
    assert result.match.definition.num_heads == 4 and not result.match.bugs
    assert result.match.description == "W_Q is q, W_K is k, W_V is v, W_O is o; 4 heads"


def test_one_bug_and_a_pair_are_named() -> None:
    (scale,) = recomputed(Separate(scale=1.0)).match.bugs
    assert scale.name == "missing or wrong scale" and "aren't scaled" in scale.description
    pair = recomputed(Separate(scale=1.0, mixed=True)).match.bugs
    assert {bug.name for bug in pair} == {"missing or wrong scale", "tokens and heads mixed"}


def test_a_finding_names_the_smallest_input() -> None:
    (finding,) = recomputed(Separate(scale=1.0)).findings
    assert finding.certain and finding.example.startswith("x [1, 2, 24]; at x [3, 5, 24]")
    assert not recomputed(Separate(scale=1.0), scale=1.0).findings


class Residual(nn.Module):
    """Attention behind a norm and beside a residual, of weights that batch elements share."""

    def __init__(self, share: Any) -> None:
        super().__init__()
        self.num_heads, self.share = 4, share
        self.norm = nn.LayerNorm(24)
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (4, 6)).transpose(1, 2) for f in (self.q, self.k, self.v))
        out = self.share(q @ k.mT / 6**0.5) @ v
        return x + self.o(out.transpose(1, 2).flatten(2))


def test_weights_that_batch_elements_share_are_named_behind_a_residual() -> None:
    for share, bug, words in (
        (lambda s: s.softmax(-1)[:1], "batch elements share weights", "of batch element 0"),
        (lambda s: s.softmax(-1).mean(0), "batch elements share weights", "the mean of all"),
        (lambda s: s.softmax(0), "softmax over the wrong axis", "over the batch"),
    ):
        (finding,) = multihead.check(Residual(share)).findings
        assert finding.bug == bug and words in finding.message and finding.certain, finding
        assert "the residual subtracted" in finding.message
