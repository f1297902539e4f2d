"""Scales that are learned, soft caps and cosines; each fails for another code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import multihead
from checks.test_judge import Odd, judged


class Capped(Odd):
    def __init__(self, cap: float, stated: float | None = None) -> None:
        super().__init__(lambda s: cap * (s / cap).tanh() if cap else s)
        if stated is not None:
            self.softcap = stated


def test_a_soft_cap_is_judged_against_the_stated_one() -> None:
    for target in (Capped(5.0), Capped(5.0, 5.0)):
        result = judged(target)
        assert not result.findings and not result.unjudged, result
        assert any("with a soft cap of 5," in line for line in result.passed)
    (finding,) = judged(Capped(5.0, 30.0)).findings
    assert finding.bug == "missing or wrong soft cap" and "is 5 instead of 30" in finding.message
    (missing,) = judged(Capped(0.0, 10.0)).findings
    assert missing.bug == "missing or wrong soft cap" and "states one of 10" in missing.message
    (scale,) = judged(Odd(lambda s: 5 * (s * 8**0.5 / 5).tanh())).findings
    assert scale.bug == "missing or wrong scale" and "soft cap of 5" in scale.message


class Cosine(Odd):
    """Cosines times a number, or times a function of a learned one."""

    def __init__(self, scale: Any, start: float | None = None) -> None:
        super().__init__()
        self.scale = scale
        if start is not None:
            self.logit_scale = nn.Parameter(torch.full((4,), start))

    def attend(self, x: Tensor, hidden: Tensor | None, late: bool = False) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            f(y).unflatten(-1, (-1, 8)).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        s = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
        factor = self.scale(self.logit_scale) if callable(self.scale) else self.scale
        factor = factor[:, None, None] if isinstance(factor, Tensor) else factor
        return x + self.o_proj(((factor * s).softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("target", "words", "is_judged"),
    [
        (Cosine(torch.exp, 1.5), "times exp(logit_scale)", True),
        (Cosine(lambda t: t, 12.0), "times logit_scale", True),
        (Cosine(lambda t: t.clamp(max=4.6).exp(), 1.5), "times exp(logit_scale)", True),
        (Cosine(10.0), "queries and keys times 10", True),
        (Cosine(8**-0.5), "so little is nearly even", False),
    ],
)
def test_cosines(target: nn.Module, words: str, is_judged: bool) -> None:
    result = judged(target)
    assert not result.findings and bool(result.unjudged) != is_judged, result
    assert any(words in line for line in (result.passed if is_judged else result.unjudged))


class OutOfPlace(Odd):
    """A token reads all others, not itself."""


class LocalitySelfAttention(OutOfPlace):
    pass


class T5Attention(Odd):
    pass


def test_what_names_declare_is_no_bug() -> None:
    def hide(s: Tensor) -> Tensor:
        return s.masked_fill(torch.eye(s.shape[-1]).bool(), -1e9)

    assert multihead.check(LocalitySelfAttention(hide)).verdict == "right"
    assert multihead.check(OutOfPlace(hide)).verdict == "right"  # by its docstring
    undeclared = multihead.check(Odd(hide))
    assert undeclared.verdict == "partly judged", str(undeclared)
    assert "not to read itself" in " ".join(undeclared.unjudged)
    assert multihead.check(T5Attention(lambda s: s * 8**0.5)).verdict == "right"
    assert multihead.check(Odd(lambda s: s * 8**0.5)).bugs == {"missing or wrong scale"}


class Dependent(Odd):
    """Scores of squares of queries alone, or of keys alone."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.which = which

    def attend(self, x: Tensor, hidden: Tensor | None, late: bool = False) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            f(y).unflatten(-1, (-1, 8)).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        t = q if self.which == "queries" else k
        a = (t.tanh() @ t.mT / 8**0.5).softmax(-1)
        return x + self.o_proj((a @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("which", "missing"), [("queries", "keys"), ("keys", "queries")])
def test_weights_must_depend_on_queries_and_keys(which: str, missing: str) -> None:
    (finding,) = judged(Dependent(which)).findings
    assert finding.bug == f"weights don't depend on {missing}"
    assert f"With W_{missing[0].upper()} times 1.5 no weight changes" in finding.message
