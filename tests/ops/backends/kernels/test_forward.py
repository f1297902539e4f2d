"""The forward kernels against the reference: every shape, mask, layout and dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multihead import attention
from multihead.masks import IntervalMask, causal, documents, intervals, padding, window
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


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    mask_name=st.sampled_from(MASKS),
    batch=st.integers(1, 3),
    groups=st.integers(1, 3),
    share=st.integers(1, 5),
    length=st.one_of(st.integers(1, 20), st.integers(20, 140)),
    keys=st.integers(1, 200),
    width=st.integers(1, 40),
    value_width=st.integers(1, 40),
    layout=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    softcap=st.sampled_from([None, 5.0]),
    bias=st.sampled_from([None, "whole", "keys", "low"]),
    sunk=st.booleans(),
)
def test_against_the_reference(
    seed: int,
    mask_name: str,
    batch: int,
    groups: int,
    share: int,
    length: int,
    keys: int,
    width: int,
    value_width: int,
    layout: int,
    dtype: torch.dtype,
    softcap: float | None,
    bias: str | None,
    sunk: bool,
) -> None:
    g = torch.Generator().manual_seed(seed)
    heads = groups * share
    q, k, v = (
        strided(torch.randn(*shape, generator=g).to(dtype), layout)
        for shape in (
            (batch, heads, length, width),
            (batch, groups, keys, width),
            (batch, groups, keys, value_width),
        )
    )
    mask = mask_of(mask_name, g, batch, heads, length, keys)
    add = None
    if bias is not None:
        add = torch.randn(*((1, heads, length, keys) if bias == "whole" else (keys,)), generator=g)
        if bias != "keys":
            add = add.masked_fill(
                add < -1, -torch.inf if bias == "whole" else torch.finfo(torch.float32).min
            )
    options: dict[str, Any] = {
        "bias": add,
        "softcap": softcap,
        "sinks": torch.randn(heads, generator=g) if sunk else None,
        "return_lse": True,
    }
    want, want_lse = attention(q, k, v, mask, **options, backend="reference")
    out, lse = attention(q, k, v, mask, **options, backend="cpu")
    other, _ = attention(q, k, v, mask, **options, backend="torch")
    exact, _ = attention(q.double(), k.double(), v.double(), mask, **options, backend="reference")
    assert out.dtype == dtype and lse.dtype == torch.promote_types(dtype, torch.float32)
    rounding = torch.finfo(dtype).eps
    bound = 2 * float((other.double() - exact).abs().max()) + 4 * rounding * float(
        exact.abs().max().clamp(min=0.1)
    )
    assert float((out.double() - exact).abs().max()) <= bound
    assert torch.equal(lse.isneginf(), want_lse.isneginf())
    there = ~lse.isneginf()
    torch.testing.assert_close(lse[there], want_lse[there], rtol=1e-5, atol=1e-5)
    assert not bool(
        out[~there & (torch.zeros_like(there) if sunk else torch.ones_like(there))].any()
    )
    assert want.shape == out.shape


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 16, 17])
@pytest.mark.parametrize("share", [1, 3, 4, 8])
@pytest.mark.parametrize("width", [64, 60, 33])
def test_decoding(rows: int, share: int, width: int) -> None:
    """Few rows against a cache of several chunks, whose results are joined."""
    g = torch.Generator().manual_seed(rows * share)
    for keys in (1, cpu.CHUNK - 1, cpu.CHUNK, 3 * cpu.CHUNK + 5):
        q, k, v = (
            torch.randn(2, n, m, width, generator=g)
            for n, m in ((2 * share, rows), (2, keys), (2, keys))
        )
        mask = padding(torch.tensor([keys, max(1, keys // 3)])) & causal(keys - rows)
        want = attention(q.double(), k.double(), v.double(), mask, backend="reference")
        torch.testing.assert_close(
            attention(q, k, v, mask, backend="cpu").double(), want, rtol=1e-5, atol=2e-6
        )


def test_scores_of_ten_thousand() -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 90, 16, generator=g) for _ in range(3))
    for scale in (1e4, -1e4):
        out, lse = attention(q, k, v, causal(), scale=scale, return_lse=True, backend="cpu")
        want, want_lse = attention(
            q, k, v, causal(), scale=scale, return_lse=True, backend="reference"
        )
        # the rounding of a score of 1e5 is 0.008
        torch.testing.assert_close(out, want, rtol=0, atol=0.05)
        torch.testing.assert_close(lse, want_lse, rtol=1e-6, atol=0.1)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("rows", [3, 70])
def test_what_nobody_reads_never_matters(bad: float, rows: int) -> None:
    """Keys outside every row's interval, as in a cache that isn't filled: whatever they hold."""
    keys = 100
    q, k, v = torch.randn(2, 4, rows, 16), torch.randn(2, 2, keys, 16), torch.randn(2, 2, keys, 16)
    lengths = torch.tensor([40, 75])
    want = attention(q, k, v, padding(lengths), backend="reference")
    for b, length in enumerate(lengths.tolist()):
        k[b, :, length:], v[b, :, length:] = bad, bad
    for mask in (padding(lengths), padding(lengths).dense(rows, keys).expand(2, 1, rows, keys)):
        torch.testing.assert_close(
            attention(q, k, v, mask, backend="cpu"), want, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("rows", [3, 70])
def test_a_row_that_reads_nan_gives_nan_and_no_other(rows: int) -> None:
    for which in ("q", "k", "v"):
        q, k, v = torch.randn(1, 2, rows, 8), torch.randn(1, 2, rows, 8), torch.randn(1, 2, rows, 8)
        {"q": q, "k": k, "v": v}[which][0, 1, 1, 3] = torch.nan
        out = attention(q, k, v, causal(), backend="cpu").isnan().any(-1)
        want = torch.zeros(1, 2, rows, dtype=torch.bool)
        want[0, 1, slice(1, 2) if which == "q" else slice(1, None)] = True
        assert torch.equal(out, want), which


@pytest.mark.parametrize("shape", [(2, 3, 2, 150, 150), (1, 2, 1, 1, 3000), (1, 8, 8, 40, 700)])
def test_one_thread_and_two_give_the_same_bits(shape: tuple[int, ...]) -> None:
    batch, groups, share, length, keys = shape
    sizes = (groups * share, length), (groups, keys), (groups, keys)
    inputs = [torch.randn(batch, n, m, 24, requires_grad=True) for n, m in sizes]
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            out = attention(*inputs, causal(keys - length), backend="cpu")
            found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
