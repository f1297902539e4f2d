"""The operator that torch records: compiled and exported graphs, fake tensors, autocast, and torch's
checks of operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import multihead
from multihead import attention
from multihead.masks import causal, documents, padding, prefix, window
from multihead.ops import AttentionCall
from multihead.ops.backends import custom_op

L = 9
G = torch.Generator().manual_seed(0)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": causal()},
    "window": {"mask": causal() & window(left=1)},
    "lengths": {"mask": padding(torch.tensor([5, 9])) & causal()},
    "valid": {"mask": padding(valid=torch.arange(L) < torch.tensor([[7], [9]]))},
    "documents": {"mask": documents(torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2])) & causal()},
    "prefix": {"mask": prefix(3)},
    "dense": {"mask": torch.rand(L, L, generator=G) > 0.5},
    "bias": {"bias": torch.randn(4, L, L, generator=G)},
    "softcap": {"softcap": 2.0, "mask": causal()},
    "sinks": {"sinks": torch.randn(4, generator=G)},
    "lse": {"return_lse": True},
    "weights": {"return_weights": True, "mask": causal()},
    "blocks": {"backend": "torch", "mask": causal(), "bias": torch.randn(2, 1, L, L, generator=G)},
}


cases = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def inputs(batch: int = 2, length: int = L) -> list[Tensor]:
    g = torch.Generator().manual_seed(batch * 100 + length)
    return [torch.randn(batch, n, length, 8, generator=g, requires_grad=True) for n in (4, 2, 2)]


def total(result: Any) -> Tensor:
    """A number that depends on everything that was asked for."""
    parts = result if isinstance(result, tuple) else (result,)
    return sum((x.square().sum() for x in parts), torch.zeros(()))


def same(a: Any, b: Any, atol: float = 1e-5) -> bool:
    a, b = (x if isinstance(x, tuple) else (x,) for x in (a, b))
    return len(a) == len(b) and all(
        x.shape == y.shape and torch.allclose(x, y, atol=atol) for x, y in zip(a, b)
    )


@cases
def test_compiled_without_a_break(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *x: attention(*x, **options), fullgraph=True, backend="aot_eager"
    )
    for batch in (2, 2):
        x = inputs(batch)
        a, b = compiled(*x), attention(*x, **options)
        assert same(a, b)
        assert same(torch.autograd.grad(total(a), x), torch.autograd.grad(total(b), x))


def test_compiled_with_lengths_that_change() -> None:
    torch._dynamo.reset()

    def f(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attention(q, k, v, causal() & padding(torch.full(q.shape[:1], 3)))

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    assert all(same(compiled(*inputs(2, length)), f(*inputs(2, length))) for length in (5, 6, 17))


def test_holes_in_a_compiled_mask_are_refused_when_the_graph_runs() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v, valid: attention(q, k, v, padding(valid=valid)),
        fullgraph=True,
        backend="aot_eager",
    )
    valid = torch.ones(2, L, dtype=torch.bool)
    compiled(*inputs(), valid)
    valid[0, 3] = False
    with pytest.raises(RuntimeError, match="has holes"):
        compiled(*inputs(), valid)


EXPORTED: dict[str, Callable[..., Any]] = {
    "plain": lambda q, k, v: attention(q, k, v),
    "causal": lambda q, k, v: attention(q, k, v, causal()),
    "window": lambda q, k, v: attention(q, k, v, causal() & window(left=3)),
    "padding": lambda q, k, v: attention(q, k, v, padding(torch.full(q.shape[:1], 3)) & causal()),
    "softcap": lambda q, k, v: attention(q, k, v, causal(), softcap=2.0),
    "weights": lambda q, k, v: attention(q, k, v, causal(), return_weights=True),
}


@pytest.mark.parametrize("function", EXPORTED.values(), ids=EXPORTED)
def test_exported_with_dynamic_batch_and_length(function: Callable[..., Any]) -> None:
    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return function(q, k, v)

    sizes = {0: torch.export.Dim("B"), 2: torch.export.Dim("L")}
    graph = torch.export.export(Module(), tuple(inputs()), dynamic_shapes=(sizes,) * 3).module()
    for batch, length in ((1, 1), (3, 17), (2, 4)):
        x = inputs(batch, length)
        a, b = graph(*x), function(*x)
        assert same(a, b)
        assert same(torch.autograd.grad(total(a), x), torch.autograd.grad(total(b), x))


def test_fake_tensors_and_recorded_functions() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    valid = torch.ones(2, L, dtype=torch.bool)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.randn(2, 4, L, 8)
        assert attention(x, x, x).shape == attention(x, x, x, padding(valid=valid)).shape == x.shape
    recorded = make_fx(lambda *x: attention(*x, causal()))(*(x.detach() for x in inputs()))
    assert torch.allclose(recorded(*inputs()), attention(*inputs(), causal()), atol=1e-6)


def test_an_offset_of_two_lengths_is_exported_for_any() -> None:
    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return attention(q, k, v, causal(k.shape[2] - q.shape[2]))

    rows, keys = {2: torch.export.Dim("L")}, {2: torch.export.Dim("S")}
    q, k, v = (x.detach() for x in inputs())
    graph = torch.export.export(
        Module(), (q[:, :, :3].clone(), k, v), dynamic_shapes=(rows, keys, keys)
    ).module()
    for first in (0, 4, 8):
        assert torch.allclose(
            graph(q[:, :, first:], k, v), attention(q, k, v, causal())[:, :, first:], atol=1e-6
        )


def test_autocast_leaves_float64_alone_and_keeps_gradients_exact() -> None:
    q, k, v = (x.detach().double().requires_grad_() for x in inputs())
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(q, k, v, softcap=1.0).dtype == torch.float64
        halves = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
        inside = torch.autograd.grad(total(attention(*halves, causal(), softcap=1.0)), halves)
    outside = torch.autograd.grad(total(attention(*halves, causal(), softcap=1.0)), halves)
    assert all(torch.equal(a, b) for a, b in zip(inside, outside))


@cases
def test_autocast_casts_as_for_torchs_own_operator(options: dict[str, Any]) -> None:
    q, k, v = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        got = attention(q, k.bfloat16(), v, **options)
        theirs = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    want = attention(*(x.bfloat16() for x in (q, k, v)), **options)
    assert (
        same(got, want)
        and (got[0] if isinstance(got, tuple) else got).dtype == theirs.dtype == torch.bfloat16
    )


def test_torchs_checks_of_an_operator() -> None:
    q, k, v = inputs()
    start, stop = (padding(torch.tensor([5, 9])) & causal()).bounds(L, L)
    bias, sinks = torch.randn(1, 4, L, L, requires_grad=True), torch.randn(4, requires_grad=True)
    dense, seed = torch.rand(1, 1, L, L) > 0.5, torch.tensor([5])
    plain = AttentionCall(q, k, v, scale=0.3)
    bounded = plain._replace(start=start, stop=stop)
    for call, seed_or_none, kernels in (
        (bounded._replace(bias=bias, sinks=sinks, softcap=2.0), None, False),
        (plain._replace(mask=dense, dropout=0.5), seed, False),
        (bounded._replace(sinks=sinks, softcap=2.0), None, True),
        (plain._replace(mask=dense), None, True),
        (bounded._replace(bias=bias, softcap=2.0), None, True),
        (plain._replace(low=-3, high=1), None, False),
    ):
        given = (*call[:-1], seed_or_none, kernels)
        torch.library.opcheck(custom_op.attend, (*given, True, not kernels))
        given = tuple(x.detach() if isinstance(x, Tensor) else x for x in given)
        out, lse, weights = custom_op.attend(*given, True, not kernels)
        grads = (torch.ones_like(out), lse, None if kernels else weights)
        torch.library.opcheck(
            custom_op.attend_backward, (*grads, out, lse, *given, call.bias is not None)
        )


def test_shapes_without_numbers() -> None:
    q, k, v = (x.to("meta") for x in inputs())
    assert [
        x.shape for x in attention(q, k, v, causal(), return_lse=True, return_weights=True)
    ] == [(2, 4, L, 8), (2, 4, L), (2, 4, L, L)]
    assert multihead.ops.backend_for(q, k, v, causal()).backend == "sdpa"
