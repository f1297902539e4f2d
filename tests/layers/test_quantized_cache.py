"""int8 caches: bounds of the rounding, and every ability of the caches they are made from."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import multihead
from multihead import Cache, MultiHeadAttention
from multihead.layers import ALiBi, LatentAttention, QuantizedCache, QuantizedWindowCache, Rotary
from multihead.layers.quantized_cache import create_basis, quantize
from multihead.layers.visible_keys import to_basis
from multihead.masks import causal, window

KINDS: dict[str, Any] = {
    "grows": QuantizedCache,
    "reserved": lambda: QuantizedCache(20),
    "window": lambda: QuantizedWindowCache(30),
    "sinks": lambda: QuantizedWindowCache(3, sinks=2),
}


def layer(**options: Any) -> MultiHeadAttention:
    torch.manual_seed(0)
    made = MultiHeadAttention(24, 4, **({"num_kv_heads": 2, "positions": Rotary(6)} | options))
    torch.nn.init.normal_(made.q_proj.weight, std=0.5)  # attention far from even
    return made.requires_grad_(False)


def numbers(cache: Cache, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """The keys and values that the cache gives back."""
    visible = cache.update(k, v, **given)
    assert visible.k.dtype == visible.v.dtype == torch.int8 and visible.quantized is not None
    return visible.quantized.to_numbers(visible.k, visible.v, k.dtype)


@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(0, 2),
    groups=st.integers(1, 3),
    length=st.integers(0, 5),
    width=st.integers(1, 70),
    value_width=st.integers(1, 9),
    size=st.sampled_from([1e-40, 1e-3, 1.0, 1e30]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
@settings(max_examples=60)
def test_an_error_is_at_most_half_a_scale(
    seed: int,
    batch: int,
    groups: int,
    length: int,
    width: int,
    value_width: int,
    size: float,
    dtype: torch.dtype,
) -> None:
    g = torch.Generator().manual_seed(seed)
    k, v = (
        (size * torch.randn(batch, groups, length, w, generator=g)).to(dtype)
        for w in (width, value_width)
    )
    cache = QuantizedCache()
    visible = cache.update(k, v)
    how = visible.quantized
    assert how is not None
    for x, stored, scale, basis in (
        (k, visible.k, how.k_scale, how.k_basis),
        (v, visible.v, how.v_scale, how.v_basis),
    ):
        turned = to_basis(x.double(), basis)
        error = (turned - stored.double() * scale.double()[..., None]).abs()
        rounding = 1e-5 * turned.abs().amax(-1, keepdim=True) if turned.numel() else 0
        assert bool((error <= scale.double()[..., None] / 2 + rounding).all())
        assert int(stored.abs().max() if stored.numel() else 0) <= 127
    got_k, _ = how.to_numbers(visible.k, visible.v, torch.float64)
    bound = how.k_scale.double() / 2 * width**0.5 + 1e-5 * k.double().norm(dim=-1)
    assert bool(((got_k - k.double()).norm(dim=-1) <= bound).all())
    assert cache.nbytes == batch * groups * length * (
        sum(w + -w % 4 + 4 for w in (width, value_width))
    )


def test_the_basis_spreads_what_is_far_larger_than_the_rest() -> None:
    basis = create_basis(48)
    assert torch.allclose(basis @ basis.T, torch.eye(48), atol=1e-6)
    k = torch.randn(1, 2, 200, 48)
    k[..., 5] += 30.0
    got, _ = numbers(QuantizedCache(), k, k)
    stored, scale = quantize(k)
    plain = stored * scale[..., None]
    assert float((got - k).norm()) < 0.5 * float((plain - k).norm())


@given(
    kind=st.sampled_from(list(KINDS)),
    sizes=st.lists(st.integers(0, 7), max_size=4),
    kv_heads=st.sampled_from([1, 2, 4]),
    positions=st.sampled_from([None, Rotary(6), ALiBi(4)]),
    left=st.sampled_from([None, 4]),
    softcap=st.sampled_from([None, 2.0]),
    extra=st.booleans(),
)
@settings(max_examples=25)
def test_steps_equal_one_pass(
    kind: str,
    sizes: list[int],
    kv_heads: int,
    positions: Any,
    left: int | None,
    softcap: float | None,
    extra: bool,
) -> None:
    model = layer(
        num_kv_heads=kv_heads, positions=positions, softcap=softcap, sinks=extra, bias_kv=extra
    )
    x = torch.randn(2, 13, 24)
    mask = causal() if left is None else causal() & window(left=left)
    whole: Any = mask
    if kind == "sinks":
        near = (mask & window(left=3)).dense(13, 13)
        whole = near | mask.dense(13, 13) & (torch.arange(13) < 2)
    want, want_weights = model(x, mask=whole, cache=QuantizedCache(), return_weights=True)
    cache, outputs, at = KINDS[kind](), [], 0
    for size in [*sizes, 1, 1, 13]:
        part = x[:, at : at + size]
        at += part.shape[1]
        outputs.append(model(part, mask=mask, cache=cache, return_weights=True))
    got = torch.cat([out for out, _ in outputs], 1)
    assert torch.allclose(got, want, atol=1e-5)
    sums = torch.cat([weights.sum(-1) for _, weights in outputs], 2)
    assert torch.allclose(sums, want_weights.sum(-1), atol=1e-5)
    exact = model(x, mask=whole)
    assert float((got - exact).norm() / exact.norm()) < 0.03
    slots = {"grows": None, "reserved": 20, "window": 31, "sinks": 6}[kind]
    if slots is not None:
        assert cache.nbytes == 2 * kv_heads * slots * 2 * (8 + 4)  # 6 filled up to 8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_different_lengths(kind: str, side: str) -> None:
    model, x, cache = layer(), torch.randn(3, 6, 24), KINDS[kind]()
    lengths = [6, 2, 4]
    index = torch.arange(6)
    size = torch.tensor(lengths)[:, None]
    valid = index >= 6 - size if side == "left" else index < size
    first = model(x, mask=causal(), cache=cache, valid=valid)
    step = torch.randn(3, 1, 24)
    second = model(step, mask=causal(), cache=cache)
    for b in range(3):
        alone = KINDS[kind]()
        want = model(x[b, valid[b]][None], mask=causal(), cache=alone)
        assert torch.allclose(first[b, valid[b]], want[0], atol=1e-5)
        want = model(step[b : b + 1], mask=causal(), cache=alone)
        assert torch.allclose(second[b], want[0], atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_crop_and_reorder(kind: str) -> None:
    model, x, cache = layer(), torch.randn(2, 4, 24), KINDS[kind]()
    model(x, mask=causal(), cache=cache)
    copies = [copy.copy(cache), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]  # noqa: S301
    step = torch.randn(2, 1, 24)
    positions, size = cache.key_positions, cache.nbytes
    state = cache.state()
    want = model(step, mask=causal(), cache=cache)
    for other in copies:
        assert other.length == 4 and other.nbytes == size
        assert torch.equal(other.key_positions, positions)
        assert torch.equal(model(step, mask=causal(), cache=other), want)
    if kind != "window" and kind != "sinks":
        cache.restore(state)
        assert torch.equal(model(step, mask=causal(), cache=cache), want)
    other = KINDS[kind]()
    model(x, mask=causal(), cache=other)
    other.reorder([1, 1, 0])
    assert torch.allclose(
        model(step[[1, 1, 0]], mask=causal(), cache=other), want[[1, 1, 0]], atol=1e-6
    )
    other.crop(torch.tensor([0, 5, 5]))
    assert torch.allclose(
        model(step[:1].expand(3, -1, -1), mask=causal(), cache=other)[0],
        model(step[:1], mask=causal(), cache=KINDS[kind]())[0],
        atol=1e-6,
    )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_row(bad: float) -> None:
    k, v = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
    k[0, 0, 1, 3] = v[0, 1, 2, 0] = bad
    got_k, got_v = numbers(QuantizedCache(), k, v)
    for got, head, token in ((got_k, 0, 1), (got_v, 1, 2)):
        is_nan = torch.zeros(1, 2, 4, 8, dtype=torch.bool)
        is_nan[0, head, token] = True
        assert torch.equal(got.isnan(), is_nan)


def test_zeros_stay_zeros() -> None:
    k = torch.randn(1, 1, 3, 5)
    k[:, :, 1] = 0.0
    got, _ = numbers(QuantizedCache(), k, k)
    assert not bool(got[:, :, 1].any()) and bool(got[:, :, 0].any())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model, x = layer().to(dtype), torch.randn(2, 9, 24).to(dtype)
    cache = QuantizedCache()
    got = torch.cat([model(x[:, i : i + 3], mask=causal(), cache=cache) for i in (0, 3, 6)], 1)
    want = model(x, mask=causal())
    assert got.dtype == dtype
    assert float((got - want).norm() / want.norm()) < 0.03
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer()(torch.randn(2, 9, 24), mask=causal(), cache=QuantizedCache())


def test_gradients() -> None:
    """Keys that need one are refused; queries over constant keys get theirs."""
    model, x, cache = layer(), torch.randn(2, 5, 24), QuantizedCache()
    with pytest.raises(
        ValueError, match=r"k\[2, 2, 5, 6\] requires a gradient.*torch\.no_grad\(\), or train with"
    ):
        model(x.requires_grad_(), mask=causal(), cache=cache)
    assert cache.length == 0
    x = x.detach()
    model.q_proj.requires_grad_(True)
    visible = cache.update(
        *(y.unflatten(-1, (2, 6)).mT.mT.transpose(1, 2) for y in (model.k_proj(x), model.v_proj(x)))
    )
    assert visible.quantized is not None
    cache, grads = QuantizedCache(), []
    for step in (False, True):
        cache = QuantizedCache()
        model.q_proj.zero_grad()
        parts = x.split(1, 1) if step else (x,)
        torch.cat(
            [model(p, mask=causal(), cache=cache) for p in parts], 1
        ).square().sum().backward()
        assert model.q_proj.weight.grad is not None
        grads.append(model.q_proj.weight.grad.clone())
    assert torch.allclose(*grads, atol=1e-4) and bool(grads[0].any())
    with torch.inference_mode():
        model(x, mask=causal(), cache=cache)
    with torch.no_grad():
        assert model(x, mask=causal(), cache=cache).shape == x.shape


def test_a_reading_reads_numbers() -> None:
    model, x = layer(), torch.randn(1, 7, 24)
    caches = QuantizedCache(), QuantizedCache()
    with multihead.reading(model, verify=False) as reading:
        got = model(x, mask=causal(), cache=caches[0])
    assert torch.allclose(got, model(x, mask=causal(), cache=caches[1]), atol=1e-5)
    assert len(reading.table().rows()) == 4


def test_latent_attention() -> None:
    torch.manual_seed(0)
    model = LatentAttention(24, 4, kv_latent_dim=16, rotary_dim=4, head_dim=6).requires_grad_(False)
    x, cache, exact = torch.randn(2, 9, 24), QuantizedCache(), Cache()
    want = model(x, mask=causal(), cache=exact)
    got = torch.cat([model(x[:, i : i + 3], mask=causal(), cache=cache) for i in (0, 3, 6)], 1)
    whole = model(x, mask=causal(), cache=QuantizedCache())
    assert torch.allclose(got, whole, atol=1e-5)
    assert 0 < float((got - want).norm() / want.norm()) < 0.03
    cache, exact = QuantizedCache(9), Cache(9)
    for c in (cache, exact):
        model(x, mask=causal(), cache=c)
    assert (cache.nbytes, exact.nbytes) == (2 * 9 * (20 + 4), 2 * 9 * 20 * 4)


def test_a_decoding_step_compiles() -> None:
    model, x = layer(), torch.randn(1, 6, 24)
    for cache in (QuantizedCache(), QuantizedCache(6)):
        torch._dynamo.reset()
        step = torch.compile(
            lambda y, c: model(y, mask=causal(), cache=c), fullgraph=True, backend="eager"
        )
        with torch.no_grad():
            got = torch.cat([step(x[:, i : i + 1], cache) for i in range(6)], 1)
        assert torch.allclose(got, model(x, mask=causal(), cache=QuantizedCache()), atol=1e-5)


def test_bad_arguments() -> None:
    k, cache = torch.randn(1, 2, 3, 6), QuantizedCache(4)
    with pytest.raises(TypeError, match=r"k is torch.int64: expected floating numbers"):
        cache.update(k.long(), k)
    cache.update(k, k)
    with pytest.raises(ValueError, match="max_length=4"):
        cache.update(k, k)
    for other in (k[:, :1], torch.randn(1, 2, 1, 9), k.expand(2, -1, -1, -1)):
        with pytest.raises(ValueError, match=r"k\[.*doesn't fit the cache, which holds"):
            cache.update(other, other)
    with pytest.raises(ValueError, match=r"v\[1, 2, 1, 12\] doesn't fit"):
        cache.update(k[:, :, :1], torch.randn(1, 2, 1, 12))
    with pytest.raises(TypeError, match="k is"):
        cache.update(None, k)  # type: ignore[arg-type]
    assert cache.length == 3
    cache.update(k[:, :, :1].double(), k[:, :, :1].bfloat16())  # of any floating dtype
    assert cache.length == 4
    for made in (lambda: QuantizedCache(0), lambda: QuantizedWindowCache(-1)):
        with pytest.raises(ValueError, match="expected a number of tokens"):
            made()


def test_other_widths_in_one_row_are_refused() -> None:
    """Widths 5 and 7 fill rows of one size."""
    cache = QuantizedCache()
    cache.update(torch.randn(1, 1, 2, 5), torch.randn(1, 1, 2, 5))
    with pytest.raises(ValueError, match=r"k\[1, 1, 1, 7\] doesn't fit"):
        cache.update(torch.randn(1, 1, 1, 7), torch.randn(1, 1, 1, 5))


def test_both_forms_of_latent_attention_read_int8() -> None:
    torch.manual_seed(0)
    model = LatentAttention(64, 16, kv_latent_dim=128, rotary_dim=32, head_dim=32)
    x, found = torch.randn(1, 300, 64), []
    with torch.no_grad():
        for form in ("absorbed", "expanded"):
            model.form, cache = form, QuantizedCache()
            model(x[:, :-1], mask=causal(), cache=cache)
            found.append(model(x[:, -1:], mask=causal(), cache=cache))
        exact = model(x, mask=causal())[:, -1:]
    assert torch.allclose(*found, atol=1e-5)
    assert 1e-4 < float((found[0] - exact).norm() / exact.norm()) < 0.03
