"""A bias told by slopes and positions: the same as the dense one on every backend, in torch's
machinery, and in the layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from multihead import Cache, MultiHeadAttention, WindowCache, attention
from multihead.layers import ALiBi, visible_keys
from multihead.masks import causal, intervals, padding, window
from multihead.ops import AlibiBias as AlibiBias
from multihead.ops import AttentionCall, backend_for
from multihead.ops.backends import cpu, custom_op, jit

BACKENDS = ["auto", "torch", "sdpa", "reference", *(["cpu"] if jit.MISSING is None else [])]
compiled = pytest.mark.skipif(jit.MISSING is not None, reason="without Numba there are no kernels")


def mask_of(name: str, g: torch.Generator, batch: int, heads: int, length: int, keys: int) -> Any:
    start = torch.randint(0, keys + 1, (batch, length), generator=g)
    return {
        "all": None,
        "causal": causal(keys - length),
        "window": window(left=4, right=2, offset=keys - length),
        "padding": (
            padding(torch.randint(0, keys + 1, (batch,), generator=g)) & causal(keys - length)
        ),
        "intervals": intervals(start, (start + 9).clamp(max=keys)),
        "dense": torch.rand(batch, heads, length, keys, generator=g) > 0.5,
        "numbers": torch.randn(keys, generator=g),
    }[name]


def made(
    g: torch.Generator,
    heads: int,
    length: int,
    keys: int,
    rows: tuple[int, ...] = (),
    columns: tuple[int, ...] = (),
    dtype: torch.dtype = torch.int64,
) -> AlibiBias:
    low = -60 if dtype.is_signed else 0
    return AlibiBias(
        torch.randn(heads, generator=g),
        torch.randint(low, 60, (*rows, length), generator=g).to(dtype),
        torch.randint(low, 60, (*columns, keys), generator=g).to(dtype),
    )


def inputs(batch: int = 2, length: int = 9, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(batch * 100 + length)
    return [
        torch.randn(batch, n, length, 8, generator=g, dtype=dtype, requires_grad=True)
        for n in (4, 2, 2)
    ]


MASKS = ("all", "causal", "window", "padding", "intervals", "dense", "numbers")
sizes: dict[str, Any] = {
    "seed": st.integers(0, 2**31),
    "mask_name": st.sampled_from(MASKS),
    "batch": st.integers(1, 3),
    "groups": st.integers(1, 3),
    "share": st.integers(1, 4),
    "length": st.one_of(st.integers(1, 20), st.integers(20, 90)),
    "keys": st.integers(1, 140),
    "softcap": st.sampled_from([None, 5.0]),
    "sunk": st.booleans(),
    "own": st.sampled_from(["none", "rows", "keys", "both", "one"]),
}


def whose(own: str, batch: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    many = (batch,)
    return {
        "none": ((), ()),
        "rows": (many, ()),
        "keys": ((), many),
        "both": (many, many),
        "one": ((1,), many),
    }[own]


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40, deadline=None)
@given(
    **sizes,
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    whole=st.sampled_from([torch.int64, torch.int32, torch.uint8]),
)
def test_equals_the_dense_bias(
    backend: str,
    seed: int,
    mask_name: str,
    batch: int,
    groups: int,
    share: int,
    length: int,
    keys: int,
    softcap: float | None,
    sunk: bool,
    own: str,
    dtype: torch.dtype,
    whole: torch.dtype,
) -> None:
    g = torch.Generator().manual_seed(seed)
    heads = groups * share
    q, k, v = (
        torch.randn(batch, n, m, 12, generator=g).to(dtype)
        for n, m in ((heads, length), (groups, keys), (groups, keys))
    )
    mask = mask_of(mask_name, g, batch, heads, length, keys)
    slopes = made(g, heads, length, keys, *whose(own, batch), dtype=whole)
    options: dict[str, Any] = {
        "softcap": softcap,
        "sinks": torch.randn(heads, generator=g) if sunk else None,
    }
    if backend == "sdpa":
        options = {}
    bias, inner = slopes.dense(torch.float64), mask
    if mask_name == "numbers":
        bias, inner = bias + mask, None
    want = attention(q, k, v, inner, bias=bias, **options, backend="reference")
    got = attention(q, k, v, mask, bias=slopes, **options, backend=backend)
    limits = {
        torch.float32: (1e-4, 2e-5),
        torch.float64: (1e-9, 1e-10),
        torch.bfloat16: (2e-2, 2e-2),
    }[dtype]
    torch.testing.assert_close(got, want, rtol=limits[0], atol=limits[1])


@compiled
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("share", [1, 4])
def test_decoding(rows: int, share: int) -> None:
    """Few rows against a cache of several chunks, in which the keys of the second text lie at other
    places.
    """
    g = torch.Generator().manual_seed(rows * share)
    keys = 3 * cpu.CHUNK + 5
    q, k, v = (
        torch.randn(2, n, m, 64, generator=g) for n, m in ((2 * share, rows), (2, keys), (2, keys))
    )
    at, key_at = (
        torch.arange(keys - rows, keys),
        torch.stack([torch.arange(keys), torch.arange(keys).roll(700)]),
    )
    slopes = AlibiBias(ALiBi(2 * share).slopes, at, key_at)
    for mask in (None, causal(keys - rows) & window(left=900, offset=keys - rows)):
        want = attention(
            q.double(), k.double(), v.double(), mask, bias=slopes.dense(), backend="reference"
        )
        torch.testing.assert_close(
            attention(q, k, v, mask, bias=slopes, backend="cpu").double(),
            want,
            rtol=1e-5,
            atol=2e-6,
        )


@pytest.mark.parametrize("backend", [x for x in BACKENDS if x in ("torch", "cpu")])
@settings(max_examples=25, deadline=None)
@given(**sizes)
def test_gradients_are_those_with_the_dense_bias(
    backend: str,
    seed: int,
    mask_name: str,
    batch: int,
    groups: int,
    share: int,
    length: int,
    keys: int,
    softcap: float | None,
    sunk: bool,
    own: str,
) -> None:
    g = torch.Generator().manual_seed(seed)
    heads = groups * share
    used = [
        torch.randn(*shape, generator=g, dtype=torch.float64, requires_grad=True)
        for shape in (
            (batch, heads, length, 12),
            (batch, groups, keys, 12),
            (batch, groups, keys, 12),
            *([(heads,)] if sunk else []),
        )
    ]
    mask, slopes = (
        mask_of(mask_name, g, batch, heads, length, keys),
        made(g, heads, length, keys, *whose(own, batch)),
    )
    found = []
    for bias, by in ((slopes.dense(torch.float64), "torch"), (slopes, backend)):
        out, lse = attention(
            *used[:3],
            mask,
            bias=bias,
            softcap=softcap,
            sinks=used[3] if sunk else None,
            return_lse=True,
            backend=by,
        )
        loss = (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum() + lse.masked_fill(
            lse.isneginf(), 0
        ).sin().sum()
        found.append(torch.autograd.grad(loss, used))
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("given", [{"dropout": 0.5}, {"return_weights": True}], ids=str)
def test_what_the_kernels_have_not(given: dict[str, Any]) -> None:
    x, at = inputs(), torch.arange(9)
    slopes = AlibiBias(ALiBi(4).slopes, at, at)
    found = []
    for bias in (slopes, slopes.dense()):
        torch.manual_seed(0)
        got = attention(*x, causal(), bias=bias, **given)
        loss = sum(part.square().sum() for part in (got if isinstance(got, tuple) else (got,)))
        found.append([loss, *torch.autograd.grad(loss, x)])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=compiled)])
def test_the_operator_takes_both_kinds_of_bias(kernels: bool) -> None:
    """Whatever the flag, and where the log-sum-exp that the kernels' gradients need is missing."""
    q, k, v = inputs(dtype=torch.float64)
    at = torch.arange(9)[None]
    slopes = ALiBi(4).slopes.double()
    bias = torch.randn(1, 4, 9, 9, dtype=torch.float64, requires_grad=True)
    dense = AlibiBias(slopes, at, at).dense(torch.float64)
    rest = (None, kernels, False, False)
    for add in (None, bias):
        learned = [x for x in (q, k, v, add) if x is not None]
        call = AttentionCall(q, k, v, bias=add, scale=0.3)
        sloped = call._replace(slopes=slopes, query_pos=at, key_pos=at)
        got = custom_op.attend(*sloped[:-1], *rest)[0]
        both = call._replace(bias=dense if add is None else add + dense)
        want = custom_op.attend(*both[:-1], *rest)[0]
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(
            torch.autograd.grad(got.square().sum(), learned),
            torch.autograd.grad(want.square().sum(), learned),
        )


