"""The two forms of `LatentAttention` are one function: with masks, caches, gradients, dtypes,
compilers, transforms and copies.
"""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from multihead import Cache, LatentAttention, WindowCache
from multihead.layers import ALiBi, Rotary, latent
from multihead.masks import causal, padding, window
from multihead.ops import AlibiBias

SIZES: dict[str, Any] = dict(kv_latent_dim=10, rotary_dim=4, head_dim=6, v_head_dim=5)


def made(form: str = "auto", **options: Any) -> LatentAttention:
    """A layer with sharp attention."""
    torch.manual_seed(0)
    layer = LatentAttention(24, 3, **SIZES | options)
    with torch.no_grad():
        layer.kv_up_proj.weight.mul_(4)
        (layer.q_proj if layer.q_latent_dim is None else layer.q_up_proj).weight.mul_(4)
    layer.form = form
    return layer.eval()


def both(layer: LatentAttention) -> list[LatentAttention]:
    forms = [copy.deepcopy(layer), copy.deepcopy(layer)]
    forms[0].form, forms[1].form = "expanded", "absorbed"
    return forms


def by_hand(layer: LatentAttention, x: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Output and weights of one sequence `[L, D]`, head by head, as DeepSeek-V2 writes them."""
    sizes, at = [layer.kv_latent_dim, layer.rotary_dim], torch.arange(len(x))
    c, shared = layer.kv_down_proj(x).split(sizes, -1)
    c = c if layer.kv_norm is None else layer.kv_norm(c)
    if layer.q_latent_dim is None:
        q = layer.q_proj(x)
    else:
        down = layer.q_down_proj(x)
        q = layer.q_up_proj(down if layer.q_norm is None else layer.q_norm(down))
    shared = layer.positions(shared[None, None], at)[0, 0]
    update, found = torch.zeros(len(x), layer.out_proj.out_features, dtype=x.dtype), []
    if layer.out_proj.bias is not None:
        update = update + layer.out_proj.bias
    e, ev = layer.head_dim, layer.v_head_dim
    for h in range(layer.num_heads):
        plain, rotary = q[:, h * (e + layer.rotary_dim) :][:, : e + layer.rotary_dim].split(
            [e, layer.rotary_dim], -1
        )
        w_uk, w_uv = layer.kv_up_proj.weight[h * (e + ev) :][: e + ev].split([e, ev])
        rotary = layer.positions(rotary[None, None], at)[0, 0]
        scores = layer.scale * (plain @ (c @ w_uk.T).T + rotary @ shared.T)
        weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num()
        found.append(weights)
        update = update + weights @ c @ w_uv.T @ layer.out_proj.weight[:, h * ev :][:, :ev].T
    return update, torch.stack(found)


@given(
    heads=st.integers(1, 4),
    latent_dim=st.integers(1, 9),
    rotary_dim=st.sampled_from([2, 4, 6]),
    head_dim=st.integers(1, 7),
    v_head_dim=st.sampled_from([None, 1, 5]),
    q_latent_dim=st.sampled_from([None, 3]),
    norm=st.sampled_from(["rms", "layer", None]),
    bias=st.booleans(),
    batch=st.integers(0, 3),
    length=st.integers(0, 9),
    mask=st.sampled_from([None, causal(), causal() & window(2), padding([3, 0, 9])]),
)
@settings(max_examples=60, deadline=None)
def test_both_forms_equal_the_definition(
    heads: int,
    latent_dim: int,
    rotary_dim: int,
    head_dim: int,
    v_head_dim: int | None,
    q_latent_dim: int | None,
    norm: str | None,
    bias: bool,
    batch: int,
    length: int,
    mask: Any,
) -> None:
    if mask is not None and mask.rules:
        batch = 3
    layer = LatentAttention(
        8,
        heads,
        kv_latent_dim=latent_dim,
        rotary_dim=rotary_dim,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        q_latent_dim=q_latent_dim,
        out_dim=6,
        norm=norm,
        bias=bias,
        dtype=torch.float64,
    )
    x = torch.randn(batch, length, 8, dtype=torch.float64)
    results = [form(x, mask=mask, return_weights=True) for form in both(layer)]
    allowed = torch.ones(batch, 1, length, length, dtype=torch.bool)
    allowed = allowed if mask is None else mask.dense(length, length).expand_as(allowed)
    for row in range(batch):
        want = by_hand(layer, x[row], allowed[row, 0])
        for got in results:
            for found, expected in zip(got, want):
                torch.testing.assert_close(found[row], expected, atol=1e-12, rtol=1e-12)
    for out, weights in results:
        assert out.shape == (batch, length, 6) and weights.shape == (batch, heads, length, length)


CALLS: dict[str, dict[str, Any]] = {
    "bias": {"attn_bias": torch.randn(3, 7, 7, generator=torch.Generator().manual_seed(1))},
    "alibi": {"attn_bias": AlibiBias(torch.tensor([0.5, 0.2, 0.1]), *(torch.arange(7),) * 2)},
    "dense": {"mask": torch.ones(7, 7).bool().tril() & (torch.arange(7) != 2)},
    "valid": {"valid": torch.tensor([[False, True, True, True, True, True, False], [True] * 7])},
    "positions": {"position_ids": [[3, 4, 5, 9, 10, 11, 30], [0, 1, 2, 3, 4, 5, 6]]},
}


@pytest.mark.parametrize("name", CALLS)
def test_every_argument_of_a_call_changes_both_forms_alike(name: str) -> None:
    layer, x = made(), torch.randn(2, 7, 24)
    plain = layer(x, mask=causal())
    call = {"mask": causal()} | CALLS[name]
    (a, a_weights), (b, b_weights) = (f(x, **call, return_weights=True) for f in both(layer))
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(a_weights, b_weights, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(a, plain, atol=1e-3)
    assert torch.allclose(layer(x, **call), a, atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        dict(positions=Rotary(4, interleaved=True)),
        dict(positions=Rotary(4, theta=100.0)),
        dict(norm="layer"),
        dict(norm=None),
        dict(scale=0.1),
        dict(mask=causal()),
    ],
    ids=lambda change: "-".join(change),
)
def test_every_option_changes_the_output(change: dict[str, Any]) -> None:
    x, plain, layer = torch.randn(2, 7, 24), made(norm=lambda n: nn.RMSNorm(n)), made(**change)
    layer.load_state_dict(plain.state_dict(), strict=False)
    assert not torch.allclose(layer(x), plain(x), atol=1e-3)
    assert next(iter(change)) in repr(layer) or "norm" in change


def test_cosines_may_be_shared() -> None:
    layer, x, at = made(), torch.randn(2, 7, 24), torch.arange(3, 10)
    want = layer(x, mask=causal(), position_ids=at)
    assert torch.equal(layer(x, mask=causal(), cos_sin=layer.positions.cos_sin(at)), want)
    assert not torch.allclose(
        layer(x, mask=causal(), cos_sin=layer.positions.cos_sin(at * 2)), want
    )


@pytest.mark.parametrize("rule", [causal(), causal() & window(2)], ids=["causal", "window"])
@torch.no_grad()
def test_a_mask_of_every_call_joins_that_of_the_call(rule: Any) -> None:
    layer, plain, x = made(mask=rule), made(), torch.randn(2, 7, 24)
    assert torch.equal(layer(x), plain(x, mask=rule))
    cache = Cache()
    parts = [layer(part, cache=cache) for part in x.split([3, 1, 3], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), plain(x, mask=rule), atol=1e-5, rtol=1e-5)
    dense = torch.rand(2, 1, 7, 7) < 0.8
    want = plain(x, mask=dense & rule.dense(7, 7))
    torch.testing.assert_close(layer(x, mask=dense), want, atol=1e-5, rtol=1e-5)
    cache = Cache()
    layer(x[:, :5], cache=cache)
    got = layer(x[:, 5:], mask=dense[:, :, 5:], cache=cache)
    torch.testing.assert_close(got, want[:, 5:], atol=1e-5, rtol=1e-5)


# ---- caches


@torch.no_grad()
def test_a_cache_holds_the_latent_and_the_rotary_key_alone() -> None:
    layer, x, cache = made(), torch.randn(2, 7, 24), Cache(max_length=8)
    layer(x, mask=causal(), cache=cache)
    assert cache.nbytes == 2 * 8 * (10 + 4) * 4
    stored = cache._k[:, 0, :7]
    c, key = layer.kv_down_proj(x).split([10, 4], -1)
    torch.testing.assert_close(stored[..., :10], layer.kv_norm(c))
    torch.testing.assert_close(stored[..., 10:], layer.positions(key[:, None])[:, 0])
    with pytest.raises(ValueError, match="max_length=8"):
        layer(x, mask=causal(), cache=cache)
    assert cache.length == 7  # a call that fails stores nothing
    wrong = torch.ones(7, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"mask\[7, 3\]"):
        layer(x[:, :1], mask=wrong, cache=cache)
    assert cache.length == 7
    with pytest.raises(ValueError, match="another layer"):
        made()(x[:, :1], cache=cache)


@pytest.mark.parametrize("form", ["auto", "absorbed", "expanded"])
@torch.no_grad()
def test_crop_reorder_copies_and_rows_of_different_lengths(form: str) -> None:
    layer, x = made(form), torch.randn(3, 9, 24)
    want = made("expanded")(x, mask=causal())
    cache = Cache()
    layer(x[:, :6], mask=causal(), cache=cache)
    cache.crop([4, 2, 6])
    cache = pickle.loads(pickle.dumps(copy.deepcopy(cache)))  # noqa: S301
    step = torch.stack([x[0, 4], x[1, 2], x[2, 6]])[:, None]
    got = layer(step, mask=causal(), cache=cache)[:, 0]
    torch.testing.assert_close(
        got, torch.stack([want[0, 4], want[1, 2], want[2, 6]]), atol=1e-5, rtol=1e-5
    )
    cache.reorder([2, 2, 1])
    assert cache.lengths.tolist() == [7, 7, 3]
    step = torch.stack([x[2, 7:9], x[2, 7:9], x[1, 3:5]])
    got = layer(step, mask=causal(), cache=cache)
    rows = torch.stack([want[2, 7:9], want[2, 7:9], want[1, 3:5]])
    torch.testing.assert_close(got, rows, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("sinks", [0, 1])
@torch.no_grad()
def test_a_window_cache_gives_what_a_window_gives(form: str, sinks: int) -> None:
    layer, x = made(form), torch.randn(2, 12, 24)
    near = (causal() & window(left=3)).dense(12, 12)
    near = near | causal().dense(12, 12) & (torch.arange(12) < sinks)
    want = made("expanded")(x, mask=near)
    cache = WindowCache(left=3, sinks=sinks)
    parts = [layer(part, mask=causal(), cache=cache) for part in x.split([5, 1, 1, 4, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), want, atol=1e-5, rtol=1e-5)
    assert cache.nbytes == 2 * (4 + sinks) * 14 * 4


def test_gradients_through_a_cache_are_those_of_one_pass() -> None:
    x = torch.randn(2, 6, 24)
    grads = []
    for form in ("expanded", "absorbed", "one pass"):
        layer = made("auto" if form == "one pass" else form)
        cache = None if form == "one pass" else Cache()
        sizes = [6] if cache is None else [3, 1, 2]
        parts = [layer(part, mask=causal(), cache=cache) for part in x.split(sizes, 1)]
        torch.cat(parts, 1).square().sum().backward()
        grads.append([p.grad for p in layer.parameters()])
    for ours, want in zip(grads[:2], (grads[2],) * 2):
        for a, b in zip(ours, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())


# ---- the choice between the forms


def forms_taken(layer: LatentAttention, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    taken: list[str] = []
    for form in ("absorbed", "expanded"):
        method = getattr(layer, f"_attend_{form}")
        monkeypatch.setattr(
            layer,
            f"_attend_{form}",
            lambda *args, method=method, form=form: taken.append(form) or method(*args),
        )
    return taken


@torch.no_grad()
def test_few_queries_of_a_cache_are_absorbed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = made(kv_latent_dim=40)
    taken, cache = forms_taken(layer, monkeypatch), Cache()
    for length in (30, 30, 3, 1):
        layer(torch.randn(1, length, 24), mask=causal(), cache=cache)
    layer(torch.randn(1, 1, 24))
    assert taken == ["expanded", "expanded", "absorbed", "absorbed", "expanded"]


def multiply_adds(form: str, length: int, held: int) -> int:
    """Multiplications of one call with a cache, less those of the projections of both forms."""
    from torch.utils.flop_counter import FlopCounterMode

    layer, cache = made(form, kv_latent_dim=40), Cache()
    cache.update(torch.randn(1, 1, held, 44), torch.randn(1, 1, held, 0))
    with FlopCounterMode(display=False) as counter:
        layer(torch.randn(1, length, 24), cache=cache)
    return int(counter.get_total_flops())


@torch.no_grad()
def test_the_choice_compares_the_multiplications(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent, "MORE_MULTIPLICATIONS", 1.0)
    layer = made(kv_latent_dim=40)
    for length, held in ((1, 1), (5, 8), (6, 40), (7, 40), (8, 80), (9, 1000), (4, 4), (3, 0)):
        fewer = multiply_adds("absorbed", length, held) <= multiply_adds("expanded", length, held)
        assert layer._absorbs(length, held + length) == fewer, (length, held)


@torch.no_grad()
def test_a_projection_that_is_more_than_its_weight_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from peft import LoraConfig, get_peft_model

    x = torch.randn(1, 5, 24)

    def step(layer: Any) -> Tensor:
        cache = Cache()
        layer(x[:, :4], mask=causal(), cache=cache)
        out: Tensor = layer(x[:, 4:], mask=causal(), cache=cache)
        return out

    def hooked(layer: LatentAttention) -> Any:
        layer.kv_up_proj.register_forward_hook(lambda m, i, out: 2 * out)
        return layer

    def parametrized(layer: LatentAttention) -> Any:
        nn.utils.parametrizations.weight_norm(layer.kv_up_proj)
        layer.kv_up_proj.parametrizations.weight.original0.mul_(2)
        return layer

    def adapted(layer: LatentAttention) -> Any:
        config = LoraConfig(target_modules=["kv_up_proj"], init_lora_weights=False)
        return get_peft_model(layer, config)

    def with_bias(layer: LatentAttention) -> Any:
        linear = nn.Linear(10, 33)
        linear.weight = layer.kv_up_proj.weight
        layer.kv_up_proj = linear
        return layer

    plain = step(made())
    for change in (hooked, parametrized, adapted, with_bias):
        layer = change(made())
        inner = layer.base_model.model if change is adapted else layer
        assert not torch.allclose(step(layer), plain, atol=1e-3)
        torch.testing.assert_close(
            step(layer), layer(x, mask=causal())[:, 4:], atol=1e-5, rtol=1e-5
        )
        inner.form = "absorbed"
        with pytest.raises(ValueError, match=r"form='absorbed'.*kv_up_proj.*form='auto'"):
            step(layer)


def test_every_projection_is_called_as_a_module() -> None:
    layer, called = made(q_latent_dim=8), []
    names = ["q_down_proj", "q_norm", "q_up_proj", "kv_down_proj", "kv_norm", "kv_up_proj"]
    for name in (*names, "out_proj"):
        getattr(layer, name).register_forward_hook(lambda *_, name=name: called.append(name))
    layer(torch.randn(1, 3, 24))
    assert called == [*names, "out_proj"]


# ---- torch's ways


class Double(nn.Module):
    """A norm that answers in float32, whatever it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x.float()


def test_compiles_as_one_graph_with_and_without_a_cache() -> None:
    layer, x = made(), torch.randn(2, 7, 24)
    want = layer(x, mask=causal())
    torch._dynamo.reset()

    def call(x: Tensor, cache: Cache | None = None) -> Tensor:
        out: Tensor = layer(x, mask=causal(), cache=cache)
        return out

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), want, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        cache = Cache(max_length=8)
        parts = [compiled(part, cache) for part in x.split([5, 1, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), want, atol=1e-5, rtol=1e-5)


def test_exports_with_any_batch_and_length() -> None:
    layer = made(mask=causal())
    sizes = {0: torch.export.Dim("B"), 1: torch.export.Dim("L")}
    exported = torch.export.export(layer, (torch.randn(2, 5, 24),), dynamic_shapes=(sizes,))
    for batch, length in ((3, 17), (2, 4)):
        x = torch.randn(batch, length, 24)
        torch.testing.assert_close(exported.module()(x), layer(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("norm", ["rms", lambda width: Double()])
@torch.no_grad()
def test_autocast_and_lower_precision(form: str, norm: Any) -> None:
    x, layer = torch.randn(2, 7, 24), made(form, norm=norm)
    want = layer(x, mask=causal())
    cache = Cache()
    with torch.autocast("cpu", torch.bfloat16):
        parts = [layer(part, mask=causal(), cache=cache) for part in x.split([4, 1, 2], 1)]
    assert cache._k.dtype == torch.bfloat16
    assert torch.allclose(torch.cat(parts, 1).float(), want, atol=6e-2 * want.abs().max().item())
    half = copy.deepcopy(layer).to(torch.bfloat16)(x.bfloat16(), mask=causal())
    assert half.dtype == torch.bfloat16
    assert torch.allclose(half.float(), want, atol=6e-2 * want.abs().max().item())


def test_is_created_on_meta_and_filled_later() -> None:
    source, x = made(q_latent_dim=8), torch.randn(2, 7, 24)
    empty = LatentAttention(24, 3, **SIZES, q_latent_dim=8, device="meta").eval()
    cache = Cache()
    assert empty(x.to("meta"), mask=causal(), cache=cache).shape == x.shape
    assert empty(x[:, :1].to("meta"), mask=causal(), cache=cache).is_meta and cache.length == 8
    empty.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(empty(x, mask=causal()), source(x, mask=causal()))
    for other in (copy.deepcopy(source), pickle.loads(pickle.dumps(source))):  # noqa: S301
        assert torch.equal(other(x, mask=causal()), source(x, mask=causal()))


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_transforms_of_torch_func(form: str) -> None:
    layer, x = made(form), torch.randn(4, 2, 5, 24)
    want = torch.stack([layer(one, mask=causal()) for one in x])
    got = torch.vmap(lambda one: layer(one, mask=causal()))(x)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    parameters = dict(layer.named_parameters())

    def loss(parameters: dict[str, Tensor], one: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(layer, parameters, (one,), {"mask": causal()})
        return out.square().sum()

    each = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for name in parameters:
        one = torch.autograd.grad(loss(parameters, x[1]), parameters[name])[0]
        limit = 1e-5 * one.abs().max().item()
        torch.testing.assert_close(each[name][1], one, rtol=1e-4, atol=limit)


def test_nested_inputs_equal_each_sequence_alone() -> None:
    texts = [torch.randn(n, 24) for n in (5, 1, 8)]
    nested = torch.nested.nested_tensor(texts, layout=torch.jagged)
    for layer in (made(), made(mask=causal() & window(2))):
        out = layer(nested, mask=causal())
        for got, text in zip(out.unbind(), texts, strict=True):
            want = layer(text[None], mask=causal())[0]
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"cache is given with nested tensors"):
        made()(nested, cache=Cache())


def test_dropout_follows_training_and_spares_the_weights() -> None:
    for layer in both(made(dropout=0.5)):
        x, want = torch.randn(2, 6, 24), None
        want = layer(x, mask=causal(), return_weights=True)
        torch.testing.assert_close(layer(x, mask=causal()), want[0], atol=1e-5, rtol=1e-5)
        layer.train()
        out, weights = layer(x, mask=causal(), return_weights=True)
        assert not torch.allclose(out, want[0], atol=1e-2)
        torch.testing.assert_close(weights, want[1], atol=1e-5, rtol=1e-5)


# ---- bad input


def create(**options: Any) -> Any:
    return lambda: LatentAttention(24, 3, **SIZES | options)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (create(kv_latent_dim=0), ["kv_latent_dim=0", "at least 1"]),
        (create(kv_latent_dim=2.5), ["kv_latent_dim=2.5", "integer"]),
        (create(head_dim=-1), ["head_dim=-1", "at least 1"]),
        (create(v_head_dim=0), ["v_head_dim=0", "at least 1"]),
        (create(q_latent_dim=True), ["q_latent_dim=True", "integer"]),
        (create(out_dim="3"), ["out_dim='3'", "integer"]),
        (create(rotary_dim=3), ["rotary_dim=3", "even"]),
        (create(positions=Rotary(6)), ["head_dim=6", "width 6", "rotary_dim=4"]),
        (create(positions=ALiBi(3)), ["ALiBi", "Rotary(4)"]),
        (create(positions=5), ["positions=5", "Rotary(4)"]),
        (create(norm="batch"), ["norm='batch'", "'rms'", "callable"]),
        (create(norm=nn.LayerNorm(10)), ["norm=LayerNorm", "callable"]),
        (create(scale=float("nan")), ["scale=nan", "finite"]),
        (create(scale="1"), ["scale='1'", "number"]),
        (create(mask=torch.ones(2, 2)), ["mask is Tensor", "causal()"]),
        (create(dropout=1.0), ["dropout=1.0", "below 1"]),
        (lambda: made()(torch.zeros(2, 3, 23)), ["query[2, 3, 23]", "[B, L, 24]"]),
        (lambda: made()([1.0]), ["query is a list", "cache="]),
        (lambda: made()(torch.zeros(2, 3, 24), cache=3), ["cache=3", "Cache()"]),
        (lambda: made()(torch.zeros(2, 3, 24), valid=[[True]]), ["valid", "[1, 1]", "[2, 3]"]),
        (lambda: made()(torch.zeros(2, 3, 24), position_ids=[1]), ["position_ids[1]", "[2, 3]"]),
        (lambda: made("both")(torch.zeros(2, 3, 24)), ["form='both'", "'absorbed'"]),
    ],
)
def test_words_of_errors(make: Any, words: list[str]) -> None:
    with pytest.raises((ValueError, TypeError), match=".*".join(map(re.escape, words))):
        make()
