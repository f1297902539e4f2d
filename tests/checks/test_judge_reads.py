"""Which keys each head reads, with the first place where that fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from checks.test_judge import Masked, Odd, judged

AT = torch.arange(5)
DISTANCE = AT[:, None] - AT
START = (AT - 2).clamp_min(0)[:, None]


def hide(reads: Tensor) -> Any:
    return lambda s: s.masked_fill(~reads, -torch.inf)


def by_head(*patterns: Tensor) -> Tensor:
    return torch.stack([patterns[h % len(patterns)] for h in range(4)])


ALL, CAUSAL = DISTANCE > -9, DISTANCE >= 0


@pytest.mark.parametrize(
    ("reads", "bug", "words"),
    [
        (by_head(CAUSAL, ALL), "attends to future tokens", "In head 1 query 0 reads key 1 with"),
        (
            (AT >= START) & (AT < START + 3),
            "attends to future tokens",
            "3 tokens counted from its left edge, which is at 0 for the first ones: query 0",
        ),
        (by_head(CAUSAL, DISTANCE >= -1), "attends to the next token", "In head 1 queries read"),
        (
            (DISTANCE >= 2) | (AT[:, None] < 2) & CAUSAL,
            "can't attend to itself",
            "at least 2 before the token; row 0 reads 1 keys: query 2 reads itself with the weight"
            " 0, and key 0 with",
        ),
    ],
)
def test_wrong_patterns(reads: Tensor, bug: str, words: str) -> None:
    (finding,) = judged(Odd(hide(reads))).findings
    assert finding.bug == bug and words in finding.message, finding


def test_what_may_be_meant_is_not_judged() -> None:
    differ = judged(Odd(hide(by_head(CAUSAL, CAUSAL & (DISTANCE < 2)))))
    assert not differ.findings and "meant to read different keys" in differ.unjudged[0]
    holes = judged(Odd(hide(CAUSAL & ~((AT == 1) & (AT == 3)[:, None]))))
    assert (
        "nearest is earlier tokens and the token itself, but query 3 doesn't read key 1"
        in (holes.unjudged[0])
    )


class BandAttention(Odd):
    """Windows of two widths."""


def test_windows_of_heads_are_named() -> None:
    window = BandAttention(hide(by_head(CAUSAL & (DISTANCE < 3), CAUSAL & (DISTANCE < 2))))
    result = judged(window)
    assert not result.findings and not result.unjudged, result
    assert any("head 1: a window from token i - 1 to i +0" in line for line in result.passed)


class Filled(Masked):
    """A mask that gives the keys it hides all the weight, so that it seems to hide the others."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        fill = torch.finfo(x.dtype).max
        self.scores = None if attn_mask is None else lambda s: s.masked_fill(~attn_mask, fill)
        return self.attend(x, None)


def test_a_mask_that_fills_with_the_largest_number() -> None:
    (finding,) = judged(Filled(late=False)).findings
    assert finding.bug == "inverted mask" and "with the same weight 0." in finding.message
    assert not judged(Masked(late=False)).findings