def test_nothing_of_all_queries_and_keys_is_kept_for_the_gradients() -> None:
    x = inputs(1, 50)
    at, kept = torch.arange(50), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        attention(*x, bias=AlibiBias(ALiBi(4).slopes, at, at), backend="torch")
    assert kept and max(kept) < 50 * 50


def test_float64_is_not_rounded_on_the_way() -> None:
    q, k, v = inputs(1, 9, torch.float64)
    at = torch.arange(9) * 1_000_003
    slopes = AlibiBias(torch.tensor([1e-6, 3e-6, 1e-7, 0.0], dtype=torch.float64), at, at)
    bias = -slopes.slopes[:, None, None] * (at - at[:, None]).abs()
    assert (
        slopes.dense().dtype == torch.float32 and slopes.dense(torch.float64).dtype == torch.float64
    )
    for backend in BACKENDS:
        got, want = (
            attention(*(x.detach() for x in (q, k, v)), bias=add, backend=backend)
            for add in (slopes, bias)
        )
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


def test_the_choice_is_that_of_a_dense_bias() -> None:
    at = torch.arange(9)
    slopes = AlibiBias(ALiBi(4).slopes.bfloat16(), at, at)
    for mask in (None, causal(), torch.rand(9, 9) > 0.5):
        for more in ({}, {"softcap": 2.0}):
            assert backend_for(*inputs(), mask, bias=slopes, **more) == backend_for(
                *inputs(), mask, bias=slopes.dense(), **more
            )
    halves, elsewhere = (
        [x.bfloat16().to("meta") for x in inputs()],
        AlibiBias(*(x.to("meta") for x in (slopes.slopes, at, at))),
    )
    choice = backend_for(*halves, bias=elsewhere)
    assert "would round the bias" in choice.reason and choice == backend_for(
        *halves, bias=elsewhere.dense()
    )


