"""torch's fused kernels: taken where they are exact, and equal to the definition there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from multihead import attention
from multihead.masks import causal, documents, padding, prefix, window
from multihead.ops import backend_for
from multihead.ops.backends import jit, sdpa

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


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("length", [1, 5])
def test_keys_that_are_no_numbers_give_nan(length: int, number: float) -> None:
    """torch's kernel gives zeros where all scores of a query are NaN."""
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 4, length, 8, generator=g), torch.randn(1, 2, 7, 8, generator=g)
    bad = torch.full_like(k, number)
    bad[..., ::2] = 0 if number == torch.inf else number
    bad[:, 1] = k[:, 1]
    with torch.no_grad():
        want = attention(q, bad, k, backend="reference")
        for backend in ("auto", "torch", "sdpa"):
            got = attention(q, bad, k, backend=backend)
            assert torch.allclose(got, want, atol=1e-5, equal_nan=True), backend
    assert want[:, :2].isnan().any() and want[:, 2:].isfinite().all()


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Numba isn't installed."""
    monkeypatch.setattr(jit, "MISSING", "Numba isn't installed (pip install numba)")


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


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
@pytest.mark.parametrize("mask", [None, causal()], ids=["full", "causal"])
@pytest.mark.parametrize("name", ["q", "k", "v", "qkv"])
def test_zeros_without_memory_are_zeros(name: str, mask: Any, backend: str) -> None:
    given = {n: torch.randn(2, 4, 40, 16) for n in "qkv"}
    zeros = given | {n: torch.zeros(2, 4, 40, 16) for n in name}
    given |= {n: torch._efficientzerotensor((2, 4, 40, 16)) for n in name}
    bias = {"bias": torch._efficientzerotensor((40, 40)) if mask is None else None}
    for _ in range(3):
        _ = torch.full((2, 4, 40, 16), 1e9)  # what memory that is read by mistake holds
        del _
        torch.testing.assert_close(
            attention(*given.values(), mask, backend=backend, **bias),
            attention(*zeros.values(), mask, backend="reference"),
        )


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_steps_of_decoding_take_the_short_way(groups: int) -> None:
    """One query a head without mask and gradients: the same numbers without the choices."""
    g = torch.Generator().manual_seed(groups)
    q, memory = torch.randn(2, 4, 1, 8, generator=g), torch.randn(2, groups, 40, 8, generator=g)
    k, v = memory[:, :, :33], memory[:, :, 5:38]
    for scale in (None, 0.7):
        with torch.no_grad():
            got = sdpa.attend_step(q, k, v, scale)
            assert got is not None and torch.equal(attention(q, k, v, scale=scale), got)
        want = attention(q, k, v, scale=scale, backend="reference")
        torch.testing.assert_close(got, want, atol=2e-6, rtol=0)


@torch.no_grad()
def test_what_isnt_a_plain_step_is_left_to_the_choices() -> None:
    q, k, wide = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 33, 8), torch.randn(2, 2, 33, 9)
    nan = q.clone()
    nan[0, 1, 0, 3] = torch.nan
    for case in (
        (q.double(), k.double(), k.double(), None),
        (q, k, wide, None),
        (q, k.transpose(2, 3).contiguous().transpose(2, 3), k, None),
        (q.expand(2, 4, 2, 8), k, k, None),
        (q, k[:, :, :0], k[:, :, :0], None),
        (q[:, :3], k, k, None),
        (q, k[:1], k[:1], None),
        (q, k, k, 0.0),
        (q, k, k, torch.tensor(1.0)),
        (q, torch.zeros(2, 2, 1 << 16, 8), torch.zeros(2, 2, 1 << 16, 8), None),
    ):
        assert sdpa.attend_step(*case) is None
    out = attention(nan, k, k)
    assert out[0, 1].isnan().all() and not out[0, 0].isnan().any()
    with torch.autocast("cpu", torch.bfloat16):
        assert sdpa.attend_step(q, k, k, None) is None
