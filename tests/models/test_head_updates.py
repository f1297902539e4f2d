"""Norms, shares and first-order effects of head updates, from the updates written out."""

from __future__ import annotations

import torch

from multihead.models.head_updates import (
    first_order_effects,
    norm_factors,
    update_norms,
    update_shares,
)

HEADS, WIDTH, LENGTH, SIZE = 3, 4, 5, 7


def made(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_norms_and_shares_are_those_of_the_updates() -> None:
    outputs, weight = made(0, 2, HEADS, LENGTH, WIDTH), made(1, HEADS * WIDTH, SIZE)
    by_head = weight.view(HEADS, WIDTH, SIZE)
    updates = outputs @ by_head  # [B, H, L, D]
    factors = norm_factors(by_head)
    assert factors.shape == (HEADS, WIDTH, WIDTH)
    torch.testing.assert_close(update_norms(outputs, factors), updates.norm(dim=-1))
    total = updates.sum(1)
    shares, exists = update_shares(outputs, total, weight)
    expected = (updates * total[:, None]).sum(-1) / total.square().sum(-1)[:, None]
    torch.testing.assert_close(shares, expected)
    torch.testing.assert_close(shares.sum(1), torch.ones(2, LENGTH, dtype=torch.float64))
    assert exists.shape == (2, 1, LENGTH) and bool(exists.all())


def test_an_update_of_zero_has_no_shares() -> None:
    outputs = torch.zeros(HEADS, LENGTH, WIDTH)
    shares, exists = update_shares(
        outputs, torch.zeros(LENGTH, SIZE), torch.ones(HEADS * WIDTH, SIZE)
    )
    assert not bool(exists.any()) and bool((shares == 0).all())


def test_narrow_projections_have_narrow_factors() -> None:
    weight, outputs = made(2, HEADS, WIDTH, 2), made(3, HEADS, LENGTH, WIDTH)
    factors = norm_factors(weight)
    assert factors.shape == (HEADS, WIDTH, 2)
    torch.testing.assert_close(update_norms(outputs, factors), (outputs @ weight).norm(dim=-1))


def test_effects_are_derivatives_of_gates() -> None:
    """The gradient of a gate on each head, at 1, is O_h . dL/dO_h."""
    entered = made(4, LENGTH, HEADS * WIDTH)
    gates = torch.ones(LENGTH, HEADS, dtype=torch.float64, requires_grad=True)
    x = (entered.view(LENGTH, HEADS, WIDTH) * gates[..., None]).flatten(1)
    x.retain_grad()
    (x.sin() * made(5, LENGTH, HEADS * WIDTH)).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(first_order_effects(x.detach(), x.grad, HEADS), gates.grad)