# torch's machinery


def losses(backend: str) -> Callable[..., Tensor]:
    def loss(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, at: Tensor, key_at: Tensor) -> Tensor:
        return (
            attention(q, k, v, causal(), bias=AlibiBias(slopes, at, key_at), backend=backend)
            .square()
            .sum()
        )

    return loss


machines = pytest.mark.parametrize(
    "backend", ["auto", "torch", pytest.param("cpu", marks=compiled)]
)


@machines
def test_vmap(backend: str) -> None:
    many = [torch.stack([x, x + 1, 2 * x]).detach().requires_grad_() for x in inputs()]
    slopes, at = torch.rand(3, 4), torch.randint(0, 50, (3, 9))
    key_at = torch.randint(0, 50, (2, 3, 9))

    def f(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, at: Tensor, key_at: Tensor) -> Tensor:
        return attention(q, k, v, causal(), bias=AlibiBias(slopes, at, key_at), backend=backend)

    for dims in ((0, 0, 1), (None, None, 1), (0, None, None), (None, 0, None)):
        given = [
            x if dim is not None else x.select(d, 0)
            for x, dim, d in zip((slopes, at, key_at), dims, (0, 0, 1))
        ]
        one_by_one = [
            [x if dim is None else x.select(dim, i) for x, dim in zip(given, dims)]
            for i in range(3)
        ]
        want = torch.stack([f(*x, *rest) for x, rest in zip(zip(*many), one_by_one)])
        got = torch.vmap(f, in_dims=(0, 0, 0, *dims))(*many, *given)
        torch.testing.assert_close(got, want)
        want_grad = torch.autograd.grad(want.square().sum(), many)
        for a, b in zip(torch.autograd.grad(got.square().sum(), many), want_grad):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        by_func = torch.vmap(
            torch.func.grad(losses(backend), argnums=(0, 1, 2)), in_dims=(0, 0, 0, *dims)
        )
        for a, b in zip(by_func(*(x.detach() for x in many), *given), want_grad):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@machines
