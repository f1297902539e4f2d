"""The short way of a step: the same numbers, and only where nothing else was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from multihead.layers import MultiHeadAttention, Rotary, replace_attention
from multihead.layers import model_attention as wrapper
from multihead.layers.decode_step import decode_step
from multihead.masks import causal
from small import IDS, llama

IDENTITY = torch.nn.Identity()


def layer(**options: Any) -> MultiHeadAttention:
    torch.manual_seed(1)
    given: dict[str, Any] = dict(num_kv_heads=2, head_dim=6, positions=Rotary(6), bias=True)
    return MultiHeadAttention(20, 4, **given | options).eval()


def angles(batch: int) -> tuple[Tensor, Tensor]:
    cos, sin = Rotary(6).cos_sin(torch.arange(3, 3 + batch)[:, None])
    return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


def filled(batch: int) -> tf.DynamicCache:
    cache = tf.DynamicCache()
    keys = torch.randn(2, batch, 2, 9, 6, generator=torch.Generator().manual_seed(2))
    cache.update(keys[0], keys[1], 0)
    return cache


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 3])
def test_equals_the_general_way(batch: int) -> None:
    ours, x = layer(), torch.randn(batch, 1, 20)
    cos, sin = angles(batch)
    cache, other = filled(batch), filled(batch)
    for _ in range(3):
        got = decode_step(ours, x, cos, sin, cache, 0)
        assert got is not None
        want = ours(x, cos_sin=(cos[..., :3], sin[..., :3]), cache=wrapper.ModelCache(other, 0))
        torch.testing.assert_close(got, want)
    assert torch.equal(cache.layers[0].keys, other.layers[0].keys)
    assert torch.equal(cache.layers[0].values, other.layers[0].values)
    nan = decode_step(ours, x * torch.nan, cos, sin, cache, 0)
    assert nan is not None and nan.isnan().all()


CHANGES: dict[str, Callable[[MultiHeadAttention], Any]] = {
    "mask": lambda x: setattr(x, "mask", causal()),
    "softcap": lambda x: setattr(x, "softcap", 3.0),
    "clip": lambda x: setattr(x, "clip_qkv", 3.0),
    "hook": lambda x: x.register_forward_hook(lambda *_: None),
    "hook of positions": lambda x: x.positions.register_forward_pre_hook(lambda *_: None),
    "forward": lambda x: setattr(x, "forward", x.forward),
    "dropout": lambda x: (setattr(x, "dropout", 0.1), x.train()),
    "positions": lambda x: setattr(x, "positions", IDENTITY),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "sinks": {"sinks": True},
    "gate": {"gate": "head"},
    "norm": {"qk_norm": "rms"},
    "key and value": {"bias_kv": True},
    "interleaved": {"positions": Rotary(6, interleaved=True)},
    "partial": {"positions": Rotary(6, rotary_dim=4)},
    "float64": {"dtype": torch.float64},
}


@torch.no_grad()
@pytest.mark.parametrize("name", [*CHANGES, *OPTIONS])
def test_whatever_else_a_layer_has_goes_the_general_way(name: str) -> None:
    ours = layer(**OPTIONS.get(name, {}))
    CHANGES.get(name, lambda _: None)(ours)
    x, cache = torch.randn(1, 1, 20, dtype=ours.out_proj.weight.dtype), filled(1)
    assert decode_step(ours, x, *angles(1), cache, 0) is None
    assert cache.get_seq_length() == 9


def test_so_do_gradients_modes_and_several_tokens() -> None:
    ours, x, cache = layer(), torch.randn(1, 1, 20), filled(1)
    assert decode_step(ours, x, *angles(1), cache, 0) is None  # gradients
    with torch.no_grad():
        assert decode_step(ours, x.expand(1, 2, 20), *angles(1), cache, 0) is None
        given = angles(1)
        with TorchFunctionMode():
            assert decode_step(ours, x, *given, cache, 0) is None
        with torch.autocast("cpu", torch.bfloat16):
            assert decode_step(ours, x, *angles(1), cache, 0) is None
        handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
        assert decode_step(ours, x, *angles(1), cache, 0) is None
        handle.remove()
    assert cache.get_seq_length() == 9


def test_models_generate_by_it_where_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    model = replace_attention(llama())
    found = []
    calls: list[bool] = []
    for way in ("short", "general"):

        def step(*args: Any, way: str = way) -> Tensor | None:
            out = decode_step(*args) if way == "short" else None
            calls.append(out is not None)
            return out

        monkeypatch.setattr(wrapper, "decode_step", step)
        options: dict[str, Any] = dict(do_sample=False, pad_token_id=0, max_new_tokens=8)
        found.append(model.generate(IDS, **options))
    assert torch.equal(*found) and calls.count(True) == 2 * 7
