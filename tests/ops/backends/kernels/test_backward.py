"""The backward kernels against blocks in plain torch, and the gradient of a bias for any number of
threads.
"""

from __future__ import annotations

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
