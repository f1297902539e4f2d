"""Numbers that may be tensors: the right gradient, or an error that gives the way."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from math import nan
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import multihead
from multihead import MultiHeadAttention, attention
from multihead.errors import DeviceError, MultiheadError
from multihead.layers import TransformerBlock
from multihead.masks import causal, from_function, from_torch_mask, prefix, window
from multihead.ops import AttentionCall, backend_for, split_heads
from multihead.ops.backends import jit
from multihead.ops.numbers import add_biases, fold_scale, to_float
from small import llama

BACKENDS = ["torch", "sdpa", "auto", *([] if jit.MISSING else ["cpu"])]


def qkv(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(2, n, 6, 8, generator=g).to(dtype) for n in (4, 2, 2)]


def plain(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """The definition in operations that torch differentiates."""
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    s = (scale * q @ k.mT).masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -torch.inf)
    return torch.softmax(s, -1) @ v


SCALES = {
    "a number": torch.tensor(0.3),
    "one element": torch.tensor([[0.3]]),
    "one for each head": torch.tensor([0.3, 0.5, -0.2, 0.0]).view(4, 1, 1),
    "one for each query": torch.linspace(-1, 1, 6).view(6, 1),
    "one for each batch element": torch.tensor([0.3, 0.4]).view(2, 1, 1, 1),
    "zero": torch.tensor(0.0),
    "negative": torch.tensor(-0.3),
    "float64": torch.tensor(0.3, dtype=torch.float64),
    "half": torch.tensor(0.25, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SCALES)
def test_a_learned_scale_gets_its_gradient(name: str, backend: str) -> None:
    scale = torch.nn.Parameter(SCALES[name].clone())
    wide = scale.detach().double().requires_grad_()
    wanted = plain(*qkv(torch.float64), wide)
    for tracked in (False, True):
        q, k, v = (x.requires_grad_(tracked) for x in qkv())
        try:
            out = attention(q, k, v, causal(), scale=scale, backend=backend)
        except MultiheadError as error:
            if backend == "sdpa" and "scale above 0" in str(error):
                return
            raise
        torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=0)
        factors = torch.linspace(-1, 1, out.numel()).view(out.shape)
        got = torch.autograd.grad((out * factors).sum(), scale)[0]
        want = torch.autograd.grad((wanted * factors).sum(), wide, retain_graph=True)[0]
        assert got.dtype == scale.dtype and got.shape == scale.shape
        tolerance = 2e-2 if scale.dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_learned_scale_changes_no_value(dtype: torch.dtype) -> None:
    scale = torch.nn.Parameter(torch.tensor(0.3))
    for options in ({}, {"return_lse": True}, {"softcap": 2.0}, {"backend": "torch"}):
        for number in (scale, scale.detach()):
            got = attention(*qkv(dtype), causal(), scale=number, **options)  # type: ignore[call-overload]
            want = attention(*qkv(dtype), causal(), scale=scale.item(), **options)  # type: ignore[call-overload]
            if isinstance(got, tuple):
                got, want = got[0], want[0]
            assert got.requires_grad == isinstance(number, torch.nn.Parameter)
            assert torch.equal(got, want)
    with torch.no_grad():
        assert not attention(*qkv(dtype), scale=scale).requires_grad


def test_a_learned_scale_under_transforms() -> None:
    q, k, v = qkv(torch.float64)
    scale = torch.tensor(0.3, dtype=torch.float64)

    def loss(scale: Tensor) -> Tensor:
        return attention(q, k, v, causal(), scale=scale, backend="torch").pow(2).sum()

    leaf = scale.clone().requires_grad_()
    want = torch.autograd.grad(plain(q, k, v, leaf).pow(2).sum(), leaf)[0]
    torch.testing.assert_close(torch.func.grad(loss)(scale), want)
    torch.testing.assert_close(torch.func.jvp(loss, (scale,), (torch.ones_like(scale),))[1], want)
    many = torch.vmap(lambda s: attention(q, k, v, causal(), scale=s))(torch.stack([scale, -scale]))
    torch.testing.assert_close(many[1], attention(q, k, v, causal(), scale=-0.3))
    first = torch.autograd.grad(loss(leaf), leaf, create_graph=True)[0]
    second = torch.autograd.grad(first, leaf)[0]
    wanted = torch.autograd.grad(plain(q, k, v, leaf).pow(2).sum(), leaf, create_graph=True)[0]
    torch.testing.assert_close(second, torch.autograd.grad(wanted, leaf)[0])


def test_a_learned_scale_in_an_exported_graph() -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(0.3))

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, causal(), scale=self.scale)

    module = Module()
    graph = torch.export.export(module, tuple(qkv())).module()
    torch.testing.assert_close(graph(*qkv()), module(*qkv()))


NUMBERS: list[Any] = [
    2,
    2.0,
    np.float32(2),
    np.float64(2),
    np.int64(2),
    np.array(2.0),
    Decimal(2),
    Fraction(2),
    torch.tensor(2.0),
    torch.tensor(2),
    torch.tensor([2.0]),
    torch.tensor(2.0, dtype=torch.bfloat16),
]


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_numbers_of_any_kind(number: Any, backend: str) -> None:
    assert to_float("scale", number) == 2.0
    inputs = qkv()
    want = attention(*inputs, scale=2.0, backend=backend)
    assert torch.equal(attention(*inputs, scale=number, backend=backend), want)
    if backend != "sdpa":
        want = attention(*inputs, softcap=2.0, backend=backend)
        assert torch.equal(attention(*inputs, softcap=number, backend=backend), want)
    half = number / 4 if not isinstance(number, Tensor) else number.float() / 4
    assert AttentionCall.lower(*inputs, dropout=half).dropout == 0.5


WRONG: list[tuple[Any, type[Exception], str]] = [
    (torch.nn.Parameter(torch.tensor(0.5)), TypeError, "{name}.item()"),
    (torch.tensor([0.5, 0.5]), MultiheadError, "{name}[2]"),
    (torch.tensor(0.5j), TypeError, "complex64"),
    (torch.tensor(True), TypeError, "torch.bool"),
    (torch.tensor(0.5, device="meta"), TypeError, "{name}.item()"),
    ("0.5", TypeError, "{name}='0.5'"),
    (b"0.5", TypeError, "{name}=b'0.5'"),
    (True, TypeError, "{name}=True"),
    (np.bool_(True), TypeError, "{name}="),
    (0.5j, TypeError, "{name}=0.5j"),
    ([0.5], TypeError, "{name}=[0.5]"),
    (np.array([0.5]), TypeError, "{name}=array([0.5])"),
    (np.array("0.5"), TypeError, "{name}=array('0.5'"),
    (object, TypeError, "{name}=<class 'object'>"),
    (float("nan"), MultiheadError, "{name}=nan"),
    (float("inf"), MultiheadError, "{name}=inf"),
    (Decimal("NaN"), MultiheadError, "expected"),
    (torch.tensor(float("nan")), MultiheadError, "{name}=nan"),
    (-float("inf"), MultiheadError, "{name}=-inf"),
    (10**400, TypeError, "{name}=1000"),
]


@pytest.mark.parametrize("name", ["scale", "softcap", "dropout"])
@pytest.mark.parametrize(("number", "error", "words"), WRONG, ids=[repr(x[0])[:30] for x in WRONG])
def test_what_is_no_number(name: str, number: Any, error: type[Exception], words: str) -> None:
    if name == "scale" and isinstance(number, Tensor) and number.dtype == torch.float32:
        if number.requires_grad or number.is_meta:
            return  # a learned scale has a gradient
        words = words.replace("[2]", "[2] doesn't broadcast to [B, H, L, 1] = [2, 4, 6, 1]")
    for function in (attention, backend_for, AttentionCall.lower):
        with pytest.raises(error) as caught:
            function(*qkv(), **{name: number})  # type: ignore[operator]
        assert words.format(name=name) in str(caught.value), str(caught.value)
    if name != "scale":
        with pytest.raises((TypeError, MultiheadError), match=name):
            MultiHeadAttention(8, 2, **{name: number})


@pytest.mark.parametrize("scale", [1e39, -1e39, 10**39, torch.tensor(1e39, dtype=torch.float64)])
def test_a_scale_beyond_the_dtype_of_scores(scale: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(MultiheadError, match=r"at most 3\.4e"):
            attention(*qkv(dtype), scale=scale)
    assert attention(*qkv(torch.float64), scale=scale).isfinite().all()


def test_a_scale_of_several_numbers_must_be_finite() -> None:
    with pytest.raises(MultiheadError, match=r"scale\[4, 1, 1\]: expected finite"):
        fold_scale(qkv()[0], torch.tensor([1.0, torch.nan, 1.0, 1.0]).view(4, 1, 1))


COUNTS: dict[str, tuple[str, int, Callable[[Any], Any]]] = {
    "split_heads": ("num_heads", 1, lambda n: split_heads(torch.zeros(1, 2, 6), n)),
    "from_function rows": ("length", 0, lambda n: from_function(lambda b, h, i, j: i >= j, n, 3)),
    "from_function keys": ("keys", 0, lambda n: from_function(lambda b, h, i, j: i >= j, 3, n)),
    "from_function batch": (
        "batch",
        1,
        lambda n: from_function(lambda b, h, i, j: i >= j, 3, 3, batch=n),
    ),
    "from_torch_mask": (
        "num_heads",
        1,
        lambda n: from_torch_mask(torch.ones(6, 2, 2), num_heads=n),
    ),
    "dense rows": ("length", 0, lambda n: causal().dense(n, 3)),
    "dense keys": ("keys", 0, lambda n: causal().dense(3, n)),
    "bounds": ("length", 0, lambda n: causal().bounds(n, 3)),
    "prefix": ("n", -9, lambda n: prefix(n).dense(3, 3)),
    "offset": ("offset", -9, lambda n: causal(n).dense(3, 3)),
    "window": ("left", 0, lambda n: window(left=n).dense(3, 3)),
    "layer": ("num_heads", 1, lambda n: MultiHeadAttention(6, n)),
    "width": ("head_dim", 1, lambda n: MultiHeadAttention(6, 2, head_dim=n)),
    "hidden": ("hidden_dim", 1, lambda n: TransformerBlock(6, 2, hidden_dim=n)),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts(name: str) -> None:
    argument, least, use = COUNTS[name]
    for fine in (3, np.int64(3), np.uint8(3)):
        use(fine)
    for wrong in (3.0, 2.5, True, "3", torch.tensor(3.0), torch.tensor([3, 3, 3]).float(), nan):
        with pytest.raises(TypeError, match=argument):
            use(wrong)
    wrongs = [10**30] if name not in ("layer", "width", "hidden") else []
    for wrong in [*wrongs, *([least - 1] if least >= 0 else [])]:
        with pytest.raises(MultiheadError, match=argument):
            use(wrong)


def test_the_number_of_a_norm() -> None:
    for wrong in ("1e-6", True, torch.tensor(1e-6), float("nan"), -1e-6):
        with pytest.raises((TypeError, MultiheadError), match="norm_eps"):
            TransformerBlock(6, 2, hidden_dim=8, norm_eps=wrong)
    TransformerBlock(6, 2, hidden_dim=8, norm_eps=np.float32(1e-5))


def test_numbers_given_as_heads_to_ablate() -> None:
    with pytest.raises(TypeError, match="gates="):
        multihead.ablate_heads(llama(), {"L0.H0": 0.5}).__enter__()


def test_sums_of_biases_forbid_only_where_one_does() -> None:
    low, inf = torch.finfo(torch.float32).min, torch.inf
    a, b = torch.tensor([low, low, -inf, 1.0, inf]), torch.tensor([low, -inf, 0.0, 2.0, 0.0])
    assert add_biases(a, b).tolist() == [low, -inf, -inf, 3.0, inf]
    assert add_biases(a, torch.tensor([torch.nan] * 5)).isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"scale": 1 / 3}], ids=str)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_traced_scales_are_as_precise_as_the_inputs(
    backend: str, options: dict[str, float]
) -> None:
    if backend == "sdpa" and "softcap" in options:
        options = {}
    x = [t.double()[..., :7] for t in qkv()]  # a width whose root isn't a number of float32
    with torch.no_grad():
        traced = torch.jit.trace(lambda *x: attention(*x, backend=backend, **options), x)
    y = [t.flip(2) for t in x]
    torch.testing.assert_close(
        traced(*y), attention(*y, backend="reference", **options), rtol=0, atol=1e-12
    )


def test_scales_on_another_device() -> None:
    with pytest.raises(DeviceError, match="q on cpu and scale on meta"):
        attention(*qkv(), scale=torch.ones(4, 1, 1, device="meta"))


def test_scales_of_one_of_keys_and_values() -> None:
    q, k = torch.randn(1, 2, 3, 4), torch.ones(1, 2, 3, 4, dtype=torch.int8)
    with pytest.raises(MultiheadError, match="k_scale was given and v_scale wasn't: expected int8"):
        attention(q, k, q, k_scale=torch.ones(1, 2, 3))
    with pytest.raises(
        TypeError, match=r"k is torch\.uint8: expected int8; store numbers from -127"
    ):
        attention(q, k.byte(), k, k_scale=torch.ones(1, 2, 3), v_scale=torch.ones(1, 2, 3))
