"""The kernel of exact weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multihead import attention
from multihead.masks import IntervalMask, causal, documents, intervals, padding, window
from multihead.ops import AlibiBias, AttentionCall
from multihead.ops.backends import cpu, jit

pytestmark = pytest.mark.skipif(
    jit.MISSING is not None, reason="without Numba there are no kernels"
)


MASKS = (
    "all",
    "causal",
    "window",
    "padding",
    "documents",
    "intervals",
    "dense",
    "dense by head",
    "keys alone",
)


def mask_of(
    name: str, g: torch.Generator, batch: int, heads: int, length: int, keys: int
) -> IntervalMask | Tensor | None:
    start = torch.randint(0, keys + 1, (batch, length), generator=g)
    sizes = {
        "dense": (batch, 1, length, keys),
        "dense by head": (1, heads, length, keys),
        "keys alone": (batch, 1, 1, keys),
    }
    if name in sizes:
        return torch.rand(*sizes[name], generator=g) > 0.5
    ids = torch.arange(keys) // 3
    return {
        "all": None,
        "causal": causal(keys - length),
        "window": window(left=4, right=2, offset=keys - length),
        "padding": (
            padding(torch.randint(0, keys + 1, (batch,), generator=g)) & causal(keys - length)
        ),
        "documents": documents(ids) & causal(),
        "intervals": intervals(
            start, (start + torch.randint(0, 9, start.shape, generator=g)).clamp(max=keys)
        ),
    }[name]


def strided(x: Tensor, kind: int) -> Tensor:
    """The same numbers, laid out as [B, L, H, E], with gaps, or with the head width not the fastest
    axis.
    """
    if kind == 1:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == 2:
        return torch.cat([x, x], -1)[..., : x.shape[-1]]
    return x.mT.contiguous().mT if kind == 3 else x


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    mask_name=st.sampled_from(MASKS),
    batch=st.integers(1, 3),
    groups=st.integers(1, 3),
    share=st.integers(1, 5),
    length=st.integers(1, 90),
    keys=st.integers(1, 200),
    width=st.integers(1, 40),
    layout=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    softcap=st.sampled_from([None, 5.0]),
    bias=st.sampled_from([None, "whole", "keys", "low", "lowest", "slopes"]),
    sunk=st.booleans(),
)
def test_exact_weights(
    seed: int,
    mask_name: str,
    batch: int,
    groups: int,
    share: int,
    length: int,
    keys: int,
    width: int,
    layout: int,
    dtype: torch.dtype,
    softcap: float | None,
    bias: str | None,
    sunk: bool,
) -> None:
    g = torch.Generator().manual_seed(seed)
    heads = groups * share
    q, k = (
        strided(torch.randn(*shape, generator=g).to(dtype), layout)
        for shape in ((batch, heads, length, width), (batch, groups, keys, width))
    )
    mask = mask_of(mask_name, g, batch, heads, length, keys)
    add, slopes = None, None
    if bias == "slopes":
        slopes = AlibiBias(torch.rand(heads, generator=g), torch.arange(length), torch.arange(keys))
    elif bias is not None:
        add = torch.randn(
            1, *((1, 1, keys) if bias == "keys" else (heads, length, keys)), generator=g
        )
        low = -torch.inf if bias == "whole" else torch.finfo(torch.float32).min
        add = (
            add
            if bias == "keys"
            else torch.full_like(add, low)
            if bias == "lowest"
            else add.masked_fill(add < -1, low)
        )
    sinks = torch.randn(heads, generator=g) if sunk else None
    _, want = attention(
        q,
        k,
        k,
        mask,
        bias=slopes or add,
        softcap=softcap,
        sinks=sinks,
        return_weights=True,
        backend="reference",
    )
    found = cpu.attend_for_weights(
        AttentionCall.lower(q, k, k, mask, bias=slopes or add, softcap=softcap, sinks=sinks)
    )
    assert found.dtype == dtype
    exact = dtype == torch.float64 and bias != "slopes"  # which are float32 here
    torch.testing.assert_close(
        found, want, rtol=1e-12 if exact else 1e-5, atol=1e-14 if exact else 2e-6
    )


def test_weights_of_large_scores_and_of_nan() -> None:
    """They add up to 1 all the same; what a row may not read never matters, and a row that reads
    NaN is NaN.
    """
    q, k = torch.randn(1, 2, 90, 16), torch.randn(1, 1, 90, 16)
    found = cpu.attend_for_weights(AttentionCall.lower(q, k, k, causal(), scale=1e4))
    torch.testing.assert_close(found.sum(-1), torch.ones(1, 2, 90), rtol=1e-6, atol=1e-6)
    k[0, 0, 70, 3] = torch.nan
    found = cpu.attend_for_weights(AttentionCall.lower(q, k, k, causal(), scale=0.25))
    assert torch.equal(found.isnan().any(-1), (torch.arange(90) >= 70).expand(1, 2, 90))
