"""The public operator: equal to the reference for every input, its errors, the choice of a backend,
and user-defined backends.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import multihead
from multihead import attention
from multihead.errors import MultiheadError
from multihead.masks import causal, documents, padding, prefix, window
from multihead.ops import AttentionCall, AttentionOutput, backend_for
from multihead.ops.backends import jit

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}

DTYPES = list(TOLERANCE)


@st.composite
def problems(draw: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Awkward sizes: grouped heads, L off S, widths that aren't powers of two, every kind of mask,
    extras or none.
    """
    groups, repeat = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads, batch = groups * repeat, draw(st.integers(1, 2))
    length, keys = draw(st.integers(1, 37)), draw(st.integers(1, 53))
    width, value = draw(st.sampled_from([1, 4, 5, 12])), draw(st.sampled_from([1, 3, 8]))
    seed = draw(st.integers(0, 2**31))
    g = torch.Generator().manual_seed(seed)
    shape = lambda *s: 2 * torch.randn(*s, generator=g, dtype=torch.float64)  # noqa: E731
    tensors = dict(
        q=shape(batch, heads, length, width),
        k=shape(batch, groups, keys, width),
        v=shape(batch, groups, keys, value),
    )
    offset = draw(st.integers(0, keys))
    mask: Any = draw(st.sampled_from(["none", "causal", "window", "padding", "dense", "all off"]))
    mask = {
        "none": None,
        "causal": multihead.masks.causal(offset),
        "window": (
            multihead.masks.causal(offset)
            & multihead.masks.window(left=draw(st.integers(0, 9)), offset=offset)
        ),
        "padding": (
            multihead.masks.padding(torch.randint(0, keys + 1, (batch,), generator=g))
            & multihead.masks.causal(offset)
        ),
        "dense": (
            torch.rand(batch, draw(st.sampled_from([1, heads])), length, keys, generator=g) > 0.4
        ),
        "all off": torch.zeros(1, 1, length, keys, dtype=torch.bool),
    }[mask]
    options: dict[str, Any] = {"mask": mask}
    if draw(st.booleans()):
        options["bias"] = shape(1, heads, length, keys)
    if draw(st.booleans()):
        options["softcap"] = 1.5
    if draw(st.booleans()):
        options["sinks"] = shape(heads)
    if draw(st.booleans()):
        options["scale"] = 0.7
    return tensors, options


def to(dtype: torch.dtype, tensors: dict[str, Any]) -> dict[str, Any]:
    return {
        k: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in tensors.items()
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(problem=problems())
@settings(max_examples=60)
def test_equals_the_reference(dtype: torch.dtype, problem: Any) -> None:
    tensors, options = to(dtype, problem[0]), to(dtype, problem[1])
    want = multihead.attention(
        **tensors, **options, return_lse=True, return_weights=True, backend="reference"
    )
    got = multihead.attention(
        **tensors, **options, return_lse=True, return_weights=True, backend="torch"
    )
    plain = multihead.attention(**tensors, **options)
    for name, a, b in (
        *zip(("out", "lse", "weights"), want, got, strict=True),
        ("plain", want[0], plain),
    ):
        assert a.shape == b.shape and a.dtype == b.dtype, name
        finite = a.isfinite()
        assert torch.equal(finite, b.isfinite()), name
        scale = max(1.0, float(a[finite].abs().max())) if finite.any() else 1.0
        assert torch.allclose(
            a[finite].double(), b[finite].double(), atol=TOLERANCE[dtype] * scale, rtol=0
        ), name


def test_a_row_with_nothing_to_read_is_zero_with_finite_gradients() -> None:
    q, k, v = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3))
    out, weights = multihead.attention(
        q, k, v, multihead.masks.padding(torch.tensor([0])), return_weights=True
    )
    assert not out.any() and not weights.any()
    out.sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))


def test_weights_are_those_before_dropout_and_dropout_keeps_the_mean() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 6, 8), torch.randn(1, 1, 6, 8)
    many = [multihead.attention(q, k, v, dropout=0.5, return_weights=True) for _ in range(3000)]
    assert torch.allclose(many[0][1].sum(-1), torch.ones(1, 1, 1), atol=1e-6)
    mean = torch.stack([m[0] for m in many]).mean(0)
    assert torch.allclose(mean, multihead.attention(q, k, v), atol=0.1)
    assert not torch.equal(many[0][0], many[1][0])


def test_what_is_asked_for_does_not_change_the_output() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 33, 16), torch.randn(2, 2, 33, 16), torch.randn(2, 2, 33, 16)
    plain = multihead.attention(q, k, v, multihead.masks.causal())
    for asked in ({"return_lse": True}, {"return_weights": True}):
        assert torch.allclose(
            plain, multihead.attention(q, k, v, multihead.masks.causal(), **asked)[0], atol=1e-6
        )


