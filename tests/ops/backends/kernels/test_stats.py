"""The kernel that gives statistics of each query, against the weights."""

from __future__ import annotations

import pytest
import torch

from multihead import attention
from multihead.masks import causal
from multihead.ops import AttentionCall
from multihead.ops.backends import cpu, jit

pytestmark = pytest.mark.skipif(
    jit.MISSING is not None, reason="without Numba there are no kernels"
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_statistics_are_those_of_the_weights(dtype: torch.dtype) -> None:
    from multihead.ops.backends.kernels.stats import DISTANCE, ENTROPY, LARGEST, LARGEST_AT, WEIGHT

    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 90, 8, generator=g).to(dtype) for n in (4, 2, 2))
    sinks, counted = torch.randn(4, generator=g).to(dtype), torch.rand(2, 90, generator=g) > 0.3
    columns = torch.rand(2, 4, 90, 3, generator=g).to(dtype)
    places = torch.randint(0, 90, (2, 2, 90), generator=g)
    call = AttentionCall.lower(q, k, v, causal(), sinks=sinks)
    out, lse, stats, received = cpu.attend_with_statistics(call, columns, places, 0, None, counted)
    want_out, want_lse, a = attention(
        q, k, v, causal(), sinks=sinks, return_lse=True, return_weights=True, backend="reference"
    )
    bound = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {}
    i = torch.arange(90)
    for got, want in (
        (out, want_out),
        (lse, want_lse),
        (stats[WEIGHT], a.sum(-1)),
        (stats[LARGEST], a.amax(-1)),
        (stats[LARGEST_AT], a.argmax(-1).to(dtype)),
        (stats[ENTROPY], -torch.special.xlogy(a, a).sum(-1)),
        (stats[DISTANCE], (a * (i[:, None] - i).abs()).sum(-1)),
        (stats[-3:], torch.einsum("bhij,bhjc->cbhi", a, columns)),
        (received, torch.einsum("bhij,bi->bhj", a, counted.to(dtype))),
    ):
        torch.testing.assert_close(got, want, **bound)
