"""What mixes heads is undone, so that weights are judged as they are before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multihead
from checks.test_judge import Odd


class Talking(Odd):
    """Talking heads beside a residual and a norm: a 1 x 1 convolution, a linear layer, a matrix."""

    def __init__(self, before: Any = None, after: Any = None, weights: Any = None) -> None:
        super().__init__()
        self.before, self.after, self.softmax = before, after, weights or (lambda s: s.softmax(-1))

    def attend(self, x: Tensor, hidden: Tensor | None, late: bool = False) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            f(y).unflatten(-1, (-1, 8)).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        a = self.mix(self.after, self.softmax(self.mix(self.before, q @ k.mT / 8**0.5)))
        return x + self.o_proj((a @ v).transpose(1, 2).flatten(2))

    @staticmethod
    def mix(mixer: Any, t: Tensor) -> Tensor:
        if mixer is None:
            return t
        if isinstance(mixer, nn.Linear):
            return mixer(t.movedim(1, -1)).movedim(-1, 1)
        if isinstance(mixer, nn.Module):
            return mixer(t)
        return torch.einsum("bhij,hg->bgij", t, mixer)


@pytest.mark.parametrize(
    "target",
    [
        Talking(nn.Linear(4, 4), nn.Linear(4, 4, bias=False)),
        Talking(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)),
        Talking(nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))),
        Talking(after=nn.Linear(4, 4)),
        Talking(before=nn.Linear(4, 4)),
    ],
)
def test_talking_heads_are_right(target: nn.Module) -> None:
    report = multihead.check(target)
    assert report.verdict == "right", str(report)


def test_bugs_next_to_talking_heads_are_found() -> None:
    def doubled(s: Tensor) -> Tensor:
        return 2 * s.softmax(-1)

    report = multihead.check(Talking(nn.Linear(4, 4), nn.Linear(4, 4), doubled))
    assert report.verdict != "right", str(report)
    scale = Talking(nn.Linear(4, 4), nn.Linear(4, 4), lambda s: (s / 8).softmax(-1))
    assert multihead.check(scale).bugs == {"missing or wrong scale"}
    queries = Talking(after=nn.Linear(4, 4), weights=lambda s: s.softmax(-2))
    assert multihead.check(queries).verdict != "right"
