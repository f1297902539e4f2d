"""The operator against `torch.nn.functional.scaled_dot_product_attention`, over all of its
options.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import multihead
from multihead.ops.backends import jit

TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@st.composite
def problems(draw: Any) -> tuple[list[Tensor], dict[str, Any]]:
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    batch, groups, share = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    length, keys = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    width, value = draw(st.sampled_from([1, 8, 20])), draw(st.sampled_from([3, 8, 20]))
    inputs = [
        torch.randn(batch, n, s, e, generator=g, dtype=torch.float64).to(dtype)
        for n, s, e in (
            (groups * share, length, width),
            (groups, keys, width),
            (groups, keys, value),
        )
    ]
    full = (batch, groups * share, length, keys)
    options: dict[str, Any] = {
        "scale": draw(st.sampled_from([None, 0.3])),
        "is_causal": draw(st.booleans()),
    }
    if not options["is_causal"] and draw(st.booleans()):
        shape = draw(
            st.sampled_from(
                [full, (1, *full[1:]), (batch, 1, *full[2:]), full[2:], (batch, 1, 1, keys)]
            )
        )
        may = (torch.rand(shape, generator=g) > 0.5).index_fill(-1, torch.tensor(0), True)
        numbers = torch.randn(shape, generator=g).to(dtype).masked_fill(~may, -torch.inf)
        options["attn_mask"] = numbers if draw(st.booleans()) else may
    return inputs, options


@pytest.mark.parametrize("backend", ["auto", "torch", "sdpa", *([] if jit.MISSING else ["cpu"])])
@given(problem=problems())
@settings(max_examples=60)
def test_equals_torchs_operator(backend: str, problem: Any) -> None:
    inputs, options = problem
    a, b = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    dtype = inputs[0].dtype
    with sdpa_kernel(
        SDPBackend.MATH
    ):  # torch's own definition, of which its kernels are approximations
        want = F.scaled_dot_product_attention(*a, **options, enable_gqa=True)
    ours = {
        "mask": multihead.masks.causal() if options["is_causal"] else options.get("attn_mask"),
        "scale": options["scale"],
    }
    if backend == "sdpa" and dtype == torch.float16:
        with pytest.raises(ValueError, match="float16"):
            multihead.attention(*b, **ours, backend=backend)
        return
    got = multihead.attention(*b, **ours, backend=backend)
    assert got.dtype == dtype and got.shape == want.shape
    assert torch.allclose(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    weight = torch.randn_like(want)
    for x, y in zip(torch.autograd.grad(want, a, weight), torch.autograd.grad(got, b, weight)):
        scale = max(1.0, float(x.abs().max()))
        assert x.dtype == y.dtype and torch.allclose(
            x, y, atol=5 * TOLERANCE[dtype] * scale, rtol=0
        )