def test_strides_do_not_matter() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(9, 2, 4, 8).transpose(0, 2) for _ in range(3))
    k = k[:, :1].expand(-1, 2, -1, -1)
    for mask in (None, multihead.masks.causal(), torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()):
        want = multihead.attention(q.contiguous(), k.contiguous(), v.contiguous(), mask)
        assert torch.allclose(multihead.attention(q, k, v, mask), want, atol=1e-6)


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
@pytest.mark.parametrize(("batch", "length", "keys"), [(0, 3, 3), (2, 0, 3), (2, 3, 0), (0, 0, 0)])
def test_zero_lengths(backend: str, batch: int, length: int, keys: int) -> None:
    q, k, v = (
        torch.randn(batch, 4, length, 4),
        torch.randn(batch, 2, keys, 4),
        torch.randn(batch, 2, keys, 3),
    )
    masks: list[Any] = [
        None,
        multihead.masks.causal(),
        multihead.masks.causal() & multihead.masks.window(left=1),
        multihead.masks.prefix(2),
        multihead.masks.padding(torch.full((batch,), keys)),
        torch.ones(length, keys, dtype=torch.bool),
        multihead.masks.documents(torch.zeros(batch, keys, dtype=torch.int64)),
    ]
    for mask in masks:
        for options in ({}, {"bias": torch.zeros(4, length, keys)}, {"sinks": torch.zeros(4)}):
            options = options | {"backend": backend}
            out, lse, weights = multihead.attention(
                q, k, v, mask, **options, return_lse=True, return_weights=True
            )
            assert (
                out.shape == (batch, 4, length, 3)
                and weights.shape == (batch, 4, length, keys)
                and lse.shape == out.shape[:3]
            )
            assert multihead.attention(q, k, v, mask, **options).shape == out.shape
            assert not out.any()
    if backend != "reference":
        x = [t.requires_grad_() for t in (q, k, v)]
        out = multihead.attention(*x, multihead.masks.causal(), backend=backend)
        assert not any(g.any() for g in torch.autograd.grad(out.sum(), x))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"q": torch.zeros(2, 8, 4)}, ValueError, ["q[2, 8, 4]", "[B, H, L, E]", "split_heads"]),
        (
            {"q": torch.zeros(1, 3, 5, 4)},
            ValueError,
            ["3 query heads", "2 key/value heads", "multiple"],
        ),
        ({"k": torch.zeros(1, 2, 5, 6)}, ValueError, ["k[1, 2, 5, 6]", "head width"]),
        ({"v": torch.zeros(1, 2, 4, 4)}, ValueError, ["v[1, 2, 4, 4]", "length"]),
        (
            {"q": torch.zeros(1, 4, 5, 4, dtype=torch.float64)},
            TypeError,
            ["float64", "float32", "one floating dtype"],
        ),
        ({"q": [[1.0]]}, TypeError, ["q is a list", "tensor"]),
        ({"q": torch.zeros(1, 0, 5, 4)}, ValueError, ["0 query heads", "multiple"]),
        (
            {n: torch.zeros(1, 2, 5, 4, dtype=torch.complex64) for n in "qkv"},
            TypeError,
            ["complex64", "bfloat16"],
        ),
        (
            {"mask": torch.ones(5, 5, dtype=torch.int64)},
            TypeError,
            ["int64", "bool", "~mask.bool()"],
        ),
        ({"mask": torch.ones(5, 5)}, ValueError, ["mask[5, 5]", "only 0 and 1", "mask.bool()"]),
        ({"mask": torch.full((4, 5), 0.5)}, ValueError, ["bias[4, 5]", "[1, 4, 5, 5]"]),
        ({"backend": "flex"}, ValueError, ["backend='flex'", "CUDA", "cpu", "backend='auto'"]),
        (
            {"backend": "sdpa", "return_weights": True, "sinks": torch.zeros(4)},
            ValueError,
            ["sinks", "weights"],
        ),
        (
            {"backend": "sdpa", **{n: torch.zeros(1, 4, 5, 4).half() for n in "qkv"}},
            ValueError,
            ["float16", "'auto'"],
        ),
        ({"mask": torch.ones(4, 5, dtype=torch.bool)}, ValueError, ["mask[4, 5]", "[1, 4, 5, 5]"]),
        ({"mask": "causal"}, TypeError, ["str", "causal()"]),
        (
            {"mask": multihead.masks.padding(torch.tensor([1, 2, 3]))},
            ValueError,
            ["batch of 3", "one of 1"],
        ),
        (
            {"mask": multihead.masks.intervals(*torch.zeros(2, 1, 4, dtype=torch.int64))},
            ValueError,
            ["[1, 4]", "[1, 5]"],
        ),
        ({"bias": torch.ones(5, 5, dtype=torch.bool)}, TypeError, ["bias", "mask="]),
        ({"bias": torch.ones(3, 5, 5)}, ValueError, ["bias[3, 5, 5]", "[1, 4, 5, 5]"]),
        ({"sinks": torch.zeros(2)}, ValueError, ["sinks[2]", "4 query heads"]),
        ({"dropout": 1.0}, ValueError, ["dropout=1.0", "below 1"]),
        ({"scale": float("nan")}, ValueError, ["scale=nan", "finite"]),
        ({"softcap": 0.0}, ValueError, ["softcap=0.0", "above 0"]),
        ({"backend": "cuda"}, ValueError, ["'cuda'", "reference"]),
        ({"backend": "sdpa", "softcap": 1.0}, ValueError, ["sdpa", "soft cap", "backend='auto'"]),
        ({"backend": "reference", "dropout": 0.1}, ValueError, ["reference", "dropout", "torch"]),
    ],
)
def test_words(change: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    fine: dict[str, Any] = dict(
        q=torch.zeros(1, 4, 5, 4), k=torch.zeros(1, 2, 5, 4), v=torch.zeros(1, 2, 5, 4)
    )
    with pytest.raises(error) as caught:
        multihead.attention(**(fine | change))
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"mask": multihead.masks.causal()},
        {"bias": torch.eye(6)},
        {"scale": 3.0},
        {"softcap": 0.5},
        {"sinks": torch.ones(4)},
        {"dropout": 0.5},
    ],
    ids=str,
)
def test_every_argument_changes_the_output(change: dict[str, Any]) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    assert (
        multihead.attention(q, k, v, **change) - multihead.attention(q, k, v)
    ).abs().max() > 1e-2