def test_vmap_over_positions_alone(backend: str) -> None:
    q, k, v = inputs()
    at = torch.stack([torch.arange(9), torch.arange(9) * 3])
    slopes = ALiBi(4).slopes
    got = torch.vmap(
        lambda at: attention(q, k, v, bias=AlibiBias(slopes, at, at), backend=backend)
    )(at)
    want = torch.stack(
        [attention(q, k, v, bias=AlibiBias(slopes, x, x), backend=backend) for x in at]
    )
    torch.testing.assert_close(got, want)
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (got, want))):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@machines
def test_compiled_without_a_break(backend: str) -> None:
    torch._dynamo.reset()
    slopes, at = ALiBi(4).slopes, torch.arange(9)
    f = torch.compile(losses(backend), fullgraph=True, backend="aot_eager")
    whole = torch.compile(
        lambda q, k, v, s: attention(q, k, v, bias=s, backend=backend),
        fullgraph=True,
        backend="aot_eager",
    )
    for step in (1, 2):
        x, given = inputs(), (slopes, at * step, at)
        got, want = f(*x, *given), losses(backend)(*x, *given)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(torch.autograd.grad(got, x), torch.autograd.grad(want, x))
        s = AlibiBias(*given)
        torch.testing.assert_close(whole(*x, s), attention(*x, bias=s, backend=backend))


@machines
def test_exported_for_any_batch_and_length(backend: str) -> None:
    class Module(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            at = torch.arange(q.shape[2])
            return attention(
                q,
                k,
                v,
                causal(),
                bias=AlibiBias(torch.tensor([0.5, 0.25, 0.2, 0.1]), at, at),
                backend=backend,
            )

    axes = {0: torch.export.Dim("B"), 2: torch.export.Dim("L")}
    graph = torch.export.export(Module(), tuple(inputs()), dynamic_shapes=(axes,) * 3).module()
    for batch, length in ((1, 1), (3, 17), (2, 4)):
        x = inputs(batch, length)
        got, want = graph(*x), Module()(*x)
        torch.testing.assert_close(got, want)
        for a, b in zip(*(torch.autograd.grad(y.square().sum(), x) for y in (got, want))):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=compiled)])
def test_torchs_checks_of_an_operator(kernels: bool) -> None:
    q, k, v = inputs()
    at, sinks = torch.arange(9).expand(2, 9), torch.randn(4, requires_grad=True)
    call = AttentionCall(
        q,
        k,
        v,
        sinks=sinks,
        slopes=ALiBi(4).slopes,
        query_pos=at,
        key_pos=at[:1],
        scale=0.3,
        softcap=2.0,
    )
    inputs_of = (*call[:-1], None, kernels)
    torch.library.opcheck(custom_op.attend, (*inputs_of, True, not kernels))
    plain = [x.detach() if isinstance(x, Tensor) else x for x in inputs_of]
    out, lse, weights = (x.detach() for x in custom_op.attend(*plain, True, not kernels))
    torch.library.opcheck(
        custom_op.attend_backward,
        (torch.ones_like(out), lse, None if kernels else weights, out, lse, *plain, False),
    )


# the layer


class Dense(ALiBi):
    """One of a user's own, whose numbers the layer has to ask for."""


