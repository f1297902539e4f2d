"""What holds for every backend: gradients, memory, NaN, and which of them is taken for what."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from torch import Tensor

import multihead
from multihead import attention
from multihead.masks import causal, documents, padding, prefix, window
from multihead.ops import AttentionCall, backend_for
from multihead.ops.backends import blockwise, flex, jit, sdpa

IDS = torch.tensor([[0, 0, 1, 1, 1], [5, 5, 5, 5, 2]])
MASKS: dict[str, Any] = {
    "none": None,
    "causal": causal(),
    "window": causal() & window(left=1),
    "lengths": padding(torch.tensor([0, 3])) & causal(),
    "documents": documents(IDS) & causal(),
    "prefix": prefix(torch.tensor([1, 3])),
    "dense": torch.rand(2, 4, 5, 5, generator=torch.Generator().manual_seed(1)) > 0.4,
}


def doubles(**options: Any) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [
        torch.randn(*shape, generator=g, dtype=torch.float64, requires_grad=True, **options)
        for shape in ((2, 4, 5, 3), (2, 2, 5, 3), (2, 2, 5, 2), (2, 1, 5, 5), (4,))
    ]


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(
    "elements",
    [1, 5 * 5 * 4, 1 << 20],
    ids=["head by head, row by row", "element by element", "whole"],
)
def test_gradients_of_everything_by_finite_differences(
    mask: Any, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blockwise, "BLOCK_ELEMENTS", elements)
    monkeypatch.setattr(blockwise, "FEWEST_ROWS", 1)
    options: Any
    for options in ({}, {"softcap": 1.0, "scale": 0.9}, {"dropout": 0.4}):

        def f(
            q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor, options: Any = options
        ) -> Any:
            torch.manual_seed(0)
            out, lse, weights = attention(
                q,
                k,
                v,
                mask,
                bias=bias,
                sinks=sinks,
                **options,
                return_lse=True,
                return_weights=True,
            )
            return out, lse, weights

        assert torch.autograd.gradcheck(f, doubles(), fast_mode=True)
    if mask is None or isinstance(mask, multihead.masks.IntervalMask):
        q, k, v, *_ = doubles()
        assert torch.autograd.gradcheck(
            lambda q, k, v: attention(q, k, v, mask, backend="torch"), (q, k, v), fast_mode=True
        )


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_gradients_on_torchs_kernels(mask: Any) -> None:
    q, k, v, bias, _ = doubles()
    for options in ({}, {"bias": bias}):
        assert (
            backend_for(q, k, v, mask, **{n: x.detach() for n, x in options.items()}).backend
            == "sdpa"
        )
        extra = tuple(options.values())

        def f(q: Tensor, k: Tensor, v: Tensor, *b: Tensor) -> Any:
            return attention(q, k, v, mask, bias=b[0] if b else None, backend="sdpa")

        assert torch.autograd.gradcheck(f, (q, k, v, *extra), fast_mode=True)


def test_dropout_is_the_same_in_both_passes_and_scales_what_is_kept() -> None:
    q, k, v, *_ = doubles()
    torch.manual_seed(0)
    ones = attention(
        q, k, torch.ones_like(v), dropout=0.5
    )  # the kept share of each row's weights, twice
    torch.manual_seed(0)
    assert torch.equal(attention(q, k, torch.ones_like(v), dropout=0.5), ones)
    assert (ones != 1).any() and not torch.equal(
        attention(q, k, torch.ones_like(v), dropout=0.5), ones
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias_dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_bias_is_not_rounded_whatever_is_asked(
    dtype: torch.dtype, bias_dtype: torch.dtype
) -> None:
    """A bias far from 0 whose differences matter, in every pair of dtypes, with autocast and
    without.
    """
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 6, 8, generator=g).to(dtype) for n in (4, 2, 2))
    bias = (300 + torch.randn(6, 6, generator=g)).to(bias_dtype)
    want = attention(q, k, v, causal(), bias=bias, backend="reference").float()
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    for options in ({}, {"return_lse": True}, {"backend": "torch"}, {"backend": "sdpa"}):
        got = attention(q, k, v, causal(), bias=bias, **options)
        assert torch.allclose(
            (got[0] if isinstance(got, tuple) else got).float(), want, atol=tolerance
        ), options
        with torch.autocast("cpu", torch.bfloat16):
            got = attention(q, k, v, causal(), bias=bias, **options)
        assert torch.allclose(
            (got[0] if isinstance(got, tuple) else got).float(), want, atol=2e-2
        ), options


@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float32).min, -1e38, -1e30])
def test_a_row_of_low_numbers_is_empty_only_where_they_are_minus_infinity(lowest: float) -> None:
    q, k, v = (x.detach().float() for x in doubles()[:3])
    bias = torch.zeros(5, 5)
    bias[2], bias[3, 1:] = lowest, lowest
    want = attention(q, k, v, bias=bias, backend="reference")
    assert bool(want[0, 0, 2].any()) == (lowest > -torch.inf)
    assert torch.allclose(want[:, :, 3], v[:, :, 0].repeat_interleave(2, 1))
    for options in (
        {},
        {"return_lse": True},
        {"return_weights": True},
        {"backend": "torch"},
        {"backend": "sdpa"},
    ):
        got = attention(q, k, v, bias=bias, **options)
        assert torch.allclose(got[0] if isinstance(got, tuple) else got, want, atol=1e-5), options


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "where", ["a key behind the mask", "a query that reads nothing", "a query that reads"]
)
def test_numbers_that_are_none_go_as_far_as_by_the_definition(number: float, where: str) -> None:
    q, k, v = (x.detach() for x in doubles()[:3])
    mask = padding(torch.tensor([0 if "nothing" in where else 3, 5]))
    if "key" in where:
        k[0, :, 3:] = number
    else:
        q[0] = number
    with torch.no_grad():
        for given in (mask, mask.dense(5, 5)):
            want = attention(q, k, v, given, backend="reference")
            for options in ({}, {"return_lse": True}, {"backend": "torch"}):
                got = attention(q, k, v, given, **options)
                assert torch.allclose(
                    got[0] if isinstance(got, tuple) else got, want, equal_nan=True
                ), options
    assert bool(want.isnan().any()) == ("that reads" in where and "nothing" not in where)


def test_the_log_sum_exp_of_an_empty_row_poisons_nothing() -> None:
    q, k, v, _, sinks = doubles()
    with torch.no_grad():
        sinks[0] = -torch.inf
    _, lse = attention(q, k, v, padding(torch.tensor([0, 3])), return_lse=True)
    grads = torch.autograd.grad(torch.logaddexp(lse, lse).exp().sum(), (q, k))
    out, lse = attention(q, k, v, padding(torch.tensor([0, 3])), sinks=sinks, return_lse=True)
    assert all(
        x.isfinite().all() for x in (*grads, *torch.autograd.grad(out.sum(), (q, k, v, sinks)))
    )


@pytest.mark.parametrize("share", [0.2, 0.8])
def test_dropout_draws_anew_in_every_block_and_keeps_the_mean(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blockwise, "BLOCK_ELEMENTS", 64)
    monkeypatch.setattr(blockwise, "FEWEST_ROWS", 8)
    q, v = torch.zeros(1, 4, 64, 2), torch.eye(64).expand(1, 4, -1, -1)
    torch.manual_seed(0)
    kept = 64 * attention(
        q, q, v, dropout=share
    )  # which weights are kept, and how much they are scaled up
    assert torch.allclose(kept.unique(), torch.tensor([0, 1 / (1 - share)]))
    blocks = kept.view(4, 8, 8, 64)
    assert all(not torch.equal(blocks[a], blocks[b]) for a in range(4) for b in range(a))
    assert all(not torch.equal(blocks[0, a], blocks[0, b]) for a in range(8) for b in range(a))
    assert abs(float(kept.mean()) - 1) < 0.05


@pytest.mark.parametrize("length", [8192])
def test_causal_with_a_narrow_bias_stays_narrow(length: int, without_kernels: None) -> None:
    q, bias = torch.zeros(1, 1, length, 8), torch.zeros(length)
    assert backend_for(q, q, q, causal(), bias=bias).backend == "torch"
    assert (
        backend_for(q[:, :, :512], q[:, :, :512], q[:, :, :512], causal(), bias=bias[:512]).backend
        == "sdpa"
    )


@pytest.mark.parametrize("backend", ["torch", "sdpa", "reference"])
def test_nan_in_a_query_stays_in_its_row(backend: str) -> None:
    q, k, v = (x.detach() for x in doubles()[:3])
    q[0, 1, 2, 0] = torch.nan
    for mask in (None, causal(), padding(torch.tensor([3, 5]))):
        out = attention(q, k, v, mask, backend=backend)
        assert out[0, 1, 2].isnan().all() and int(out.isnan().sum()) == out.shape[-1]


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Numba isn't installed."""
    monkeypatch.setattr(jit, "MISSING", "Numba isn't installed (pip install numba)")


