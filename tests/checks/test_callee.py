"""One interface for every layout: inputs and outputs are float64 [B, L, D]."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from checks.samples import Separate, facts_of
from multihead.checks.callee import CallSpec
from multihead.checks.signature import CannotCall


@torch.no_grad()
def test_layouts_give_one_result() -> None:
    def by_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # [B, H, L, E]
        return nn.functional.scaled_dot_product_attention(q, k, v)

    def by_length(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # [B, L, H, E]
        return by_heads(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)

    def in_numpy(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        return by_heads(*map(torch.from_numpy, (q, k, v))).numpy()

    callees = [facts_of(target).callee for target in (by_heads, by_length, in_numpy)]
    outs = [callee(callee.x()) for callee in callees]
    assert outs[0].dtype == torch.float64 and outs[0].shape == callees[0].x().shape
    torch.testing.assert_close(outs[1], outs[0])
    assert callees[2].num_heads == callees[0].num_heads


@torch.no_grad()
def test_masks_arguments_and_seeds() -> None:
    callee = facts_of(Separate()).callee
    x, triangle = callee.x(), torch.ones(5, 5).tril().bool()
    masked = callee(x, spec=CallSpec(allowed=triangle))
    torch.testing.assert_close(masked[:, :3], callee(x[:, :3], spec=CallSpec(triangle[:3, :3])))
    with pytest.raises(CannotCall, match="takes no padding"):
        callee(x, spec=CallSpec(valid=torch.ones(3, 5).bool()))
    spec = CallSpec().with_arguments(a=1).with_arguments(b=2)
    assert spec.arguments == {"a": 1, "b": 2} and not spec.is_plain and CallSpec().is_plain

    def noisy(x: Tensor) -> Tensor:
        return ((x @ x.mT).softmax(-1) @ x) + torch.randn(1)

    noisy_callee = facts_of(noisy).callee
    x = noisy_callee.x()
    first, again, other = (noisy_callee(x, spec=CallSpec(seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


@torch.no_grad()
def test_keys_are_as_wide_as_the_callee_takes_them() -> None:
    callee = facts_of(nn.MultiheadAttention(16, 2, kdim=6, vdim=20)).callee
    k, v = callee.keys(callee.x())
    assert k.shape == (3, 5, 6) and v.shape == (3, 5, 20)
    out, rest = callee.call_full(callee.x())
    assert out.shape == (3, 5, 16) and rest[0].shape == (3, 5, 5)  # mean weights


@torch.no_grad()
def test_a_copy_is_independent() -> None:
    callee = facts_of(Separate()).callee
    copied = callee.copy(torch.float32)
    assert copied.module is not callee.module and copied.dtype == torch.float32
    copied.module.q.weight.zero_()  # type: ignore[union-attr]
    assert callee.module.q.weight.any()  # type: ignore[union-attr]
