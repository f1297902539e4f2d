"""Gradients that are cut off, and dropout in evaluation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import multihead
from checks.samples import Separate, facts_of
from multihead.checks.training import find_wrong_gradients


@pytest.mark.parametrize("kind", ["module", "number"])
def test_dropout_of_rate_0_is_found_active_too(kind: str) -> None:
    class Dropping(Separate):
        def __init__(self) -> None:
            super().__init__()
            if kind == "module":
                self.drop = nn.Dropout(0.0)
            else:
                self.attn_dropout = 0.0

        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(
                F.dropout(x, self.drop.p if kind == "module" else self.attn_dropout)
            )

    assert multihead.check(Dropping()).bugs == {"dropout active in evaluation"}


def test_an_output_that_is_cut_off() -> None:
    class Cut(Separate):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x).detach()

    assert multihead.check(Cut()).bugs == {"gradients don't reach a projection"}
    assert multihead.check(Cut().requires_grad_(False)).ok


def test_a_projection_without_gradient_is_named() -> None:
    class CutKeys(Separate):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            q, k, v = (
                f(x).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)
            )
            y = F.scaled_dot_product_attention(q, k.detach(), v)
            return self.o(y.transpose(1, 2).flatten(2))

    with torch.no_grad():
        assert not find_wrong_gradients(facts_of(Separate()))
        (finding,) = find_wrong_gradients(facts_of(CutKeys()))
    assert finding.bug == "gradients don't reach a projection" and "k.weight" in finding.message


def test_a_wrong_backward_differs_from_a_small_step() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            return 2 * grad

    class WrongBackward(Separate):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return Doubled.apply(super().forward(x))

    with torch.no_grad():
        (finding,) = find_wrong_gradients(facts_of(WrongBackward()))
    assert "a small step changes the output by another amount" in finding.message
