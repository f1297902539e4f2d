"""The NumPy definition, against loops over single numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from multihead import attention
from multihead.masks import causal
from multihead.ops.backends.reference import attend_reference


def test_by_hand_one_number_at_a_time() -> None:
    """Grouped heads, scale, soft cap, bias, mask and a sink, in the order of the definition."""
    g = np.random.default_rng(0)
    q, k, v = g.normal(size=(1, 4, 3, 2)), g.normal(size=(1, 2, 5, 2)), g.normal(size=(1, 2, 5, 3))
    mask, bias, sinks = g.random((1, 1, 3, 5)) > 0.4, g.normal(size=(4, 3, 5)), g.normal(size=4)
    mask[0, 0, 1] = False  # a query without keys
    result = attend_reference(q, k, v, mask, bias=bias, scale=0.7, softcap=1.5, sinks=sinks)
    for h in range(4):
        for i in range(3):
            powers = {}
            for j in range(5):
                s = 0.7 * sum(q[0, h, i, e] * k[0, h // 2, j, e] for e in range(2))
                s = 1.5 * math.tanh(s / 1.5) + bias[h, i, j]
                powers[j] = math.exp(s) if mask[0, 0, i, j] else 0.0
            total = sum(powers.values()) + math.exp(sinks[h])
            weights = [powers[j] / total for j in range(5)]
            np.testing.assert_allclose(result.weights[0, h, i], weights)
            np.testing.assert_allclose(result.lse[0, h, i], math.log(total))
            want = [sum(weights[j] * v[0, h // 2, j, c] for j in range(5)) for c in range(3)]
            np.testing.assert_allclose(result.out[0, h, i], want, atol=1e-15)


def test_a_query_without_keys_is_zero_and_its_log_sum_exp_minus_infinity() -> None:
    one = np.ones((1, 1, 2, 4))
    result = attend_reference(one, one, one, np.zeros((2, 2), bool))
    assert not result.out.any() and not result.weights.any() and (result.lse == -np.inf).all()


@pytest.mark.parametrize("lazy", ["q", "k", "v", "bias", "sinks", "scale"])
def test_negated_views(lazy: str) -> None:
    x = dict(zip("qkv", torch.randn(3, 1, 2, 3, 4, dtype=torch.float64)))
    x |= {"bias": torch.randn(3, 3).double(), "sinks": torch.randn(2).double()}
    x |= {"scale": torch.rand(2, 1, 1).double()}
    want = attention(**{n: -t if n == lazy else t for n, t in x.items()}, backend="reference")
    seen = {n: torch._neg_view(t) if n == lazy else t for n, t in x.items()}
    assert torch.equal(attention(**seen, backend="reference"), want)


@pytest.mark.parametrize("options", [{"dropout": 0.1}, {"tracked": True}], ids=str)
def test_no_dropout_and_no_gradients(options: dict[str, float]) -> None:
    tracked = options.pop("tracked", False)
    x = torch.randn(1, 2, 3, 4, requires_grad=bool(tracked))
    with pytest.raises(ValueError, match=r"reference.*neither dropout nor gradients"):
        attention(x, x, x, causal(), backend="reference", **options)
