"""Weights are found up to factors of rows, and functions of values and gates by their numbers."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from multihead.checks.factors import (
    FUNCTIONS,
    CannotRead,
    factor_rows,
    name_gate,
    to_heads,
    undo_function,
)

HEADS, LENGTH, WIDTH = 2, 5, 3
CHANNELS = range(HEADS * WIDTH)
A = torch.randn(HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)).double()
A = A.softmax(-1)


def derivative(a: torch.Tensor) -> torch.Tensor:
    """`[S, C, L, H * Ev]` of plain attention."""
    d = torch.zeros(LENGTH, HEADS, WIDTH, LENGTH, HEADS, WIDTH).double()
    for h in range(HEADS):
        for c in range(WIDTH):
            d[:, h, c, :, h, c] = a[h].mT
    return d.flatten(4).flatten(1, 2)


def test_plain_weights() -> None:
    heads = to_heads(derivative(A), CHANNELS, WIDTH)
    torch.testing.assert_close(heads.weights, A)
    assert heads.kv_heads == (0, 1) and heads.spread < 1e-12 and heads.factor is None


@pytest.mark.parametrize("kind", ["gate", "norm of a head", "norm of all heads"])
def test_factors_of_rows_are_undone(kind: str) -> None:
    d, g = derivative(A), torch.rand(LENGTH, HEADS * WIDTH).double() + 0.5
    if kind == "gate":
        changed = d * g
    else:
        mix = torch.randn(LENGTH, HEADS * WIDTH, HEADS * WIDTH).double()
        if kind == "norm of a head":
            mix = mix * torch.block_diag(*[torch.ones(WIDTH, WIDTH)] * HEADS)
        changed = torch.einsum("sclo,lop->sclp", d, mix)
    heads = factor_rows(changed, CHANNELS, WIDTH)
    torch.testing.assert_close(heads.weights, A)
    assert heads.factor is not None
    if kind == "gate":
        torch.testing.assert_close(heads.factor, g.unflatten(1, (HEADS, WIDTH)).transpose(0, 1))
        x = (g / 2).logit() if (g < 2).all() else g
        seen = {"other": g.flip(0), "gate": x}
        assert name_gate(heads.factor, CHANNELS, (0, 1), seen, WIDTH) == "2 sigmoid of gate"
        assert name_gate(heads.factor, CHANNELS, (0, 1), {"other": g + 1e-3}, WIDTH) is None


def test_different_weights_of_features_arent_a_factor() -> None:
    with pytest.raises(CannotRead, match="not up to a factor of the query either"):
        factor_rows(derivative(A) + torch.rand(LENGTH, 1, LENGTH, 1), CHANNELS, WIDTH)


@pytest.mark.parametrize("name", ["silu", "tanh", "gelu", "exp"])
def test_functions_of_values_are_found(name: str) -> None:
    values = torch.randn(LENGTH, HEADS * WIDTH).double()
    v = values.clone().requires_grad_()
    (slope,) = torch.autograd.grad(FUNCTIONS[name](v).sum(), v)
    found, heads = undo_function(derivative(A) * slope[:, :, None, None], CHANNELS, values, WIDTH)
    assert found == name
    torch.testing.assert_close(heads.weights, A, rtol=1e-6, atol=1e-8)
    with pytest.raises(CannotRead, match="no known function"):
        undo_function(
            derivative(A) * (1 + F.relu(values))[..., None, None], CHANNELS, values, WIDTH
        )
