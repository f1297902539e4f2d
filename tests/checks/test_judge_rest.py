"""What an output has besides the weighted values: norms and residuals are recomputed."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from checks.test_judge import Odd, judged


class Rest(Odd):
    """The attention's part of the output, then a norm, a residual or something else."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.after = nn.RMSNorm(32) if kind.startswith("rms") else nn.LayerNorm(32)

    def attend(self, x: Tensor, hidden: Tensor | None, late: bool = False) -> Tensor:
        y = super().attend(x, hidden, late) - x
        if self.kind == "squared":
            return y + x**2
        if self.kind == "twice":
            return y + self.after(self.after(x))
        before, outside = "sum" in self.kind, "outside" in self.kind
        return self.after(y + x if before else y) + (x if outside else 0.0)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("sum", "then the norm after of its sum with the input"),
        ("rms sum", "then the norm after of its sum with the input"),
        ("alone", "then the norm after"),
        ("rms outside", "then the norm after, added to the input"),
    ],
)
def test_norms_after_the_output_are_recomputed(kind: str, words: str) -> None:
    result = judged(Rest(kind))
    assert not result.findings and not result.unjudged, result
    assert any(line.endswith(words) for line in result.passed), result


@pytest.mark.parametrize("kind", ["squared", "twice"])
def test_other_parts_arent_judged(kind: str) -> None:
    result = judged(Rest(kind))
    assert not result.findings and "doesn't depend on the values" in result.unjudged[0]
