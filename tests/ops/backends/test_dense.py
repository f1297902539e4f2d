"""vmap, torch.func, forward-mode and second derivatives, which take plain torch operations."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from multihead import attention
from multihead.masks import causal, documents, padding, prefix, window
from multihead.ops.backends import jit

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


@pytest.mark.skipif(jit.MISSING is not None, reason="without Numba there are no kernels")
def test_transforms_of_a_call_for_the_kernels() -> None:
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


@pytest.mark.parametrize("backend", ["auto", "torch", "cpu", "sdpa"])
@pytest.mark.parametrize("options", [{}, {"mask": causal()}, {"bias": True}], ids=str)
def test_second_derivatives_of_self_attention(options: dict[str, Any], backend: str) -> None:
    """One tensor is queries, keys and values; each has its own gradient. "auto" takes torch's fused
    kernels here, whose backward pass has no derivative."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(1, 2, 6, 4, generator=g, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(6, 6, generator=g, dtype=torch.float64, requires_grad="bias" in options)
    given: dict[str, Any] = {"bias": bias} if "bias" in options else options
    inputs = (x, bias) if "bias" in options else (x,)

    def definition() -> Tensor:
        s = x @ x.mT / 2 + (bias if "bias" in options else 0)
        if "mask" in options:
            s = s.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -torch.inf)
        return s.softmax(-1) @ x

    def both(out: Tensor) -> list[Tensor]:
        first = torch.autograd.grad(out.pow(3).sum(), inputs, create_graph=True)
        return [*first, *torch.autograd.grad(sum(y.square().sum() for y in first), inputs)]

    for got, want in zip(both(attention(x, x, x, **given, backend=backend)), both(definition())):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("backend", ["auto", "torch", "cpu", "sdpa"])
def test_torchs_checks_of_gradients(backend: str) -> None:
    """First and second derivatives, in forward mode and of batches of gradients."""
    g = torch.Generator().manual_seed(4)
    x = [torch.randn(1, 2, 4, 3, generator=g).double().requires_grad_() for _ in range(3)]
    f = functools.partial(attention, mask=causal(), backend=backend)
    assert torch.autograd.gradcheck(
        f, x, check_forward_ad=True, check_batched_grad=True, fast_mode=True
    )
    assert torch.autograd.gradgradcheck(f, x, fast_mode=True)


@pytest.mark.parametrize("backend", ["auto", "torch", "cpu", "sdpa"])
def test_transforms_of_functions(backend: str) -> None:
    g = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, 2, 4, 3, generator=g).double() for _ in range(3))

    def definition(q: Tensor) -> Tensor:
        return ((q @ k.mT / 3**0.5).softmax(-1) @ v).square().sum()

    def f(q: Tensor) -> Tensor:
        return attention(q, k, v, backend=backend).square().sum()

    for transform in (
        lambda a: torch.func.grad(a)(q),
        lambda a: torch.func.jacfwd(a)(q),
        lambda a: torch.func.jacrev(a)(q),
        lambda a: torch.func.hessian(a)(q),
        lambda a: torch.func.linearize(a, q)[1](k),
        lambda a: torch.func.vjp(a, q)[1](torch.ones((), dtype=torch.float64))[0],
        lambda a: torch.vmap(a)(torch.stack([q, k])),
        lambda a: torch.autograd.functional.hessian(a, q),
        lambda a: torch.autograd.functional.hessian(a, q, vectorize=True),
        lambda a: torch.autograd.functional.hvp(a, q, k)[1],
        lambda a: torch.autograd.functional.jacobian(a, q, vectorize=True, strategy="forward-mode"),
    ):
        torch.testing.assert_close(transform(f), transform(definition))
