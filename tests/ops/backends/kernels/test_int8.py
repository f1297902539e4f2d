"""The kernel that reads int8 keys and values equals the reference, which multiplies them first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multihead import attention
from multihead.masks import causal, padding
from multihead.ops import backend_for
from multihead.ops.backends import cpu, jit
from multihead.ops.slopes import AlibiBias
from ops.backends.kernels.test_forward import MASKS, mask_of

pytestmark = pytest.mark.skipif(
    jit.MISSING is not None, reason="without Numba there are no kernels"
)


def rows(g: torch.Generator, *shape: int, packed: bool = False) -> tuple[Tensor, Tensor]:
    """int8 numbers and scales; `packed`: as views of rows that hold both."""
    numbers = torch.randint(-127, 128, shape, generator=g, dtype=torch.int8)
    scale = torch.rand(shape[:-1], generator=g) / 50
    if not packed:
        return numbers, scale
    fill = -shape[-1] % 4
    whole = torch.cat(
        [torch.nn.functional.pad(numbers, (0, fill)), scale[..., None].view(torch.int8)], -1
    )
    return whole[..., : shape[-1]], whole[..., -4:].view(torch.float32)[..., 0]


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    mask_name=st.sampled_from(MASKS),
    batch=st.integers(1, 3),
    groups=st.integers(1, 3),
    share=st.integers(1, 5),
    length=st.integers(1, 6),
    keys=st.one_of(st.integers(1, 200), st.integers(500, 1200)),
    width=st.integers(1, 140),
    value_width=st.integers(1, 140),
    packed=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    softcap=st.sampled_from([None, 5.0]),
    bias=st.sampled_from([None, "whole", "keys", "alibi"]),
    sunk=st.booleans(),
)
def test_against_the_reference(
    seed: int,
    mask_name: str,
    batch: int,
    groups: int,
    share: int,
    length: int,
    keys: int,
    width: int,
    value_width: int,
    packed: bool,
    dtype: torch.dtype,
    softcap: float | None,
    bias: str | None,
    sunk: bool,
) -> None:
    g = torch.Generator().manual_seed(seed)
    heads = groups * share
    q = torch.randn(batch, heads, length, width, generator=g).to(dtype)
    k, k_scale = rows(g, batch, groups, keys, width, packed=packed)
    v, v_scale = rows(g, batch, groups, keys, value_width, packed=packed)
    add: Any = None
    if bias == "alibi":
        queries = torch.arange(keys, keys + length)
        add = AlibiBias(torch.rand(heads, generator=g), queries, torch.arange(keys))
    elif bias is not None:
        add = torch.randn(*((1, heads, length, keys) if bias == "whole" else (keys,)), generator=g)
        add = add.masked_fill(add < -1, -torch.inf)
    options: dict[str, Any] = {
        "bias": add,
        "softcap": softcap,
        "sinks": torch.randn(heads, generator=g) if sunk else None,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "return_lse": True,
    }
    mask = mask_of(mask_name, g, batch, heads, length, keys)
    out, lse = attention(q, k, v, mask, **options, backend="cpu")
    want, want_lse = attention(q.double(), k, v, mask, **options, backend="reference")
    assert out.dtype == dtype and lse.dtype == torch.float32
    bound = (4 if dtype == torch.float32 else 1) * torch.finfo(dtype).eps
    size = float(want.abs().max().clamp(min=0.1))
    assert float((out.double() - want).abs().max()) <= bound * size + 2e-5 * size
    assert torch.equal(lse.isneginf(), want_lse.isneginf())
    there = ~lse.isneginf()
    torch.testing.assert_close(lse[there].double(), want_lse[there], rtol=1e-5, atol=1e-5)


def call(share: int = 2, length: int = 1, keys: int = 6000) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    k, k_scale = rows(g, 1, 4, keys, 64, packed=True)
    v, v_scale = rows(g, 1, 4, keys, 64, packed=True)
    q = torch.randn(1, 4 * share, length, 64, generator=g)
    return dict(q=q, k=k, v=v, k_scale=k_scale, v_scale=v_scale)


def test_what_the_kernel_is_taken_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    run = jit.run_kernel
    monkeypatch.setattr(jit, "run_kernel", lambda name, *rest: ran.append(name) or run(name, *rest))
    given = call()
    assert backend_for(**given) == ("cpu", "a compiled kernel reads int8 keys and values")
    attention(**given)
    attention(**call(share=8, length=8))
    assert ran == ["decode_int8"] * 2
    ran.clear()
    for other in (
        call(length=40),  # a prompt
        call(keys=20),  # little work
        given | {"q": given["q"].double()},
        given | {"q": given["q"].clone().requires_grad_()},
    ):
        want = attention(**other, backend="reference") if not other["q"].requires_grad else None
        got = attention(**other)
        assert "decode_int8" not in ran
        assert want is None or torch.allclose(got, want, atol=1e-5)
    out, weights = attention(**given, return_weights=True)
    assert "decode_int8" not in ran and torch.allclose(weights.sum(-1), torch.ones(1, 8, 1))
    assert torch.allclose(out, attention(**given), atol=1e-5)
    got = attention(**(given | {"q": given["q"].clone().requires_grad_()}))
    got.sum().backward()


def test_the_number_of_threads_changes_no_bit() -> None:
    given, threads, found = call(keys=20_000), torch.get_num_threads(), []
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            found.append(attention(**given))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_nan_reaches_only_queries_that_may_read_it(name: str) -> None:
    given = call(length=3, keys=700)
    given[name][0, 1, 698] = torch.nan
    out = attention(**given, mask=causal(offset=697), backend="cpu")
    assert torch.equal(out.isnan().any(-1)[0].nonzero()[:, 1].unique(), torch.tensor([1, 2]))
    q, k, v = given["q"], *(given[x].float() * given[f"{x}_scale"][..., None] for x in "kv")
    want = attention(q, k, v, causal(offset=697), backend="cpu")
    assert torch.allclose(out, want, atol=1e-5, equal_nan=True)
    out = attention(**given, mask=padding(torch.tensor([0])), backend="cpu")
    assert not bool(out.any())


def test_without_kernels_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    given = call()
    want = attention(**given, backend="reference")

    def missing(*_: Any) -> None:
        raise jit.KernelsUnavailable("none")

    monkeypatch.setattr(cpu, "attend_compiled", missing)
    assert torch.allclose(attention(**given), want, atol=1e-5)


def test_a_compiled_graph_has_the_operator() -> None:
    given = call()
    step = torch.compile(lambda **x: attention(**x), fullgraph=True, backend="eager")
    assert torch.equal(step(**given), attention(**given))


def test_bad_scales() -> None:
    given = call(keys=5)
    for change, error, words in (
        ({"k_scale": None}, ValueError, "k is int8, but k_scale is None"),
        ({"v_scale": given["v_scale"][:, :, :1]}, ValueError, r"v_scale\[1, 4, 1\]: expected"),
        ({"k_scale": given["k_scale"].long()}, TypeError, "k_scale is torch.int64"),
        ({"k": given["k"].float()}, TypeError, "k_scale was given, but k is torch.float32"),
        ({"k_scale": given["k_scale"].clone().requires_grad_()}, ValueError, "k_scale requires"),
        ({"k_scale": 1.0}, TypeError, "k_scale is"),
    ):
        with pytest.raises(error, match=words):
            attention(**(given | change))


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    mask_name=st.sampled_from(MASKS),
    groups=st.integers(1, 3),
    share=st.integers(1, 5),
    length=st.integers(1, 3),
    keys=st.one_of(st.integers(1, 200), st.integers(500, 1200)),
    width=st.integers(1, 140),
    value_width=st.integers(1, 140),
    is_part=st.booleans(),
    bad=st.sampled_from([None, torch.inf, -torch.inf, torch.nan]),
)
def test_few_queries_of_bfloat16(
    seed: int,
    mask_name: str,
    groups: int,
    share: int,
    length: int,
    keys: int,
    width: int,
    value_width: int,
    is_part: bool,
    bad: float | None,
) -> None:
    """`is_part`: the values are a part of the keys, as in the absorbed form of latent attention."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(2, groups * share, length, width, generator=g).bfloat16()
    k = torch.randn(2, groups, keys, width + 3, generator=g).bfloat16()[..., :width]
    v = torch.randn(2, groups, keys, value_width, generator=g).bfloat16()
    v = k[..., : min(width, value_width)] if is_part else v
    if bad is not None:
        (k if seed % 2 else v)[0, 0, seed % keys, 0] = bad
    mask = mask_of(mask_name, g, 2, groups * share, length, keys)
    out, lse = attention(q, k, v, mask, return_lse=True, backend="cpu")
    # of numbers that aren't finite, those that the kernel of float32 gives
    backend = "reference" if bad is None else "cpu"
    kind = torch.float64 if bad is None else torch.float32
    qkv = [x.to(kind) for x in (q, k, v)]
    want, want_lse = (x.double() for x in attention(*qkv, mask, return_lse=True, backend=backend))
    torch.testing.assert_close(out.double(), want, rtol=2**-8, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_few_queries_of_bfloat16_convert_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    run = jit.run_kernel
    monkeypatch.setattr(jit, "run_kernel", lambda name, *rest: ran.append(name) or run(name, *rest))
    rows = torch.randn(1, 1, 2000, 40).bfloat16()
    q = torch.randn(1, 16, 1, 40).bfloat16()
    monkeypatch.setattr(cpu, "widen", lambda call: pytest.fail("converted"))
    attention(q, rows, rows[..., :32], backend="cpu")
    assert ran == ["decode_bfloat16"]