@compiled
@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize(
    "case",
    [
        "plain",
        "valid",
        "cache",
        "ragged",
        "window",
        "cross",
        "weights",
        "bias",
        "slopes",
        "numbers",
    ],
)
def test_the_layer_is_as_with_the_dense_bias(
    monkeypatch: pytest.MonkeyPatch, heads: int, case: str
) -> None:
    monkeypatch.setattr(cpu, "ENOUGH", 0)
    torch.manual_seed(0)
    layer, x, found = (
        MultiHeadAttention(heads * 4, heads, num_kv_heads=2),
        torch.randn(2, 9, heads * 4),
        [],
    )
    bias = torch.randn(heads, 9, 9)
    given: dict[str, Any] = {
        "valid": {"valid": torch.arange(9) < torch.tensor([[9], [5]])},
        "weights": {"return_weights": True},
        "cross": {
            "key": torch.randn(2, 13, heads * 4),
            "position_ids": torch.arange(9) * 2 + torch.tensor([[0], [3]]),
        },
        "bias": {"attn_bias": bias},
        "numbers": {"mask": bias},
        "slopes": {"attn_bias": AlibiBias(torch.rand(heads), torch.arange(9), torch.arange(9))},
    }.get(case, {})
    given = {"mask": causal()} | given if case != "cross" else given
    asked = []
    right = visible_keys.attention
    monkeypatch.setattr(
        visible_keys,
        "attention",
        lambda *x, **more: asked.append(type(more["bias"])) or right(*x, **more),
    )
    for kind in (ALiBi, Dense):
        layer.positions = kind(heads)
        if kind is Dense and isinstance(given.get("attn_bias"), (Tensor, AlibiBias)):
            add, at, layer.positions = given["attn_bias"], torch.arange(9), None
            given["attn_bias"] = (add.dense() if isinstance(add, AlibiBias) else add) + ALiBi(
                heads
            )(at, at)
        if case in ("cache", "ragged", "window"):
            cache = WindowCache(left=3, sinks=1) if case == "window" else Cache()
            valid = torch.arange(5) >= torch.tensor([[0], [2]]) if case == "ragged" else None
            steps = [layer(x[:, :5], mask=causal(), cache=cache, valid=valid)]
            if valid is not None:
                steps[0] = steps[0].masked_fill(~valid[..., None], 0)
            got = [
                torch.cat(
                    [
                        *steps,
                        *(layer(x[:, i : i + 1], mask=causal(), cache=cache) for i in range(5, 9)),
                    ],
                    1,
                )
            ]
        else:
            out = layer(x, **given)
            got = list(out) if isinstance(out, tuple) else [out]
        found.append(
            [
                *got,
                *torch.autograd.grad(
                    got[0].square().sum(), list(layer.parameters()), retain_graph=True
                ),
            ]
        )
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert (
        asked[0] is (Tensor if case in ("bias", "numbers", "slopes") else AlibiBias)
        and asked[-1] is Tensor
    )


def test_hooks_on_alibi_see_and_change_its_numbers() -> None:
    layer, x = MultiHeadAttention(8, 2, positions=ALiBi(2)), torch.randn(1, 5, 8)
    want = MultiHeadAttention.forward(
        layer, x, attn_bias=-layer.positions(torch.arange(5), torch.arange(5))
    )
    seen: list[Any] = []
    layer.positions.register_forward_hook(
        lambda module, args, out: seen.append(out.shape) or 0 * out
    )
    torch.testing.assert_close(layer(x), want)
    assert seen == [(1, 2, 5, 5)]


