"""Weights that are no softmax by choice are recognised by identities that no bug fulfils."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import multihead
from checks.samples import Separate
from checks.test_judge import Odd, judged
from multihead.checks.kernels import find_kernel

GENERATOR = torch.Generator().manual_seed(0)
PRODUCTS = torch.randn(3, 2, 5, 5, dtype=torch.float64, generator=GENERATOR)
CAUSAL = torch.ones(5, 5).tril().bool()


def softmax_one(s: Tensor, sink: float = 0.0) -> Tensor:
    with_sink = torch.cat([s, torch.full_like(s[..., :1], sink)], -1)
    return with_sink.softmax(-1)[..., :-1]


@pytest.mark.parametrize(
    ("name", "kernel", "constant"),
    [
        ("sigmoid", lambda s: (s - 1.0).sigmoid(), -1.0),
        ("sigmoid", lambda s: s.sigmoid() * CAUSAL, 0.0),
        ("one more", softmax_one, 0.0),
        ("one more", lambda s: softmax_one(s.masked_fill(~CAUSAL, -torch.inf)), 0.0),
        ("one more", lambda s: softmax_one(s, 0.7), -0.7),
        ("rectified", lambda s: s.relu() / 5, 0.0),
        ("squares", lambda s: s.relu() ** 2, 0.0),
    ],
)
def test_kernels_are_recognised(name: str, kernel: Any, constant: float) -> None:
    found = find_kernel(kernel(0.3 * PRODUCTS), PRODUCTS)
    assert found is not None and name in found.name
    torch.testing.assert_close(found.constants, torch.full((2,), constant), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda s: s.softmax(-1),
        lambda s: s.exp(),
        lambda s: 2 * s.softmax(-1),
        lambda s: s.softmax(-1) ** 2,
        lambda s: s,
        # With the maximum subtracted, the one more depends on the row.
        lambda s: softmax_one(s - s.amax(-1, keepdim=True)),
    ],
)
def test_bugs_arent_kernels(wrong: Any) -> None:
    assert find_kernel(wrong(0.3 * PRODUCTS), PRODUCTS) is None


class SigmoidAttention(Odd):
    pass


def test_names_decide_whether_a_kernel_is_meant() -> None:
    declared = multihead.check(SigmoidAttention(weights=torch.sigmoid))
    assert declared.verdict == "right", str(declared)
    undeclared = multihead.check(Odd(weights=softmax_one))
    assert undeclared.verdict == "partly judged", str(undeclared)
    assert "one more in its sum" in undeclared.unjudged[0]
    wrong = multihead.check(Odd(lambda s: s / 3, softmax_one))
    assert wrong.bugs == {"missing or wrong scale"}, str(wrong)


def test_exponentials_without_a_sum_stay_wrong() -> None:
    assert judged(Odd(weights=Tensor.exp)).findings[0].bug == "weights don't sum to one"


class Plain(Separate):
    """The matrices of attention alone, causal."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = (f(x).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        hidden = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        s = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf)
        w = torch.cat([s, torch.zeros_like(s[..., :1])], -1).softmax(-1)[..., :-1]
        return self.o((w @ v).transpose(1, 2).flatten(2))


def test_a_kernel_explains_the_difference_from_the_definition() -> None:
    report = multihead.check(Plain())
    assert report.verdict == "partly judged", str(report)
