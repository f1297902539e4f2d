"""The library's own layers: predicted from the module, held against what it holds, computes and
caches.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from families import FAMILIES, model_of
from multihead import Cache, MultiHeadAttention, TransformerBlock, WindowCache, cost
from multihead.costs import Cost
from multihead.layers import ALiBi, LatentAttention, Rotary, replace_attention
from multihead.masks import causal, window

BATCH, LENGTH, WIDTH = 2, 7, 32
X = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


def operations(layer: nn.Module, *args: Tensor, **options: Any) -> int:
    """Floating-point operations of one call, as torch counts them."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        layer(*args, **options)
    return int(counter.get_total_flops())


def require_equal(layer: Any, found: Cost, cache: Cache) -> None:
    """Parameters, a full pass, a cache after `LENGTH` tokens, and the token after them."""
    assert sum(found.parameters.values()) == sum(p.numel() for p in layer.parameters())
    assert "other" not in found.parameters
    assert found.prefill(full=True).total == operations(layer, X)
    with torch.no_grad():
        layer(X, mask=causal(), cache=cache)
    assert found.cache() == found.batch_size * LENGTH * found.cache_per_token
    assert found.cache() == cache.nbytes
    assert found.decode().total == operations(layer, X[:, :1], mask=causal(), cache=cache)


def predicted(layer: nn.Module, **options: Any) -> Cost:
    sizes = dict(context_length=LENGTH, batch_size=BATCH, dtype="float32")
    return cost(layer, **sizes | options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(bias=False),
        dict(bias=False, out_bias=True, out_dim=20),
        dict(num_kv_heads=2, positions=Rotary(8)),
        dict(num_kv_heads=1, head_dim=12, positions=ALiBi(4)),
        dict(gate="head"),
        dict(gate="elementwise", bias=False),
        dict(qk_norm="rms", softcap=2.0),
        dict(qk_norm="layer", sinks=True),
        dict(bias_kv=True),
        dict(qk_norm="rms_all", scale=0.5),
        dict(qk_norm="layer_each", num_kv_heads=2, clip_qkv=1.0),
    ],
    ids=lambda options: ",".join(options),
)
def test_multi_head_attention(options: dict[str, Any]) -> None:
    layer = MultiHeadAttention(WIDTH, 4, **options)
    require_equal(layer, predicted(layer), Cache())


LATENT: dict[str, Any] = dict(kv_latent_dim=10, rotary_dim=6, head_dim=8)


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(v_head_dim=5, bias=True),
        dict(q_latent_dim=12),
        dict(q_latent_dim=12, bias=True, out_bias=False, out_dim=20),
        dict(norm="layer", q_latent_dim=10),
        dict(norm=None),
        dict(kv_latent_dim=32, head_dim=2, v_head_dim=1),
    ],
    ids=lambda options: ",".join(options),
)
def test_latent_attention(options: dict[str, Any]) -> None:
    layer = LatentAttention(WIDTH, 4, **LATENT | options)
    found = predicted(layer)
    require_equal(layer, found, Cache())
    (shape,) = found.shapes
    assert (shape.head_dim, shape.num_kv_heads, shape.cached) == (layer.head_dim + 6, 4, True)
    assert found.cache_per_token == 4 * (layer.kv_latent_dim + 6)
    assert found.cache("transformers") == found.cache()
    assert ("norms" in found.parameters) == (options.get("norm", "rms") is not None)


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_a_form_for_every_call(form: str) -> None:
    layer = LatentAttention(WIDTH, 4, **LATENT, v_head_dim=5)
    auto = predicted(layer)
    layer.form = form
    found = predicted(layer)
    require_equal(layer, found, Cache())
    if form == "absorbed":
        assert found.decode() == auto.decode() and found.prefill() != auto.prefill()
    else:
        assert found.prefill() == auto.prefill() and found.decode() == auto.decode(expanded=True)


@pytest.mark.parametrize("held", [1, 2, 7, 40])
@pytest.mark.parametrize("latent_dim", [3, 24])
def test_the_form_that_a_step_takes(latent_dim: int, held: int) -> None:
    """It depends on the number of keys that the cache holds, as the layer decides."""
    sizes: Any = dict(kv_latent_dim=latent_dim, rotary_dim=2, head_dim=1, v_head_dim=1)
    layer = LatentAttention(WIDTH, 4, **sizes)
    found = predicted(layer, context_length=held)
    absorbs = found.decode() != found.decode(expanded=True)
    assert absorbs == layer._absorbs(1, held + 1) == (held > 1 or latent_dim == 3)


