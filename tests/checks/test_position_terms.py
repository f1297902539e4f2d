"""Biases by position are named: slopes, curves, and the entries of tables they are read from."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from checks.test_judge import Odd, judged
from multihead.checks.position_terms import find_curve

AT = torch.arange(5)
DISTANCE = (AT[:, None] - AT).double()


def test_curves() -> None:
    slopes = torch.tensor([0.5, 0.25])[:, None, None]
    rows = torch.randn(2, 5, 1, dtype=torch.float64)  # constants, which a softmax drops
    alibi = find_curve(-slopes * DISTANCE.abs() + rows)
    assert alibi is not None and alibi.describe() == "ALiBi slopes 0.5, 0.25"
    causal = find_curve((-slopes * DISTANCE + rows).masked_fill(DISTANCE < 0, torch.nan))
    assert causal is not None and causal.distances == (0, 1, 2, 3, 4)
    curve = find_curve((0.1 * DISTANCE**2 + rows)[:1])
    assert curve is not None and curve.slopes is None and "-2: 0.4" in curve.describe()
    assert find_curve(torch.outer(AT, AT).double()[None]) is None


class Biased(Odd):
    """A bias of ALiBi, with its sign; or of a table that each scheme reads by an index."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind.startswith("alibi"):
            self.alibi_slopes = 2.0 ** -torch.arange(1, 5, dtype=torch.float64)
        elif kind.startswith("t5"):
            self.relative_attention_bias = nn.Embedding(8, 4)
        elif kind.startswith("swin"):
            self.relative_position_bias_table = nn.Parameter(torch.randn(15, 4))
            grid = torch.stack([AT // 3, AT % 3])
            offsets = grid[:, :, None] - grid[:, None]
            self.register_buffer("relative_position_index", (offsets[0] + 1) * 5 + offsets[1] + 2)
        elif kind == "free":
            self.rel_pos = nn.Parameter(torch.randn(4, 9, 9))
        self.scores = None

    def bias(self) -> Tensor:
        if self.kind.startswith("alibi"):
            sign = 1 if self.kind == "alibi plus" else -1
            return sign * self.alibi_slopes[:, None, None] * DISTANCE.abs()
        if self.kind.startswith("t5"):
            far = DISTANCE.abs().long()
            far = torch.where(far < 2, far, (2 + far.log2()).long()).clamp(max=3)
            entries = self.relative_attention_bias(far + 4 * (DISTANCE < 0)).permute(2, 0, 1)
            return entries.tanh() if self.kind == "t5 squashed" else entries
        if self.kind.startswith("swin"):
            return self.relative_position_bias_table[self.relative_position_index].permute(2, 0, 1)
        if self.kind == "free":
            return self.rel_pos[:, :5, :5]
        return torch.outer(AT, AT).double()

    def attend(self, x: Tensor, hidden: Tensor | None, late: bool = False) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            f(y).unflatten(-1, (-1, 8)).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        a = (q @ k.mT / math.sqrt(8) + self.bias()).softmax(-1)
        return x + self.o_proj((a @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("alibi", "with ALiBi slopes 0.5, 0.25, 0.125, 0.0625,"),
        ("t5", "of relative_attention_bias.weight; the entry of each distance: -4 7"),
        ("swin", "of relative_position_bias_table at relative_position_index"),
        ("free", "of rel_pos"),
    ],
)
def test_biases_are_recomputed_from_parameters(kind: str, words: str) -> None:
    result = judged(Biased(kind))
    assert not result.findings and not result.unjudged, result
    assert any(words in line for line in result.passed), result


def test_biases_that_are_wrong_or_come_from_elsewhere() -> None:
    (finding,) = judged(Biased("alibi plus")).findings
    assert finding.bug == "bias by distance is wrong" and "grows by 0.5" in finding.message
    squashed = judged(Biased("t5 squashed"))
    assert any("aren't entries of relative_attention_bias" in u for u in squashed.unjudged)
    unknown = judged(Biased("product"))
    assert any("no function of the distance" in u for u in unknown.unjudged)


def test_one_slope_for_all_heads_is_not_judged() -> None:
    biased = Biased("alibi")
    assert not any("slopes" in line for line in judged(biased).unjudged)
    biased.alibi_slopes.fill_(0.25)
    (line,) = (line for line in judged(biased).unjudged if "slopes" in line)
    assert "all heads have the same, 0.25" in line
