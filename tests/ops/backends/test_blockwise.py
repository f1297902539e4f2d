"""The gradients, dropout and memory of blocks of queries in plain torch."""

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
from multihead.ops.backends import blockwise

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


def test_small_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 61, 8), torch.randn(2, 2, 61, 8), torch.randn(2, 2, 61, 8)
    for mask in (
        None,
        multihead.masks.causal(),
        multihead.masks.causal() & multihead.masks.window(left=7),
    ):
        whole = multihead.attention(q, k, v, mask, backend="torch")
        monkeypatch.setattr(blockwise, "BLOCK_ELEMENTS", 1)
        monkeypatch.setattr(blockwise, "ROWS", 3)  # of masks; without one BLOCK_ELEMENTS decides
        monkeypatch.setattr(blockwise, "FEWEST_ROWS", 3)
        assert torch.allclose(whole, multihead.attention(q, k, v, mask, backend="torch"), atol=1e-6)
        monkeypatch.undo()
