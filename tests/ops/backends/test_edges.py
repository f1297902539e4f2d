"""Rows and sizes at the edge: every backend gives what the definition in float64 gives, in every
output and gradient.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multihead import attention
from multihead.errors import MultiheadError
from multihead.masks import causal, padding
from multihead.ops.backends import jit
from multihead.ops.backends.flex import FlexBackend
from oracles.definition import attend

INF, NAN = float("inf"), float("nan")
LOWEST = torch.finfo(torch.float32).min
BACKENDS = ["torch", "sdpa", "auto", *([] if jit.MISSING else ["cpu"])]
DTYPES = {torch.float32: 1e-4, torch.float64: 1e-9, torch.bfloat16: 3e-2, torch.float16: 3e-3}
Case = dict[str, Any]


def inputs(dtype: torch.dtype, *sizes: int, seed: int = 0) -> list[Tensor]:
    """q, k and v of some sizes B, H, G, L, S, E, Ev."""
    batch, heads, groups, length, keys, width, value = sizes
    g = torch.Generator().manual_seed(seed)
    shapes = ((heads, length, width), (groups, keys, width), (groups, keys, value))
    return [torch.randn(batch, *shape, generator=g).to(dtype) for shape in shapes]


def row(*numbers: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """A bias `[3, 5]` that is 0 but for the second query."""
    bias = torch.zeros(3, 5, dtype=dtype)
    bias[1] = torch.tensor(numbers, dtype=dtype)
    return bias


SIZES = {
    "no batch": (0, 2, 1, 3, 5, 4, 4),
    "no queries": (1, 2, 1, 0, 5, 4, 4),
    "no keys": (1, 2, 1, 3, 0, 4, 4),
    "no width": (1, 2, 1, 3, 5, 0, 4),
    "no values": (1, 2, 1, 3, 5, 4, 0),
    "neither": (2, 2, 2, 3, 5, 0, 0),
    "no keys, no values": (1, 2, 1, 3, 0, 4, 0),
    "one": (1, 1, 1, 1, 1, 1, 1),
}
USUAL = (1, 2, 1, 3, 5, 4, 4)
BIASES = {
    "all -inf": row(*[-INF] * 5),
    "all lowest": row(*[LOWEST] * 5),
    "quarter of the lowest": row(*[LOWEST / 4] * 5),
    "falling": row(-1e38, -2e38, LOWEST, -INF, -3e38),
    "large": row(1e38, 3e38, 0, 0, 0),
    "NaN": row(0, NAN, 0, -INF, 0),
    "+inf": row(0, INF, 0, -INF, 0),
    "below float32": row(*[-1e300] * 5, dtype=torch.float64),
    "all far below float32": row(-1e300, -1e299, -1e299, -INF, -1e308, dtype=torch.float64),
    "above float32": row(1e300, 1e300, 0, 0, 0, dtype=torch.float64),
    "denormal": row(*[1e-40] * 5),
}
SINKS = {
    "-inf": (-INF, 0.0),
    "+inf": (INF, 0.0),
    "NaN": (NAN, 0.0),
    "lowest": (LOWEST, LOWEST),
    "largest": (-LOWEST, 1.0),
}
MASKS: dict[str, Any] = {
    "forbids a query all": torch.tensor([True, False, True]).view(3, 1),
    "forbids all": torch.zeros(3, 5, dtype=torch.bool),
    "all padding": padding(torch.tensor([0])),
    "before the keys": causal(-2),
    "a hole": torch.tensor([True, False, True, True, False]),
}


def cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for name, sizes in SIZES.items():
        found[name] = {"sizes": sizes}
        found[f"{name}, sinks"] = {"sizes": sizes, "sinks": torch.linspace(-1, 1, sizes[1])}
    for name, bias in BIASES.items():
        found[f"bias {name}"] = {"bias": bias}
        found[f"bias {name}, a hole"] = {"bias": bias, "mask": MASKS["a hole"]}
        found[f"bias {name}, sinks"] = {"bias": bias, "sinks": torch.tensor([-INF, 0.5])}
    for name, numbers in SINKS.items():
        sinks = torch.tensor(numbers)
        found[f"sinks {name}"] = {"sinks": sinks}
        found[f"sinks {name}, bias all -inf"] = {"sinks": sinks, "bias": BIASES["all -inf"]}
        found[f"sinks {name}, bias lowest"] = {"sinks": sinks, "bias": BIASES["all lowest"]}
        found |= {f"sinks {name}, mask {m}": {"sinks": sinks, "mask": MASKS[m]} for m in MASKS}
    found |= {f"mask {name}": {"mask": mask} for name, mask in MASKS.items()}
    for scale in (0.0, -1.0, 1e-46, 1e-40, 1e5, 1e20, -1e36):
        found[f"scale {scale}"] = {"scale": scale}
        found[f"scale {scale}, causal"] = {"scale": scale, "mask": causal()}
    for softcap in (1e-300, 1e-45, 1e-39, 1e-30, 1e-3, 1e4, 1e15, 1e30, 1e38, 1e39, 1e300):
        found[f"softcap {softcap}"] = {"softcap": softcap}
        found[f"softcap {softcap}, scale"] = {"softcap": softcap, "scale": 30.0}
    for name, number in (("q", NAN), ("q", INF), ("k", NAN), ("k", INF), ("k", -INF)):
        found[f"{number} in {name}"] = {"spoilt": (name, number)}
        found[f"{number} in {name}, causal"] = {"spoilt": (name, number), "mask": causal(1)}
        found[f"{number} in {name}, a hole"] = {"spoilt": (name, number), "mask": MASKS["a hole"]}
    return found


CASES = cases()


def build(case: Case, dtype: torch.dtype) -> tuple[list[Tensor], Case]:
    case = dict(case)
    qkv = inputs(dtype, *case.pop("sizes", USUAL))
    if spoilt := case.pop("spoilt", None):
        qkv["qkv".index(spoilt[0])][0, 0, 2, 1] = spoilt[1]
    if "sinks" in case:
        case["sinks"] = case["sinks"].to(dtype)
    return qkv, case


def is_unsupported(error: MultiheadError) -> bool:
    return "doesn't support this input" in str(error)


def tolerance(wanted: Tensor, *dtypes: torch.dtype) -> float:
    size = wanted[wanted.isfinite()].abs().max().item() if wanted.isfinite().any() else 1.0
    return max(DTYPES[dtype] for dtype in dtypes) * max(1.0, size)


def require_outputs(qkv: list[Tensor], options: Case) -> int:
    """Compare all outputs of all backends with the reference; returns how many were compared."""
    dtype, done = qkv[0].dtype, 0
    wanted = attention(*qkv, return_lse=True, return_weights=True, backend="reference", **options)
    for backend in BACKENDS:
        for lse, weights in ((False, False), (True, False), (True, True)):
            asked = {"return_lse": lse, "return_weights": weights}
            try:
                got: Any = attention(*qkv, backend=backend, **asked, **options)
            except MultiheadError as error:
                if not is_unsupported(error):
                    raise
                continue
            got = got if isinstance(got, tuple) else (got,)
            for name, x, y in zip(("out", "lse", "weights"), got, wanted, strict=False):
                assert x.dtype == y.dtype
                close = torch.isclose(
                    x.double(), y.double(), rtol=DTYPES[dtype], atol=DTYPES[dtype], equal_nan=True
                )
                assert bool(close.all()), (backend, lse, weights, name, x, y)
                done += 1
    return done


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("name", CASES)
def test_outputs_are_those_of_the_definition(name: str) -> None:
    for dtype in DTYPES:
        qkv, options = build(CASES[name], dtype)
        assert require_outputs(qkv, options) > 5


def gradients(outputs: Any, tracked: list[Tensor]) -> list[Tensor]:
    """Gradients of a sum over outputs with random factors; a log-sum-exp of -inf has none."""
    total = torch.zeros((), dtype=torch.float64)
    for n, x in enumerate(outputs):
        g = torch.Generator().manual_seed(n)
        factors = torch.randn(x.shape, generator=g, dtype=torch.float64)
        total = total + torch.where(x.isinf(), 0.0, x.double() * factors).sum()
    if not total.requires_grad:
        return [torch.zeros_like(x) for x in tracked]
    found = torch.autograd.grad(total, tracked, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(t) if x is None else x for t, x in zip(tracked, found, strict=True)]


def require_gradients(qkv: list[Tensor], options: Case) -> int:
    """Compare all gradients of all backends with those of the oracle."""
    dtype, done, names = qkv[0].dtype, 0, ["q", "k", "v"]
    options = dict(options)
    mask = options.pop("mask", None)
    given = {"q": qkv[0], "k": qkv[1], "v": qkv[2]}
    given |= {n: options.pop(n) for n in ("bias", "sinks") if n in options}
    names = list(given)
    allowed = (
        mask
        if mask is None or isinstance(mask, Tensor)
        else mask.dense(qkv[0].shape[2], qkv[1].shape[2])
    )
    wide = {n: x.detach().double().requires_grad_() for n, x in given.items()}
    wanted = attend(allowed=allowed, **wide, **options)
    if not all(x.isfinite().all() for x in (wanted[0], wanted[2])):
        return 9  # no gradient is defined
    for backend in BACKENDS:
        for asked in ((False, False), (True, False), (True, True)):
            # torch's fused kernels have no gradient of a bias
            constant = {"bias"} if backend in ("sdpa", "auto") else set()
            leaves = {
                n: x.detach().clone().requires_grad_(n not in constant) for n, x in given.items()
            }
            flags = dict(zip(("return_lse", "return_weights"), asked, strict=True))
            try:
                got: Any = attention(**leaves, mask=mask, backend=backend, **flags, **options)
            except MultiheadError as error:
                if not is_unsupported(error):
                    raise
                continue
            got = got if isinstance(got, tuple) else (got,)
            tracked = [n for n in names if n not in constant]
            found = gradients(got, [leaves[n] for n in tracked])
            right = gradients(wanted[: len(got)], [wide[n] for n in tracked])
            for n, x, y in zip(tracked, found, right, strict=True):
                close = tolerance(y, dtype, x.dtype) * 3
                assert torch.allclose(x.double(), y, rtol=0, atol=close), (backend, asked, n, x, y)
                done += 1
    return done


GRADIENTS = [name for name in CASES if "in q" not in name and "in k" not in name]


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_the_definition(name: str) -> None:
    for dtype in (torch.float32, torch.float64):
        qkv, options = build(CASES[name], dtype)
        assert require_gradients(qkv, options) > 5


@st.composite
def problems(draw: Any) -> tuple[list[Tensor], Case]:
    sizes = [draw(st.integers(0, 3)), 0, draw(st.integers(1, 2))]
    sizes[1] = sizes[2] * draw(st.integers(1, 2))
    sizes += [draw(st.integers(0, 4)) for _ in range(4)]
    batch, heads, _, length, keys = sizes[:5]
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    qkv = inputs(dtype, *sizes, seed=draw(st.integers(0, 99)))
    options: Case = {}
    g = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def pick(numbers: list[float], *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        at = torch.randint(len(numbers), shape, generator=g)
        return torch.tensor(numbers, dtype=torch.float64)[at].to(dtype)

    if draw(st.booleans()):
        low = draw(
            st.sampled_from([[-INF, 0.0], [LOWEST, -INF], [LOWEST, 0.0, 1.0], [-1e38, -2e38]])
        )
        fine = draw(st.booleans())
        shape = draw(st.sampled_from([(length, keys), (batch, 1, 1, keys), (1, heads, length, 1)]))
        options["bias"] = pick(
            [*low, *([-1e300, -1e39] if fine else [])],
            *shape,
            dtype=torch.float64 if fine else torch.float32,
        )
    if draw(st.booleans()):
        options["mask"] = draw(
            st.sampled_from(
                [
                    causal(draw(st.integers(-3, 3))),
                    padding(torch.full((1,), min(1, keys))),
                    torch.rand(length, keys, generator=g) > 0.7,
                ]
            )
        )
    if draw(st.booleans()):
        options["sinks"] = pick([-INF, LOWEST, 0.0, 2.0], heads, dtype=dtype)
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([1e-50, 1e-3, 5.0, 1e20, 1e50]))
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.0, -0.7, 1e-50, 3.0]))
    return qkv, options


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@given(problem=problems())
@settings(max_examples=120)
def test_any_mixture_of_edges(problem: Any) -> None:
    require_outputs(*problem)
    require_gradients(*problem)


@pytest.mark.parametrize(
    "sizes", [(1, 0, 0, 3, 5, 4, 4), (1, 2, 0, 3, 5, 4, 4), (1, 0, 2, 3, 5, 4, 4)]
)
@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_no_heads_are_named(sizes: tuple[int, ...], backend: str) -> None:
    with pytest.raises(MultiheadError, match="can't be shared evenly"):
        attention(*inputs(torch.float32, *sizes), backend=backend)


def test_flex_leaves_a_finer_bias_to_others() -> None:
    from multihead.ops import AttentionCall

    q, k, v = (x.to("meta") for x in inputs(torch.float32, 1, 2, 1, 3, 5, 16, 16))
    call = AttentionCall.lower(q, k, v, bias=torch.zeros(3, 5, dtype=torch.float64, device="meta"))
    assert call.score_dtype() == torch.float64
    assert FlexBackend().unsupported_reason(call) is not None


def test_the_log_sum_exp_of_a_finer_bias_is_of_its_dtype() -> None:
    """-1e300 isn't -inf, which means that a query has no keys."""
    qkv = inputs(torch.float32, *USUAL)
    bias = BIASES["below float32"]
    for backend in (b for b in [*BACKENDS, "reference"] if b != "sdpa"):
        lse = attention(*qkv, bias=bias, return_lse=True, backend=backend)[1]
        assert lse.dtype == torch.float64 and bool((lse[:, :, 1] == -1e300).all())


def test_two_biases_of_the_lowest_number_leave_a_query_its_keys() -> None:
    """As of two float masks, of which each hides a padded query."""
    qkv, low = inputs(torch.float32, *USUAL), BIASES["all lowest"]
    wanted = attention(*qkv, bias=low, backend="reference")
    for backend in [*BACKENDS, "reference"]:
        torch.testing.assert_close(attention(*qkv, low, bias=low, backend=backend), wanted)
    assert bool(wanted[0, 0, 1].any())


def test_sums_below_what_float32_holds() -> None:
    """Scores near -1e32 and a bias of the lowest number add up to -inf in float32."""
    q, k, v = inputs(torch.float32, *USUAL)
    q, k = q.abs(), -k.abs()
    for backend in [*BACKENDS, "reference"]:
        got = attention(q, k, v, bias=BIASES["all lowest"], scale=1e33, backend=backend)
        torch.testing.assert_close(got[0, :, 1], v.mean(2)[0].expand(2, 4))