def test_what_is_taken_for_what_and_why(without_kernels: None) -> None:
    q, k, v, bias, sinks = (x.detach() for x in doubles())
    for options, backend, reason in (
        ({}, "sdpa", "exactly this"),
        ({"mask": causal()}, "sdpa", "exactly this"),
        ({"bias": bias}, "sdpa", "exactly"),
        ({"mask": MASKS["lengths"]}, "sdpa", "exactly"),
        ({"softcap": 1.0}, "torch", "no soft cap"),
        ({"sinks": sinks}, "torch", "no sinks"),
        ({"return_lse": True}, "torch", "no log-sum-exp"),
        ({"return_weights": True}, "torch", "no weights"),
        ({"dropout": 0.1}, "torch", "no dropout"),
        ({"bias": bias.clone().requires_grad_()}, "torch", "gradient of a bias"),
    ):
        choice = backend_for(q, k, v, **options)
        assert choice.backend == backend and reason in choice.reason, choice
    long = torch.zeros(1, 1, 4096, 8)
    assert backend_for(long, long, long, causal()).backend == "sdpa"
    assert "memory" in backend_for(long, long, long, causal() & padding(torch.tensor([9]))).reason
    short = torch.zeros(1, 1, 512, 8)
    assert "narrow window" in backend_for(short, short, short, causal() & window(left=9)).reason
    assert (
        "need at least one query, key and column"
        in backend_for(short, long[:, :, :0], long[:, :, :0]).reason
    )
    with pytest.raises(ValueError, match="head width"):
        backend_for(q, k[..., :1], v)


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
        few = keys[:, :2]
        assert (
            backend_for(row, few, few).backend
            == backend_for(row.float(), keys.float(), keys.float()).backend
            == "cpu"
        )
    for options, words in (
        ({"dropout": 0.1}, "no dropout"),
        ({"return_weights": True}, "no weights"),
    ):
        with pytest.raises(
            ValueError,
            match=f"backend='cpu' doesn't support this input: the kernels have {words}; use",
        ):
            attention(short, short, short, backend="cpu", **options)


