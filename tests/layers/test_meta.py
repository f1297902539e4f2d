"""The meta device gives shapes and dtypes: of the operator, layers, blocks and caches; and models
that are created on it are filled later.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from multihead import Cache, MultiHeadAttention, TransformerBlock, WindowCache, attention, masks
from multihead.layers.position_bias import ALiBi, RelativeBias, T5Bias
from multihead.layers.rotary import Rotary
from multihead.ops import AlibiBias

CAUSAL = masks.causal()


def on(device: str, x: Any) -> Any:
    return x.to(device) if isinstance(x, Tensor) else x


def shapes(result: Any) -> Any:
    if isinstance(result, tuple):
        return [shapes(x) for x in result]
    return result.shape, result.dtype


# options as functions of the device of their tensors
OPTIONS: dict[str, Callable[[str], dict[str, Any]]] = {
    "plain": lambda d: {},
    "causal": lambda d: {"mask": CAUSAL},
    "window": lambda d: {"mask": CAUSAL & masks.window(1)},
    "lengths": lambda d: {"mask": masks.padding(torch.tensor([2, 5], device=d))},
    "valid": lambda d: {"mask": masks.padding(valid=torch.ones(2, 5, device=d).bool()) & CAUSAL},
    "documents": lambda d: {"mask": masks.documents(torch.zeros(5, device=d).long()) & CAUSAL},
    "prefix": lambda d: {"mask": masks.prefix(torch.ones(2, device=d).long())},
    "offsets": lambda d: {"mask": masks.causal(torch.ones(2, device=d).long())},
    "intervals": lambda d: {
        "mask": masks.intervals(*(torch.full((2, 5), n, device=d) for n in (0, 3)))
    },
    "dense": lambda d: {"mask": torch.ones(5, 5, device=d).bool()},
    "floating mask": lambda d: {"mask": torch.zeros(5, 5, device=d)},
    "bias": lambda d: {"bias": torch.zeros(4, 5, 5, device=d)},
    "alibi": lambda d: {
        "bias": AlibiBias(torch.ones(4, device=d), *(torch.arange(5, device=d),) * 2)
    },
    "sinks": lambda d: {"sinks": torch.zeros(4, device=d)},
    "softcap": lambda d: {"softcap": 2.0},
    "dropout": lambda d: {"dropout": 0.5},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operator(name: str, backend: str, dtype: torch.dtype) -> None:
    sizes = [(2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 6)]
    for lse, weights in itertools.product([False, True], repeat=2):
        found = []
        for device in ("cpu", "meta"):
            qkv = [torch.zeros(s, dtype=dtype, device=device, requires_grad=True) for s in sizes]
            asked = dict(return_lse=lse, return_weights=weights, backend=backend)
            result = attention(*qkv, **OPTIONS[name](device), **asked)
            found.append(shapes(result))
            first = result[0] if isinstance(result, tuple) else result
            assert first.device.type == device
            first.sum().backward()
            assert [x.grad.shape for x in qkv] == [x.shape for x in qkv]
            with torch.no_grad():
                assert shapes(attention(*qkv, **OPTIONS[name](device), **asked)) == found[-1]
        assert found[0] == found[1]


POSITIONS: dict[str, Callable[[], nn.Module | None]] = {
    "none": lambda: None,
    "rotary": lambda: Rotary(6),
    "linear": lambda: Rotary(6, scaling={"rope_type": "linear", "factor": 2.0}),
    "dynamic": lambda: Rotary(
        6, scaling={"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 4}
    ),
    "yarn": lambda: Rotary(
        6, scaling={"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4}
    ),
    "alibi": lambda: ALiBi(4),
    "t5": lambda: T5Bias(4),
    "relative": lambda: RelativeBias(4, 3),
}
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_kv_heads": 2},
    "everything": {
        "num_kv_heads": 1,
        "qk_norm": "rms",
        "softcap": 3.0,
        "sinks": True,
        "gate": "head",
    },
}


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("extra", EXTRAS)
def test_models_created_on_meta(positions: str, extra: str) -> None:
    """Shapes there; the values of the source once filled by `load_state_dict`, either way."""

    def build() -> nn.Module:
        return nn.Sequential(
            *(
                TransformerBlock(
                    24, 4, hidden_dim=32, positions=POSITIONS[positions](), **EXTRAS[extra]
                )
                for _ in range(2)
            )
        )

    torch.manual_seed(0)
    source = build().eval()
    x = torch.randn(2, 7, 24)
    want = source(x)
    with torch.device("meta"):
        assigned, emptied = build().eval(), build().eval()
    assert assigned(x.to("meta")).shape == want.shape
    assigned.load_state_dict(source.state_dict(), assign=True)
    emptied.to_empty(device="cpu").load_state_dict(source.state_dict())
    moved = build().to("meta").to_empty(device="cpu")
    moved.load_state_dict(source.state_dict())
    for model in (assigned, emptied, moved.eval()):
        assert torch.equal(model(x), want)
    # encodings are computed where the data is, also inside torch.device("meta")
    with torch.device("meta"):
        encoding = POSITIONS[positions]()
    if isinstance(encoding, Rotary):
        q = torch.randn(1, 1, 7, 6)
        assert torch.equal(encoding(q), POSITIONS[positions]()(q))
    if isinstance(encoding, ALiBi):
        assert torch.equal(encoding.slopes, ALiBi(4).slopes) and not encoding.slopes.is_meta


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("bias_kv", [False, True])
def test_layers_with_caches(positions: str, extra: str, bias_kv: bool) -> None:
    caches: list[Callable[[], Cache]] = [
        Cache,
        lambda: Cache(16),
        lambda: WindowCache(2),
        lambda: WindowCache(2, sinks=1),
    ]
    layers = [
        MultiHeadAttention(
            24, 4, positions=POSITIONS[positions](), bias_kv=bias_kv, **EXTRAS[extra]
        ).to(device)
        for device in ("cpu", "meta")
    ]
    for make in caches:
        both = [make(), make()]
        for part in (slice(0, 4), slice(4, 5), slice(5, 7)):
            found = []
            for layer, cache in zip(layers, both):
                device = layer.q_proj.weight.device
                x = torch.zeros(2, 7, 24, device=device)[:, part]
                found.append(shapes(layer(x, mask=CAUSAL, cache=cache, return_weights=True)))
                assert cache.key_positions.device == device
            assert found[0] == found[1] and both[0].length == both[1].length
        for cache in both:
            cache.reorder([1, 1, 0])
            assert cache.update(*(cache.update(*new(cache)).k[:, :, :1],) * 2).k.shape[0] == 3
            cache.crop(0)


def new(cache: Cache) -> tuple[Tensor, Tensor]:
    assert cache._k is not None
    k = cache._k[:, :, :1]
    return k, k


def test_rows_of_unequal_lengths_on_meta() -> None:
    """A `valid` without values counts as one without padding; lengths that are known are kept."""
    layer = MultiHeadAttention(24, 4, device="meta")
    x, valid = torch.zeros(2, 4, 24, device="meta"), torch.ones(2, 4, device="meta").bool()
    for cache in (Cache(), WindowCache(2)):
        out, weights = layer(x, mask=CAUSAL, cache=cache, valid=valid, return_weights=True)
        assert out.shape == (2, 4, 24) and weights.shape == (2, 4, 4, 4)
        assert layer(x, valid=valid, mask=CAUSAL).is_meta
    cache = Cache()
    layer(x, mask=CAUSAL, cache=cache)
    cache.crop([1, 3])
    assert layer(x, mask=CAUSAL, cache=cache, return_weights=True)[1].shape == (2, 4, 4, 7)
    assert cache.length == 7


def test_cross_attention_on_meta() -> None:
    block = TransformerBlock(24, 4, hidden_dim=32, cross_attention=True, device="meta")
    x, memory = (torch.zeros(2, n, 24, device="meta") for n in (4, 6))
    cache = Cache()
    assert block(x, memory, memory_cache=cache, memory_mask=masks.padding([6, 3])).shape == x.shape
    assert block(x[:, :1], memory_cache=cache).shape == (2, 1, 24)


@pytest.mark.parametrize("make", [Cache, lambda: Cache(9), lambda: WindowCache(2, sinks=1)])
def test_steps_on_fake_tensors(make: Callable[[], Cache]) -> None:
    with FakeTensorMode():
        layer, cache = MultiHeadAttention(8, 2, positions=Rotary(4)), make()
        for length in (5, 1, 1):
            x = torch.randn(2, length, 8)
            assert layer(x, mask=CAUSAL, cache=cache).shape == x.shape
    assert cache.length == 7
