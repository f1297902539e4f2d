"""The kernels as a backend: what they are chosen for, and gradients that aren't needed."""

from __future__ import annotations

import pytest
import torch

from multihead import attention
from multihead.masks import causal
from multihead.ops import backend_for
from multihead.ops.backends import cpu, jit

pytestmark = pytest.mark.skipif(
    jit.MISSING is not None, reason="without Numba there are no kernels"
)


def test_a_bias_that_is_not_learned_costs_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, backward = [], cpu.differentiate_compiled
    monkeypatch.setattr(
        cpu, "differentiate_compiled", lambda *x: asked.append(x[-1]) or backward(*x)
    )
    q, k, v = (torch.randn(2, n, 40, 8, requires_grad=True) for n in (4, 2, 2))
    for learned in (True, False):
        bias = torch.randn(2, 4, 40, 40, requires_grad=learned)
        attention(q, k, v, bias=bias, backend="cpu").sum().backward()
        assert (bias.grad is not None) == learned == asked.pop() and not asked
    bias[0, 0, 3] = torch.finfo(
        torch.float32
    ).min  # a row that reads by the lowest numbers alone, for which torch serves
    attention(q, k, v, bias=bias, backend="cpu").sum().backward()
    assert not asked


def test_what_the_kernels_are_taken_for() -> None:
    short, long = torch.zeros(1, 1, 64, 8), torch.zeros(1, 2, 1024, 8)
    for options in (
        {},
        {"mask": causal()},
        {"softcap": 3.0},
        {"bias": torch.zeros(1024)},
        {"return_lse": True},
        {"mask": torch.ones(1, 1, 1024, 1024).bool()},
    ):
        assert backend_for(long, long, long, **options).backend == (
            "sdpa" if jit.MISSING else "cpu"
        )
    for options in ({"dropout": 0.1}, {"return_weights": True}):
        assert backend_for(long, long, long, **options).backend == "torch"
    assert backend_for(short, short, short).backend == "sdpa"
    row, keys = torch.zeros(1, 8, 1, 64).bfloat16(), torch.zeros(1, 8, 8192, 64).bfloat16()
    assert backend_for(row, keys, keys).backend == "sdpa"
    if not jit.MISSING:
        few = keys[:, :2]  # of which torch's kernel takes a third of the time of float32's
        assert backend_for(row, few, few).backend == "sdpa"
        for numbers in (few.float(), keys.float()):
            assert backend_for(row.float(), numbers, numbers).backend == "cpu"
    for options, words in (
        ({"dropout": 0.1}, "no dropout"),
        ({"return_weights": True}, "no weights"),
    ):
        with pytest.raises(
            ValueError,
            match=f"backend='cpu' doesn't support this input: the kernels have {words}; use",
        ):
            attention(short, short, short, backend="cpu", **options)
