"""What torch makes of the operator: compiled and exported graphs, vmap, torch.func, autocast, its
own checks of operators.
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
from multihead.ops.backends import custom_op as blockwise

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


@cases
def test_vmap_and_gradients_for_each_element(options: dict[str, Any]) -> None:
    many = [torch.stack([x, x + 1, 2 * x]).detach().requires_grad_() for x in inputs()]
    one_by_one = [attention(*x, **options) for x in zip(*many)]
    want = (
        tuple(map(torch.stack, zip(*one_by_one)))
        if isinstance(one_by_one[0], tuple)
        else torch.stack(one_by_one)
    )
    got = torch.vmap(lambda *x: attention(*x, **options))(*many)
    assert same(got, want)
    want_grad = torch.autograd.grad(total(want), many)
    assert same(torch.autograd.grad(total(got), many), want_grad, 1e-4)
    by_func = torch.vmap(
        torch.func.grad(lambda *x: total(attention(*x, **options)), argnums=(0, 1, 2))
    )
    assert same(by_func(*(x.detach() for x in many)), want_grad, 1e-4)


@pytest.mark.parametrize("mapped", ["q", "bias", "sinks", "mask"])
def test_vmap_over_one_input_alone(mapped: str) -> None:
    """What isn't mapped is shared, and its gradient is the sum over the elements."""
    q, k, v = inputs()
    given = {
        "q": q,
        "bias": torch.randn(1, 4, L, L, requires_grad=True),
        "sinks": torch.randn(4, requires_grad=True),
        "mask": torch.rand(2, 1, L, L) > 0.3,
    }
    stacked = torch.stack(
        [given[mapped], ~given[mapped] if mapped == "mask" else given[mapped] * 2]
    )

    def f(x: Tensor) -> Any:
        use = given | {mapped: x}
        return attention(use["q"], k, v, use["mask"], bias=use["bias"], sinks=use["sinks"])

    got, want = torch.vmap(f)(stacked), torch.stack([f(x) for x in stacked])
    assert same(got, want)
    learned = (q, k, v, given["bias"], given["sinks"])
    assert same(
        torch.autograd.grad(total(got), learned, retain_graph=True),
        torch.autograd.grad(total(want), learned),
        1e-4,
    )


def test_vmap_says_what_it_hides() -> None:
    q, k, v = inputs()
    valid = torch.ones(2, L, dtype=torch.bool)
    with pytest.raises(ValueError, match="vmap hides"):
        torch.vmap(lambda q, k, v, m: attention(q[None], k[None], v[None], padding(valid=m[None])))(
            q, k, v, valid
        )


def test_dropout_under_vmap_differs_between_elements() -> None:
    many = [torch.stack([x, x]) for x in inputs()]
    out = torch.vmap(lambda *x: attention(*x, dropout=0.5), randomness="different")(*many)
    assert not torch.equal(out[0], out[1])
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), many))


def test_a_jacobian_through_dropout_has_one_draw() -> None:
    q, k, v = inputs()

    def f(x: Tensor) -> Tensor:
        return attention(q, k, x, dropout=0.5).sum((0, 1, 3))

    torch.manual_seed(1)
    y = f(v)
    torch.manual_seed(1)
    jacobian = torch.func.jacrev(f)(v)
    assert torch.allclose((jacobian * v).sum((1, 2, 3, 4)), y, atol=1e-5)  # f is linear in v
    same_draw = torch.vmap(
        lambda x: attention(q[0][None], k[0][None], x[None], dropout=0.5), randomness="same"
    )(torch.stack([v[0], v[0]]))
    assert torch.equal(same_draw[0], same_draw[1])


def test_fake_tensors_and_recorded_functions() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    valid = torch.ones(2, L, dtype=torch.bool)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.randn(2, 4, L, 8)
        assert attention(x, x, x).shape == attention(x, x, x, padding(valid=valid)).shape == x.shape
    recorded = make_fx(lambda *x: attention(*x, causal()))(*(x.detach() for x in inputs()))
    assert torch.allclose(recorded(*inputs()), attention(*inputs(), causal()), atol=1e-6)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_compiled_vmap() -> None:
    torch._dynamo.reset()
    many = [torch.stack([x, 2 * x]).detach() for x in inputs()]
    compiled = torch.compile(
        lambda *x: torch.vmap(lambda *y: attention(*y, causal()))(*x),
        fullgraph=True,
        backend="aot_eager",
    )
    assert torch.allclose(
        compiled(*many), torch.stack([attention(*x, causal()) for x in zip(*many)]), atol=1e-5
    )


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


def test_second_derivatives_are_refused() -> None:
    q, k, v = inputs()
    first = torch.autograd.grad(total(attention(q, k, v, softcap=1.0)), q, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="can't itself be differentiated"):
        torch.autograd.grad(first.sum(), k)


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
    bias, sinks = torch.randn(1, 4, L, L, requires_grad=True), torch.randn(1, 4, requires_grad=True)
    dense, seed, none = (
        torch.rand(1, 1, L, L) > 0.5,
        torch.tensor([5]),
        (None, None, None),
    )  # no slopes
    for tail in (
        (start, stop, None, bias, sinks, *none, None, 0.3, 2.0, 0.0, False),
        (None, None, dense, None, None, *none, seed, 0.3, None, 0.5, False),
        (start, stop, None, None, sinks, *none, None, 0.3, 2.0, 0.0, True),
        (None, None, dense, None, None, *none, None, 0.3, None, 0.0, True),
        (start, stop, None, bias, None, *none, None, 0.3, 2.0, 0.0, True),
    ):
        kernels = tail[-1]
        torch.library.opcheck(blockwise.attend, (q, k, v, *tail, True, not kernels))
        plain = [x.detach() if isinstance(x, Tensor) else x for x in tail]
        out, lse, weights = (
            x.detach() for x in blockwise.attend(q, k, v, *tail, True, not kernels)
        )
        torch.library.opcheck(
            blockwise.attend_backward,
            (
                torch.ones_like(out),
                lse,
                None if kernels else weights,
                out,
                lse,
                q.detach(),
                k.detach(),
                v.detach(),
                *plain,
                plain[3] is not None,
            ),
        )


def test_shapes_without_numbers() -> None:
    q, k, v = (x.to("meta") for x in inputs())
    assert [
        x.shape for x in attention(q, k, v, causal(), return_lse=True, return_weights=True)
    ] == [(2, 4, L, 8), (2, 4, L), (2, 4, L, L)]
    assert multihead.ops.backend_for(q, k, v, causal()).backend == "sdpa"
