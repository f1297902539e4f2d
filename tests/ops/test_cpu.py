"""The CPU kernels: right on every shape, mask and dtype, whatever the threads, and kept on disk as
they should be.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
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


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    mask_name=st.sampled_from(MASKS),
    groups=st.integers(1, 2),
    share=st.integers(1, 3),
    length=st.integers(1, 90),
    keys=st.integers(1, 140),
    width=st.integers(1, 40),
    value_width=st.integers(1, 40),
    softcap=st.sampled_from([None, 5.0]),
    sunk=st.booleans(),
)
def test_gradients_are_those_of_the_blocks(
    seed: int,
    mask_name: str,
    groups: int,
    share: int,
    length: int,
    keys: int,
    width: int,
    value_width: int,
    softcap: float | None,
    sunk: bool,
) -> None:
    g = torch.Generator().manual_seed(seed)
    heads = groups * share
    inputs = [
        torch.randn(*shape, generator=g, dtype=torch.float64, requires_grad=True)
        for shape in (
            (2, heads, length, width),
            (2, groups, keys, width),
            (2, groups, keys, value_width),
        )
    ]
    sinks = (
        [torch.randn(heads, generator=g, dtype=torch.float64, requires_grad=True)] if sunk else []
    )
    mask = mask_of(mask_name, g, 2, heads, length, keys)
    found = []
    for dtype, backend in (
        (torch.float64, "torch"),
        (torch.float64, "cpu"),
        (torch.float32, "cpu"),
    ):
        used = [x.detach().to(dtype).requires_grad_() for x in (*inputs, *sinks)]
        out, lse = attention(
            *used[:3],
            mask,
            softcap=softcap,
            sinks=used[3] if sunk else None,
            return_lse=True,
            backend=backend,
        )
        loss = (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum() + lse.masked_fill(
            lse.isneginf(), 0
        ).sin().sum()
        found.append(torch.autograd.grad(loss, used))
    for want, double, single in zip(*found, strict=True):
        torch.testing.assert_close(double, want, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(single.double(), want, rtol=2e-4, atol=2e-4)


BIASES = {
    "whole": "bhij",
    "by head": "hij",
    "by text": "b1ij",
    "numbers": "ij",
    "keys": "j",
    "keys by head": "bh1j",
    "rows": "bhi1",
    "one": "1",
    "low": "bhij",
    "lowest": "ij",
}


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    mask_name=st.sampled_from(MASKS),
    kind=st.sampled_from(sorted(BIASES)),
    groups=st.integers(1, 2),
    share=st.integers(1, 3),
    length=st.integers(1, 90),
    keys=st.integers(1, 140),
    width=st.integers(1, 20),
    softcap=st.sampled_from([None, 5.0]),
    sunk=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_gradients_of_a_bias(
    seed: int,
    mask_name: str,
    kind: str,
    groups: int,
    share: int,
    length: int,
    keys: int,
    width: int,
    softcap: float | None,
    sunk: bool,
    dtype: torch.dtype,
) -> None:
    """Whatever it is shared by; of biases that forbid, and of rows that read by the lowest numbers
    alone.
    """
    g = torch.Generator().manual_seed(seed)
    sizes = {"b": 2, "h": groups * share, "i": length, "j": keys, "1": 1}
    bias = torch.randn([sizes[axis] for axis in BIASES[kind]], generator=g, dtype=torch.float64)
    if kind == "low":
        bias = bias.masked_fill(bias < 0, -torch.inf)
    elif kind == "lowest":
        bias[: length // 2 + 1] = torch.finfo(torch.float32).min
    inputs = [
        torch.randn(*shape, generator=g, dtype=torch.float64)
        for shape in (
            (2, groups * share, length, width),
            (2, groups, keys, width),
            (2, groups, keys, 7),
            (groups * share,),
        )
    ]
    mask = mask_of(mask_name, g, 2, groups * share, length, keys)
    found = []
    for backend, kept in (("torch", torch.float64), ("cpu", dtype)):
        used = [x.detach().to(kept).requires_grad_() for x in (*inputs, bias)]
        out = attention(
            *used[:3],
            mask,
            bias=used[4],
            softcap=softcap,
            sinks=used[3] if sunk else None,
            backend=backend,
        )
        loss = (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum()
        found.append(
            [
                x
                for x in torch.autograd.grad(loss, used, allow_unused=True, retain_graph=True)
                if x is not None
            ]
        )
        found[-1] += torch.autograd.grad(loss, used[:3])
    bound = (
        {"rtol": 1e-9, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 2e-4, "atol": 2e-4}
    )
    for want, got in zip(*found, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, **bound)


@pytest.mark.parametrize("shape", [(1, 4, 90, 90), (1, 1, 90, 90), (90,)])
def test_the_gradient_of_a_bias_has_the_same_bits_for_any_threads(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = [torch.randn(2, n, 90, 24) for n in (4, 2, 2)]
    bias, before, found = torch.randn(shape, requires_grad=True), torch.get_num_threads(), []
    run = cpu.KernelArguments.run

    def alone(arguments: cpu.KernelArguments, name: str, tasks: int) -> None:
        """No two tasks add to one number, which would seldom show in the bits."""
        told = arguments.numbers
        if "change" in told:
            assert (told["batch"] == 1 or told["change_b"]) and (
                told["heads"] == 1 or told["change_h"]
            )
            assert told["chunks"] == 1 or told["change_i"] or told["change_s"]
        run(arguments, name, tasks)

    monkeypatch.setattr(cpu.KernelArguments, "run", alone)
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found += torch.autograd.grad(
                attention(*inputs, causal(), bias=bias, backend="cpu").square().sum(), bias
            )
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2]) and found[0].any()


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


def test_gradcheck() -> None:
    q, k, v = (torch.randn(1, n, 5, 3, dtype=torch.float64, requires_grad=True) for n in (4, 2, 2))
    assert torch.autograd.gradcheck(
        lambda *x: attention(*x, causal(), softcap=2.0, return_lse=True, backend="cpu"), (q, k, v)
    )
    bias = torch.randn(2, 1, 5, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *x: attention(*x[:3], bias=x[3], softcap=2.0, backend="cpu"),
        (*(x.detach().expand(2, -1, -1, -1) for x in (q, k, v)), bias),
    )


def test_half_types_train() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = (torch.randn(1, 2, 9, 8).to(dtype).requires_grad_() for _ in range(3))
        got = torch.autograd.grad(
            attention(q, k, v, causal(), backend="cpu").float().square().sum(), (q, k, v)
        )
        want = torch.autograd.grad(
            attention(q, k, v, causal(), backend="torch").float().square().sum(), (q, k, v)
        )
        for x, y in zip(got, want, strict=True):
            assert x.dtype == dtype
            torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


def test_torchs_transforms() -> None:
    q, k, v = (torch.randn(3, 1, 2, 40, 8) for _ in range(3))

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal(), backend="cpu")

    want = torch.stack([f(*x) for x in zip(q, k, v, strict=True)])
    torch.testing.assert_close(torch.func.vmap(f)(q, k, v), want)
    torch._dynamo.reset()
    assert torch.equal(
        torch.compile(f, fullgraph=True, backend="aot_eager")(q[0], k[0], v[0]), want[0]
    )

    def loss(q: Tensor) -> Tensor:
        return f(q, k[0], v[0]).square().sum()

    x = q[0].clone().requires_grad_()
    torch.testing.assert_close(torch.func.grad(loss)(q[0]), torch.autograd.grad(loss(x), x)[0])


@pytest.mark.parametrize("name", ["power", "tanh"])
def test_the_functions_written_out(name: str) -> None:
    from numba import njit

    from multihead.ops.backends.kernels import intrinsics as tiles

    function = getattr(tiles, name)

    @njit
    def over(x: Any, out: Any) -> None:
        for i in range(len(x)):
            out[i] = function(x[i])

    x = np.linspace(
        -87 if name == "power" else -40, 0 if name == "power" else 40, 2_000_003, dtype=np.float32
    )
    out = np.empty_like(x)
    over(x, out)
    want = (np.exp if name == "power" else np.tanh)(x.astype(np.float64))
    # of far numbers exp's argument is itself rounded: to half a bit of 87 * log2(e)
    error = np.abs(out - want) / np.maximum(np.abs(want), 1e-30)
    assert error[np.abs(x) < 1].max() < 3e-7 and error.max() < (8e-6 if name == "power" else 3e-7)
    ends = (
        np.array([-np.inf, np.nan, -200.0], np.float32)
        if name == "power"
        else np.array([-np.inf, np.nan, np.inf], np.float32)
    )
    found = np.empty_like(ends)
    over(ends, found)
    np.testing.assert_array_equal(
        found, np.array([0, np.nan, 0] if name == "power" else [-1, np.nan, 1], np.float32)
    )


def test_threads_of_our_own_where_torch_has_none_to_lend(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(1, 4, 100, 16) for _ in range(3))
    want = attention(q, k, v, causal(), backend="cpu")
    monkeypatch.setattr(jit, "_parallel", lambda: jit._by_hand)
    assert torch.equal(attention(q, k, v, causal(), backend="cpu"), want)


PROGRAM = """
    import sys, torch
    from multihead import attention
    from multihead.ops.backends import jit
    x = torch.ones(1, 1, 40, 8)
    assert torch.allclose(attention(x, x, x, backend="cpu"), x)
    print(jit._found["forward_float32"].cache_hits)