def test_other_heads_than_latent_attention() -> None:
    """They are counted as layers of those heads, whatever form the latent's steps take."""
    layer = LatentAttention(WIDTH, 4, **LATENT)
    others = dict(predicted(layer).alternatives())
    assert others["MHA"].cache_per_token == 4 * 2 * 4 * 8
    assert others["MLA"].shapes[0].form is None


def test_keys_and_values_of_other_widths() -> None:
    layer = MultiHeadAttention(WIDTH, 4, kdim=20, vdim=12)
    found = predicted(layer)
    assert found.parameters == {"query": 1056, "key": 672, "value": 416, "output": 1056}
    assert found.prefill(full=True).total == operations(layer, X, X[..., :20], X[..., :12])


def test_a_window() -> None:
    """The bytes of `WindowCache`, which holds the tokens before the query and the query's."""
    layer, cache = MultiHeadAttention(WIDTH, 4, num_kv_heads=2), WindowCache(left=2)
    found = predicted(layer, window=3)
    with torch.no_grad():
        for i in range(LENGTH):
            layer(X[:, i : i + 1], cache=cache)
    assert found.cache() == cache.nbytes == 3 * BATCH * found.cache_per_token
    assert found.decode().total == operations(layer, X[:, :1], cache=cache)
    latent, cache = LatentAttention(WIDTH, 4, **LATENT), WindowCache(left=2)
    found = predicted(latent, window=3)
    with torch.no_grad():
        latent(X, mask=causal() & window(left=2), cache=cache)
    assert found.cache() == cache.nbytes == 3 * BATCH * 4 * (10 + 6)
    assert found.decode().total == operations(latent, X[:, :1], cache=cache)


def test_a_mask_of_the_layer() -> None:
    def shape(mask: Any) -> Any:
        found = predicted(LatentAttention(WIDTH, 4, **LATENT, mask=mask)).shapes[0]
        (other,) = predicted(MultiHeadAttention(WIDTH, 4, mask=mask)).shapes
        for name in ("causal", "window", "cached", "chunked"):
            assert getattr(found, name) == getattr(other, name)
        return found

    assert (shape(causal()).causal, shape(causal()).window) == (True, None)
    assert shape(causal() & window(left=2)).window == 3
    assert shape(causal() & window(left=2)).cache("float32", LENGTH) == 3 * 4 * 16
    both = shape(window(left=2, right=2))
    assert (both.causal, both.window, both.cached) == (False, 2, False)
    allowed = window(left=2, right=2).dense(LENGTH, LENGTH)
    assert both.pairs(LENGTH, LENGTH) == int(allowed.sum())


@pytest.mark.parametrize("name", ["gemma3", "bert", "t5", "vit", "deepseek_v3"])
def test_layers_in_the_place_of_a_models_attention(name: str) -> None:
    """Masks, windows and caches are those that the model states; parameters and arithmetic are
    equal.
    """
    model = copy.deepcopy(model_of(next(f for f in FAMILIES if f.name == name)))
    want = cost(model, context_length=20)
    found = cost(replace_attention(model), context_length=20)
    for got, as_before in zip(found.shapes, want.shapes, strict=True):
        for field in ("label", "causal", "window", "cached", "cross", "encoder", "num_kv_heads"):
            assert getattr(got, field) == getattr(as_before, field), (got.label, field)
    assert sum(found.parameters.values()) == sum(want.parameters.values())
    assert found.prefill() == want.prefill() and found.decode() == want.decode()
    assert found.cache() == want.cache()


def test_blocks() -> None:
    blocks = nn.ModuleList(
        TransformerBlock(WIDTH, 4, hidden_dim=40, num_kv_heads=2, cross_attention=True)
        for _ in range(2)
    )
    shapes = predicted(blocks).shapes
    assert [(shape.label, shape.cross) for shape in shapes] == [
        ("L0", False),
        ("L0.cross", True),
        ("L1", False),
        ("L1.cross", True),
    ]
    counted = {
        s.name: sum(p.numel() for p in blocks.get_submodule(s.name).parameters()) for s in shapes
    }
    assert {shape.name: sum(shape.parameters.values()) for shape in shapes} == counted
