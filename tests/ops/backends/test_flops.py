"""`FlopCounterMode` counts the operator as it counts torch's, whatever the backend and the options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import multihead
from multihead import Cache, MultiHeadAttention, attention
from multihead.masks import causal, documents, window
from multihead.ops.backends import flops, jit

SHAPES = {
    "equal heads": (2, 4, 4, 6, 6, 8, 8),
    "grouped": (2, 4, 2, 6, 9, 8, 8),
    "one key/value head": (1, 6, 1, 5, 7, 8, 8),
    "narrow values": (2, 4, 2, 6, 6, 8, 4),
    "large": (1, 4, 2, 200, 200, 64, 64),
    "a step": (1, 4, 2, 1, 300, 64, 64),
}
BACKENDS = ("auto", "torch", "sdpa", *(() if jit.MISSING else ("cpu",)))


def inputs(shape: tuple[int, ...], device: str = "cpu", grad: bool = True) -> list[Tensor]:
    batch, heads, groups, length, keys, width, values = shape
    sizes = [(heads, length, width), (groups, keys, width), (groups, keys, values)]
    return [torch.randn(batch, *s, device=device, requires_grad=grad) for s in sizes]


def count(run: Any, *inputs: Any, **options: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        run(*inputs, **options)
    return counter.get_total_flops()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    ("backend", "device"), [*((b, "cpu") for b in BACKENDS), ("auto", "meta"), ("torch", "meta")]
)
def test_as_torch_counts_its_operator(backend: str, shape: tuple[int, ...], device: str) -> None:
    batch, heads, _, length, keys, width, values = shape
    full = 2 * batch * heads * length * keys * (width + values)
    for grad in (False, True):
        q, k, v = inputs(shape, device, grad)
        assert full == count(F.scaled_dot_product_attention, q, k, v, enable_gqa=True)
        for options in ({}, {"mask": causal()}):
            assert count(attention, q, k, v, backend=backend, **options) == full


OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"mask": causal() & window(2)},
    "documents": {"mask": documents([0, 0, 1, 1, 1, 1])},
    "dense": {"mask": torch.ones(6, 6, dtype=torch.bool).tril()},
    "bias": {"bias": torch.randn(4, 6, 6)},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": torch.zeros(4)},
    "lse": {"return_lse": True},
    "weights": {"return_weights": True},
    "dropout": {"dropout": 0.5},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("grad", [False, True])
def test_options_change_nothing(options: dict[str, Any], grad: bool) -> None:
    q, k, v = inputs(SHAPES["equal heads"], grad=grad)
    assert count(attention, q, k, v, **options) == 2 * 2 * 4 * 6 * 6 * (8 + 8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_backward_pass_counts_the_scores_again(backend: str) -> None:
    q, k, v = inputs(SHAPES["equal heads"])
    out = attention(q, k, v, causal(), backend=backend)
    assert count(out.sum().backward) == 2 * 2 * 4 * 6 * 6 * (3 * 8 + 2 * 8)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert count(out.sum().backward) == 2 * 2 * 4 * 6 * 6 * (3 * 8 + 2 * 8)


def test_layers_and_steps_of_a_cache() -> None:
    layer = MultiHeadAttention(16, 4, num_kv_heads=2)
    x, cache = torch.randn(2, 6, 16), Cache()
    projections = 2 * 2 * 6 * 16 * (16 + 8 + 8 + 16)
    assert count(layer, x) == projections + 2 * 2 * 4 * 6 * 6 * 8
    layer(x, mask=causal(), cache=cache)
    step = count(layer, x[:, :1], mask=causal(), cache=cache)
    assert step == projections // 6 + 2 * 2 * 4 * 1 * 7 * 8


def test_registering_twice_changes_nothing() -> None:
    flops.register_flops()
    assert multihead.attention is attention