def test_the_layer_compiles_and_maps() -> None:
    torch._dynamo.reset()
    layer, x = MultiHeadAttention(8, 2, positions=ALiBi(2)), torch.randn(3, 2, 5, 8)
    f = torch.compile(lambda x: layer(x, mask=causal()), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(f(x[0]), layer(x[0], mask=causal()))
    want = torch.stack([layer(y, mask=causal()) for y in x])
    torch.testing.assert_close(torch.vmap(lambda x: layer(x, mask=causal()))(x), want)


@given(
    heads=st.integers(1, 12),
    batch=st.integers(1, 2),
    length=st.integers(0, 5),
    keys=st.integers(0, 5),
    whole=st.sampled_from([torch.int64, torch.int16, torch.uint8]),
)
def test_dense_is_alibis_own(
    heads: int, batch: int, length: int, keys: int, whole: torch.dtype
) -> None:
    alibi = ALiBi(heads)
    at, key_at = (
        torch.randint(0, 200, (batch, length), dtype=whole),
        torch.randint(0, 200, (keys,), dtype=whole),
    )
    want = alibi(at, key_at)
    for slopes in (AlibiBias(alibi.slopes, at, key_at), alibi.to_alibi(at, key_at)):
        got = slopes.dense()
        assert got.dtype == torch.float32 and got.shape == want.shape and torch.equal(got, want)


# wrong arguments

S, I, J = torch.tensor([0.5, 0.25]), torch.arange(3), torch.arange(4)
Q, K = torch.randn(2, 2, 3, 8), torch.randn(2, 1, 4, 8)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (
            lambda: AlibiBias([0.5], I, J),
            TypeError,
            ["slopes is a list", "expected a tensor", "torch.tensor(slopes)"],
        ),
        (
            lambda: AlibiBias(S, {0, 1, 2}, J),
            TypeError,
            ["query_positions is a set", "expected integers [L] or [B, L]", "a list"],
        ),
        (lambda: AlibiBias(S, I, None), TypeError, ["key_positions is a NoneType", "[S]"]),
        (
            lambda: AlibiBias(S.long(), I, J),
            TypeError,
            ["slopes is torch.int64", "expected floating", "slopes.float()"],
        ),
        (lambda: AlibiBias(S[None], I, J), ValueError, ["slopes[1, 2]", "expected [H]"]),
        (lambda: AlibiBias(S[0], I, J), ValueError, ["slopes[]", "expected [H]"]),
        (
            lambda: AlibiBias(S.clone().requires_grad_(), I, J),
            ValueError,
            ["slopes[2]", "slopes.detach()", "dense bias"],
        ),
        (
            lambda: AlibiBias(S, I.float(), J),
            TypeError,
            ["query_positions is torch.float32", "integers", "query_positions.long()"],
        ),
        (
            lambda: AlibiBias(S, I, J > 1),
            TypeError,
            ["key_positions is torch.bool", "integers", "key_positions.long()"],
        ),
        (
            lambda: AlibiBias(S, I.view(1, 1, 3), J),
            ValueError,
            ["query_positions[1, 1, 3]", "expected [L] or [B, L]"],
        ),
        (lambda: AlibiBias(S, I, J[0]), ValueError, ["key_positions[]", "expected [S] or [B, S]"]),
        (
            lambda: AlibiBias(S, I.expand(2, 3), J.expand(5, 4)),
            ValueError,
            ["query_positions[2, 3]", "key_positions[5, 4]", "one batch size", "pass positions"],
        ),
        (
            lambda: AlibiBias(S, I, J.to("meta")),
            ValueError,
            ["cpu and meta", "one device", "key_positions.to('cpu')"],
        ),
        (
            lambda: attention(Q, K, K, bias=AlibiBias(S[:1], I, J)),
            ValueError,
            ["bias: slopes[1]", "q[2, 2, 3, 8]", "the 2 query heads"],
        ),
        (
            lambda: attention(Q, K, K, bias=AlibiBias(S, I[:2], J)),
            ValueError,
            ["bias: query_positions[1, 2]", "the 3 queries"],
        ),
        (
            lambda: attention(Q, K, K, bias=AlibiBias(S, I, I)),
            ValueError,
            ["key_positions[1, 3]", "k[2, 1, 4, 8]", "the 4 keys"],
        ),
        (
            lambda: attention(Q, K, K, bias=AlibiBias(S, I.expand(3, 3), J)),
            ValueError,
            ["query_positions[3, 3]", "batch of 3", "one of 2", "for each batch element"],
        ),
        (
            lambda: attention(Q, K, K, bias=AlibiBias(S, I.to("meta"), J.to("meta"))),
            ValueError,
            ["on meta", "q is on cpu"],
        ),
        (
            lambda: attention(Q, K, K, bias=[1.0]),
            TypeError,
            ["bias is a list", "tensor of floating numbers", "AlibiBias"],
        ),
    ],
)
def test_words_of_errors(
    make: Callable[[], object], error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error, match=".*".join(map(re.escape, words))):
        make()


def test_says_what_it_is() -> None:
    assert (
        repr(AlibiBias(S, I, J))
        == "AlibiBias(slopes[2], query_positions[1, 3], key_positions[1, 4])"
    )