def test_the_worked_example_of_two_heads() -> None:
    """Two heads give the values 8 and 18; W_O = [[1, 1], [1, -1]] joins them into one update (26,
    -10).
    """
    q = torch.zeros(1, 2, 1, 1)
    v = torch.tensor([[[[6.0], [10.0]], [[12.0], [24.0]]]])  # read evenly: 8 and 18
    merged = multihead.ops.merge_heads(multihead.attention(q, torch.zeros(1, 2, 2, 1), v))
    assert merged.tolist() == [[[8.0, 18.0]]]
    w_o = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    assert (merged @ w_o).tolist() == [[[26.0, -10.0]]]
    one_by_one = sum(merged[..., h : h + 1] @ w_o[h : h + 1] for h in range(2))
    assert torch.equal(one_by_one, merged @ w_o)


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


class Doubled:
    """A user-defined backend: the definition, times two, of unmasked calls."""

    def __init__(self, *, complete: bool = True) -> None:
        self.complete, self.calls = complete, []

    def unsupported_reason(
        self, call: AttentionCall, *, return_lse: bool = False, return_weights: bool = False
    ) -> str | None:
        return None if call.is_unmasked() else "it computes unmasked calls alone"

    def forward(
        self, call: AttentionCall, *, return_lse: bool = False, return_weights: bool = False
    ) -> AttentionOutput:
        self.calls.append(call)
        s = call.scale * call.q @ call.k.mT
        weights = s.softmax(-1) if self.complete else None
        return AttentionOutput(2 * s.softmax(-1) @ call.v, s.logsumexp(-1), weights)


def test_a_backend_from_outside() -> None:
    x, backend = torch.randn(1, 2, 5, 4), Doubled()
    want, want_lse, want_weights = attention(x, x, x, return_lse=True, return_weights=True)
    out, lse, weights = attention(
        x, x, x, scale=0.5, return_lse=True, return_weights=True, backend=backend
    )
    torch.testing.assert_close((out, lse, weights), (2 * want, want_lse, want_weights))
    torch.testing.assert_close(attention(x, x, x, backend=backend), 2 * want)
    assert [call.scale for call in backend.calls] == [0.5, 0.5]
    with pytest.raises(MultiheadError, match=r"Doubled doesn't support.*unmasked calls alone"):
        attention(x, x, x, causal(), backend=backend)
    with pytest.raises(MultiheadError, match="Doubled returned no weights"):
        attention(x, x, x, return_weights=True, backend=Doubled(complete=False))
    with pytest.raises(TypeError, match=r"backend=3: expected one of auto.*unsupported_reason"):
        attention(x, x, x, backend=3)  # type: ignore[call-overload]
    with pytest.raises(MultiheadError, match="backend='flash': expected one of auto"):
        attention(x, x, x, backend="flash")
