"""Copies with large random weights; the original, gains of norms and masks stay."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from multihead.checks.random_weights import with_large_random_arrays, with_large_random_weights


def test_modules() -> None:
    module = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.Embedding(64, 32)).train()
    before = {name: t.clone() for name, t in module.state_dict().items()}
    copied = with_large_random_weights(module)
    assert not copied.training and copied[0].weight.dtype == torch.float64
    assert abs(float(copied[0](torch.randn(500, 64).double()).std()) - 1.6) < 0.2
    assert copied[0].bias.abs().max() > 0.1 and torch.equal(copied[1].weight, torch.ones(32))
    assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items())
    again = with_large_random_weights(module)
    assert torch.equal(again[0].weight, copied[0].weight)


def test_arrays() -> None:
    class Thing:
        def __init__(self) -> None:
            self.W, self.mask, self.b = np.zeros((64, 32)), np.tril(np.ones((4, 4))), np.zeros(3)

    thing = Thing()
    copied = with_large_random_arrays(thing)
    assert not thing.W.any() and abs(copied.W.std() - 1.6 / 8) < 0.02
    assert np.array_equal(copied.mask, thing.mask) and not copied.b.any()


def test_parameters_at_zero_get_numbers_and_gains_stay() -> None:
    layer = nn.LayerNorm(4)
    layer.sinks = nn.Parameter(torch.zeros(4))
    copied = with_large_random_weights(layer)
    assert (copied.sinks != 0).all() and (copied.weight == 1).all()
