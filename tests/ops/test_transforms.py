"""What torch makes of the operator: compiled and exported graphs, vmap, torch.func, autocast, its
own checks of operators.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import multihead
from multihead import attention
from multihead.masks import causal, documents, padding, prefix, window
from multihead.ops import AttentionCall
from multihead.ops.backends import custom_op, jit

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

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = attention(q, k, x, dropout=0.5).sum((0, 1, 3))
        return y, y

    jacobian, y = torch.func.jacrev(f, has_aux=True)(v)
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


def doubles() -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in inputs()]


def written_out(
    q: Tensor, k: Tensor, v: Tensor, softcap: float | None = None, **options: Any
) -> Tensor:
    """The definition by hand, with what the tests of second derivatives ask for."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = q @ k.mT * q.shape[-1] ** -0.5
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    s = s + options.get("bias", 0.0)
    if "mask" in options:
        s = s.masked_fill(~options["mask"].dense(L, L), -torch.inf)
    if "sinks" in options:
        s = torch.cat([s, options["sinks"][:, None, None].expand(*s.shape[:3], 1)], -1)
    return s.softmax(-1)[..., :L] @ v


SECOND: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 2.0, "mask": causal()},
    "sinks": {"sinks": torch.randn(4, generator=G).double(), "mask": causal()},
    "bias": {"bias": torch.randn(4, L, L, generator=G).double()},
    "window": {"mask": causal() & window(left=1)},
}
second = pytest.mark.parametrize("options", SECOND.values(), ids=SECOND)


@second
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_second_derivatives(options: dict[str, Any], backend: str) -> None:
    """By `create_graph`, by `torch.func` and by hand: gradients of a gradient's length."""
    if backend == "cpu" and jit.MISSING:
        pytest.skip(jit.MISSING)
    found = []
    for function in (partial(attention, backend=backend), written_out):
        x = doubles()
        first = torch.autograd.grad(total(function(*x, **options)), x, create_graph=True)
        found.append((*first, *torch.autograd.grad(sum(d.square().sum() for d in first), x)))

    def length(*x: Tensor) -> Tensor:
        of = torch.func.grad(lambda *y: total(attention(*y, **options, backend=backend)), (0, 1, 2))
        return total(of(*x))

    by_func = torch.func.grad(length, argnums=(0, 1, 2))(*(x.detach() for x in doubles()))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(by_func, found[1][3:], rtol=1e-9, atol=1e-9)


def test_second_derivatives_of_the_log_sum_exp_and_the_weights() -> None:
    x = [y.requires_grad_() for y in doubles()]
    valid = padding(torch.tensor([0, L]))  # one text of padding alone, whose gradients are 0
    torch.autograd.gradgradcheck(
        lambda *y: tuple(t[1:] for t in attention(*y, valid, return_lse=True, return_weights=True)),
        x,
    )
    out = attention(*x, valid, softcap=1.0)
    first = torch.autograd.grad(total(out), x, create_graph=True)
    second = torch.autograd.grad(total(first), x)
    assert all(y.isfinite().all() and not y[0].any() and y[1].any() for y in (*first, *second))


def test_second_derivatives_see_the_dropout_of_the_first_pass() -> None:
    """The output is linear in v, so the gradient of <grad_v, v> is the output's own."""
    q, k, v = doubles()
    for weights in (False, True):
        torch.manual_seed(0)
        result: Any = attention(q, k, v, causal(), dropout=0.5, return_weights=weights)
        out = result[0] if weights else result
        g = torch.randn_like(out, requires_grad=True)
        plain = torch.autograd.grad(out, v, g.detach(), retain_graph=True)[0]
        dv = torch.autograd.grad(out, v, g, create_graph=True)[0]
        torch.testing.assert_close(dv, plain)
        torch.testing.assert_close(torch.autograd.grad((dv * v.detach()).sum(), g)[0], out)


@second
def test_forward_mode(options: dict[str, Any]) -> None:
    """torch.func.jvp, jacfwd and dual numbers, against a difference of two outputs."""
    x, direction = [y.detach() for y in doubles()], [torch.randn_like(y) for y in doubles()]

    def f(*y: Tensor) -> Tensor:
        return attention(*y, **options)

    step = 1e-6
    ahead, behind = (f(*(a + s * b for a, b in zip(x, direction))) for s in (step, -step))
    want = (ahead - behind) / (2 * step)
    out, slope = torch.func.jvp(f, tuple(x), tuple(direction))
    torch.testing.assert_close(out, f(*x))
    torch.testing.assert_close(slope, want, rtol=1e-5, atol=1e-7)
    with torch.autograd.forward_ad.dual_level():
        dual = f(*map(torch.autograd.forward_ad.make_dual, x, direction))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, slope)
    jacobian = torch.func.jacfwd(f)(*x)
    torch.testing.assert_close(
        torch.tensordot(jacobian, direction[0], 4),
        torch.func.jvp(lambda q: f(q, *x[1:]), (x[0],), (direction[0],))[1],
    )
    torch.testing.assert_close(jacobian, torch.func.jacrev(f)(*x))


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