def test_without_numba_it_is_said(
    without_kernels: None, capsys: pytest.CaptureFixture[str]
) -> None:
    jit.say_missing.cache_clear()
    x = torch.zeros(1, 2, 1024, 8)
    small = x[:, :, :9]
    attention(small, small, small)
    assert not capsys.readouterr().err
    for _ in range(2):
        assert attention(x, x, x).shape == x.shape
    words = "Numba isn't installed (pip install numba), so attention on this CPU goes through torch"
    assert capsys.readouterr().err.count(words) == 1
    assert backend_for(x, x, x).backend == "sdpa"
    with pytest.raises(
        ValueError, match="backend='cpu' doesn't support this input: Numba isn't installed"
    ):
        attention(x, x, x, backend="cpu")


@pytest.mark.parametrize("limit", ["MASK_ELEMENTS", "NARROW"])
def test_limits_change_the_way_and_not_the_result(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (torch.randn(2, 2, 40, 8) for _ in range(3))
    mask = causal() & window(left=30) & padding(torch.tensor([40, 33]))
    before = attention(q, k, v, mask)
    monkeypatch.setattr(sdpa, limit, 1)
    assert backend_for(q, k, v, mask).backend == "torch"
    assert torch.allclose(attention(q, k, v, mask), before, atol=1e-6)


def test_memory_of_both_passes_grows_with_the_length_and_not_its_square() -> None:
    """One head's weights at 4,096 tokens would take 64 MiB, and a pass that kept them five times
    that; a block takes 8.
    """
    program = """
        import resource, torch
        from multihead import attention
        from multihead.masks import causal, padding
        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        def run(length):
            q, k, v = (torch.randn(1, 1, length, 16, requires_grad=True) for _ in range(3))
            bias = torch.zeros(length, requires_grad=True)
            out, lse = attention(q, k, v, causal() & padding(torch.tensor([length - 3])), bias=bias, sinks=torch.zeros(1),
                                 softcap=9.0, return_lse=True)
            (out.sum() + lse[..., :9].sum()).backward()
            assert q.grad.isfinite().all() and k.grad.any() and bias.grad.any()
        run(512)  # enough for kernels to be loaded
        before = peak()
        run(4096)
        print(peak() - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 100


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 1.0}, {"bias": True}, {"sinks": True}], ids=str
)
def test_what_flex_attention_is_asked_is_the_definition(mask: Any, options: dict[str, Any]) -> None:
    """Its kernel needs CUDA, but its unfused form runs anywhere, and gets the same mask and score
    functions.
    """
    q, k, v, bias, sinks = (x.detach() for x in doubles())
    options = {
        name: {"bias": bias, "sinks": sinks}.get(name, value) for name, value in options.items()
    }
    want = attention(q, k, v, mask, **options, return_lse=True, backend="reference")
    call = AttentionCall.lower(q, k, v, mask, **options)
    got = flex.FlexBackend(torch.nn.attention.flex_attention.flex_attention).forward(call)
    assert torch.allclose(got[0], want[0], atol=1e-6) and torch.allclose(got[1], want[1], atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "torch", "sdpa", "flex"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_on_cuda_as_on_the_cpu(backend: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 300, 64, generator=g).to(dtype) for n in (8, 2, 2))
    tolerance = {torch.float32: 2e-3, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    for mask in (
        None,
        causal(),
        causal() & window(left=40),
        causal() & padding(torch.tensor([300, 170])),
        documents(torch.arange(300) // 70) & causal(),
    ):
        want = attention(q, k, v, mask, backend="reference")
        a = [x.cuda().requires_grad_() for x in (q, k, v)]
        b = [x.double().requires_grad_() for x in (q, k, v)]
        got = attention(*a, mask, backend=backend)
        assert torch.allclose(got.cpu().float(), want.float(), atol=tolerance)
        weight = torch.randn(want.shape, generator=g)
        truth = torch.autograd.grad(attention(*b, mask, backend="torch"), b, weight.double())
        for x, y in zip(torch.autograd.grad(got, a, weight.cuda().to(dtype)), truth):
            assert torch.allclose(x.cpu().double(), y, atol=20 * tolerance)
