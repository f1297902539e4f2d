"""Weights are read out however projections are kept, and whatever they are called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import multihead
from checks import unusual
from checks.samples import facts_of
from multihead.checks.readers import open_reader
from multihead.checks.readout import CannotRead

KINDS = [
    *("HeadLists", "LowRank", "LowRankParameters", "SharedByHeads", "SharedHeadsFirst"),
    *("SharedInALoop", "Numbered", "Listed", "Stacked", "Einsum", "Latent", "FusedLatent"),
    *("Narrow", "Usual"),
]


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_queries_are_found(kind: str) -> None:
    reader = open_reader(facts_of(getattr(unusual, kind)()).callee)
    x, module = reader.callee.x(1, size=0.5), reader.callee.module
    readout = reader.read(x)
    reader.callee(x)
    torch.testing.assert_close(readout.weights, module.used[0], rtol=1e-8, atol=1e-11)
    # log A follows from the queries and keys, so these are the right ones.
    width = reader.head_dims[0]
    q, k = (t.unflatten(-1, (-1, width)).transpose(0, 1) for t in (readout.queries, readout.keys))
    torch.testing.assert_close((q @ k.mT / width**0.5).softmax(-1), module.used[0])
    # Contributions and the residual add up to the output, to W_O's bias.
    total = readout.contributions.sum((0, 2)) + readout.rest
    torch.testing.assert_close(total, reader.callee(x)[0])
    bias = readout.rest - x[0]
    torch.testing.assert_close(bias, bias[:1].expand_as(bias))


def scores(q: Any, k: Any) -> Any:
    return q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5


def joint(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One softmax over heads and keys."""
    s = scores(q, k).transpose(1, 2)
    return s.flatten(2).softmax(-1).view(s.shape).transpose(1, 2) @ v


def in_numpy(q: Any, k: Any, v: Any) -> Any:
    s = scores(q, k)
    w = np.exp(s - s.max(-2, keepdims=True))
    return w / w.sum(-2, keepdims=True) @ v  # over the queries


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@pytest.mark.parametrize(("function", "axes"), [(joint, (0, 2)), (in_numpy, (1,)), (grouped, (2,))])
def test_inputs_by_heads(function: Any, axes: tuple[int, ...]) -> None:
    reader = open_reader(facts_of(function).callee)
    assert reader.assignment is None
    readout = reader.read(reader.callee.x(1, size=0.5))
    sums = readout.weights.sum(axes)
    torch.testing.assert_close(sums, torch.ones_like(sums))
    assert readout.contributions.shape == (*readout.weights.shape, reader.head_dims[1])
    if function is not grouped:
        assert multihead.check(function).bugs == {"softmax over the wrong axis"}


class Taps(unusual.Numbered):
    def project(self, y: Tensor) -> Any:
        q, k, v = super().project(y)
        return q, k, v.roll(1, -1)  # features reach the places of others


def test_what_isnt_found_has_a_reason() -> None:
    with pytest.raises(CannotRead, match="w3 has no influence"):
        open_reader(facts_of(Taps()).callee)
