"""Layers that keep a state of constant size in place of keys and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

from multihead import cost
from multihead.costs.shape import Kept
from multihead.costs.states import State

MINIMAX: dict[str, Any] = dict(
    model_type="minimax",
    hidden_size=64,
    num_attention_heads=8,
    num_key_value_heads=2,
    num_hidden_layers=4,
    layer_types=["linear_attention"] * 3 + ["full_attention"],
    vocab_size=100,
    intermediate_size=64,
    num_local_experts=2,
)


def _model() -> Any:
    return tf.AutoModel.from_config(tf.AutoConfig.for_model(**MINIMAX), dtype=torch.float32)


def test_linear_attention_is_not_attention() -> None:
    """Whatever the class is called: three layers of four keep eight heads of 8 x 8."""
    found = cost(MINIMAX, context_length=256, dtype="float32")
    assert [s.label for s in found.shapes] == ["L3"] and found.cache_per_token == 2 * 2 * 8 * 4
    assert [(s.label, s.kind, s.recurrent.numbers) for s in found.states] == [
        (f"L{layer}", "linear attention", 8 * 8 * 8) for layer in range(3)
    ]
    assert found.cache_per_sequence == 3 * 512 * 4
    for length in (1, 256, 10**6):
        other = found.at_length(length)
        assert other.cache("transformers") == length * 128 + 3 * 512 * 4 == other.cache()
    model = _model()
    layers = [model.get_submodule(s.name) for s in found.states]
    own = sum(p.numel() for layer in layers for p in layer.parameters())
    assert found.parameters["linear attention"] == own
    assert found.weights.parameters == sum(p.numel() for p in model.parameters())
    assert "3 with a state" in str(found) and "6,144 bytes a sequence in states" in str(found)
    assert [state["cache"] for state in found.to_dict()["states"]] == [2048] * 3


def test_arithmetic_of_a_state() -> None:
    state = State(recurrent=Kept(100, 4), convolution=Kept(12), products=50, uses=3)
    assert state.cache("bfloat16") == 424 and state.cache("int4") == 400 + 36
    assert state.prefill(7) == (2 * 7 * 50, 0, 2 * 7 * 3 * 100)
    found = cost(MINIMAX, context_length=10)
    alone = cost(MINIMAX | dict(layer_types=["full_attention"] * 4), context_length=10)
    linear = found.states[0]
    assert (
        linear.products == 5 * 64 * 64 and linear.uses == 2
    )  # queries, keys, values, gate, output
    assert found.decode().total - alone.decode().total // 4 == 3 * linear.prefill(1).total


def test_models_without_attention(capsys: pytest.CaptureFixture[str]) -> None:
    found = cost(
        {"model_type": "mamba", "hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 7},
        dtype="float16",
    )
    assert not found.shapes and [s.kind for s in found.states] == ["state space"] * 2
    # inner width 16: four inputs of the convolution, and 16 numbers in float32
    assert found.cache() == 2 * (16 * 4 * 2 + 16 * 16 * 4) and found.cache_per_token == 0
    assert "0 attention modules, 2 with a state" in str(found) and not found.alternatives()


def test_a_model_is_counted_as_its_config_is() -> None:
    """Without being run: its own tensors may be anywhere."""
    model = _model()
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    found = cost(model, dtype="float32")
    assert found.states == cost(MINIMAX, dtype="float32").states and not calls


def test_the_part_of_one_device() -> None:
    """States are divided as heads are, and what fits counts them once a sequence."""
    found = cost(MINIMAX, context_length=16, dtype="float32")
    assert found.on_device(2).cache_per_sequence == 3 * 256 * 4
    one, half_of_one = found.states[0], found.on_device(2).states[0]
    assert (half_of_one.parameters, half_of_one.products) == (
        -(-one.parameters // 2),
        one.products // 2,
    )
    fit = found.fit(10**6, weights=0)
    assert fit.max_batch_size == 10**6 // (16 * 128 + 3 * 512 * 4)
    whole, half = found.fit(), found.fit(tensor_parallel=2)
    matrices = sum(p.ndim > 1 and p.numel() for p in _model().parameters())
    assert whole.weights - half.weights == matrices // 2 * 4