"""


def started(folder: Path, program: str = PROGRAM, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "NUMBA_CACHE_DIR": str(folder), **more},
    )


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names a processor of that kind")
@pytest.mark.parametrize(
    ("name", "features", "width"), [("haswell", "+avx,+avx2,+fma", 32), ("x86-64", "+sse2", 16)]
)
def test_processors_with_narrower_vectors(
    name: str, features: str, width: int, tmp_path: Path
) -> None:
    program = """
        import torch
        from multihead import attention
        from multihead.masks import causal
        from multihead.ops.backends.kernels import intrinsics as tiles
        for length, keys in ((50, 50), (1, 700), (40, 90)):
            q, k, v = torch.randn(1, 4, length, 16), torch.randn(1, 2, keys, 16), torch.randn(1, 2, keys, 24)
            for mask, bias in ((causal(keys - length), None), (None, torch.randn(length, keys))):
                out, want = (attention(q, k, v, mask, bias=bias, backend=b) for b in ("cpu", "reference"))
                assert (out - want).abs().max() < 1e-5
        print(tiles.BYTES)
    """
    out, err = started(
        tmp_path, program, NUMBA_CPU_NAME=name, NUMBA_CPU_FEATURES=features
    ).communicate(timeout=300)
    assert out.strip() == str(width), err


def test_what_was_compiled_is_kept(tmp_path: Path) -> None:
    """Two processes at once compile once; a third finds it; damaged, it is made anew."""
    both = [started(tmp_path) for _ in range(2)]
    done = [p.communicate(timeout=300) for p in both]
    assert sorted(out.strip() for out, _ in done) == ["0", "1"], done
    assert sum("compiled forward_float32" in err for _, err in done) == 1
    out, err = started(tmp_path).communicate(timeout=300)
    assert out.strip() == "1" and "compiled" not in err
    for kept in [*tmp_path.rglob("*.nbi"), *tmp_path.rglob("*.nbc")]:
        kept.write_bytes(kept.read_bytes()[:100])
    out, err = started(tmp_path).communicate(timeout=300)
    assert out.strip() == "0" and "compiled forward_float32" in err, err
    out, err = started(tmp_path).communicate(timeout=300)
    assert out.strip() == "1", err


def test_kernels_of_other_sources_are_not_taken(tmp_path: Path) -> None:
    """Numba looks at the age of one file, and a kernel is made of several."""
    out, _ = started(tmp_path).communicate(timeout=300)
    stamp = next(tmp_path.rglob("multihead.sources"))
    stamp.write_text("others")
    out, err = started(tmp_path).communicate(timeout=300)
    assert out.strip() == "0" and "compiled forward_float32" in err
    assert stamp.read_text() != "others"


def test_where_nothing_can_be_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nowhere(function: Any) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr("numba.core.caching.FunctionCache", nowhere)
    monkeypatch.setattr(jit, "_found", {})
    x = torch.ones(1, 1, 40, 8)
    assert torch.allclose(attention(x, x, x, backend="cpu"), x)
    words = capsys.readouterr().err
    assert (
        "forward_float32: its compiled form can't be kept" in words
        and "set NUMBA_CACHE_DIR" in words
    )


@pytest.mark.parametrize("keys", [64, 128, 130, 192])
@pytest.mark.parametrize("heads", [1, 4])
def test_dense_masks_and_biases_of_whole_tiles(keys: int, heads: int) -> None:
    """Read a square at a time where rows lie as they should, one by one where they don't."""
    g = torch.Generator().manual_seed(keys)
    q, k, v = (torch.randn(2, n, m, 16, generator=g) for n, m in ((4, 96), (2, keys), (2, keys)))
    may = torch.rand(2, heads, 96, keys, generator=g) > 0.5
    add = torch.randn(2, heads, 96, keys, generator=g)
    turned = may.transpose(2, 3).contiguous().transpose(2, 3)
    for mask, bias in (
        (may, None),
        (turned, None),
        (may[:1, :, :1], None),
        (None, add),
        (None, add.mT.contiguous().mT),
        (None, add[:, :, :1]),
        (may, add),
        (may[..., :1], add[:1]),
    ):
        want = attention(q, k, v, mask, bias=bias, backend="reference")
        torch.testing.assert_close(
            attention(q, k, v, mask, bias=bias, backend="cpu"), want, rtol=1e-5, atol=1e-5
        )
