"""Weights as modules apply them."""

from __future__ import annotations

import copy
from typing import Any

import accelerate
import peft
import pytest
import torch
from torch import Tensor, nn

from multihead.models.weights import (
    OURS,
    apply_quietly,
    describe_state,
    has_hooks,
    loaded,
    read_embedding,
    read_projection,
)
from projections_of_all_kinds import KINDS, sharded


def linear(inputs: int = 24, outputs: int = 16) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_projection_is_what_it_does(kind: str) -> None:
    make, twin = KINDS[kind]
    layer = linear()
    want, module = twin(copy.deepcopy(layer)), make(layer)
    found = read_projection(module, torch.empty(0), hooks=has_hooks(module))
    assert found.weight.shape == (24, 16) and found.error < 1e-5
    torch.testing.assert_close(found.weight, want.weight.T, atol=1e-6, rtol=1e-5)  # type: ignore[union-attr]
    torch.testing.assert_close(found.bias, want.bias, atol=1e-6, rtol=1e-5)


def test_a_wide_projection_is_measured_in_parts() -> None:
    layer = linear(2500, 3)
    wrapped = nn.utils.parametrizations.weight_norm(layer)
    torch.testing.assert_close(read_projection(wrapped).weight, wrapped.weight.T)


@pytest.mark.filterwarnings("ignore")
def test_a_module_that_quantises_what_enters_it() -> None:
    layer = linear()
    quantised = torch.ao.quantization.quantize_dynamic(
        nn.Sequential(layer), {nn.Linear}, dtype=torch.qint8
    )[0]
    found = read_projection(quantised)
    assert torch.equal(found.weight, quantised.weight().dequantize().T)
    assert 1e-4 < found.error < 0.06
    relu = nn.Sequential(layer, nn.ReLU())
    relu.in_features = 24  # type: ignore[assignment]
    assert read_projection(relu).error > 0.06


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    layer = nn.utils.parametrizations.weight_norm(linear()).to(dtype)
    for like in (None, torch.empty(0), torch.empty(0, dtype=dtype)):
        found = read_projection(layer, like)
        assert found.weight.dtype == dtype
        torch.testing.assert_close(found.weight, layer.weight.T, atol=1e-3, rtol=1e-2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wrapped = nn.utils.parametrizations.weight_norm(linear())
        assert read_projection(wrapped, torch.empty(0, dtype=torch.bfloat16)).error < 1e-5


def test_weights_that_accelerate_keeps_elsewhere() -> None:
    model = nn.Sequential(
        nn.Embedding(7, 24), linear(), nn.utils.parametrizations.weight_norm(linear(16))
    )
    want = copy.deepcopy(model)
    accelerate.cpu_offload(model, execution_device="cpu")
    assert model[1].weight.is_meta
    for n in (1, 2):
        found = read_projection(model[n])
        torch.testing.assert_close(found.weight, want[n].weight.T)
        torch.testing.assert_close(found.bias, want[n].bias)
    assert torch.equal(read_embedding(model[0]), want[0].weight)
    with loaded(model[1]):
        assert not model[1].weight.is_meta
    assert model[1].weight.is_meta


def test_an_embedding_of_another_kind_is_what_it_returns() -> None:
    table = nn.utils.parametrizations.weight_norm(nn.Embedding(9, 4))
    torch.testing.assert_close(read_embedding(table), table.weight.detach())
    config = peft.LoraConfig(target_modules=["0"], init_lora_weights=False, r=2)
    adapted = peft.get_peft_model(nn.Sequential(nn.Embedding(9, 4)), config).train()
    ids = torch.arange(9)
    torch.testing.assert_close(read_embedding(adapted.base_model.model[0]), adapted.eval()(ids))


def test_nothing_is_left_in_the_module_and_dropout_is_left_out() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.drop, self.in_features = linear(), nn.Dropout(0.5), 24

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.drop(x))

    module = Dropped().train()
    state = torch.get_rng_state()
    found = read_projection(module)
    torch.testing.assert_close(found.weight, module.inner.weight.T)
    assert module.training and module.drop.training
    assert torch.equal(state, torch.get_rng_state())
    x = torch.randn(1, 5, 24)
    torch.testing.assert_close(apply_quietly(module, x), module.inner(x).detach())


def test_hooks_of_others_and_of_this_library() -> None:
    layer, calls = linear(), []

    def ours(*_: Any) -> None:
        calls.append("ours")

    def theirs(*_: Any, **__: Any) -> None:
        calls.append("theirs")

    vars(ours)[OURS] = True
    layer.register_forward_hook(ours)
    assert not has_hooks(layer)
    layer.register_forward_hook(theirs, with_kwargs=True)
    layer.register_forward_pre_hook(theirs, with_kwargs=True)
    assert has_hooks(layer)
    read_projection(layer)
    assert not calls
    apply_quietly(layer, torch.randn(1, 1, 24), hooks=True)
    assert calls == ["theirs", "theirs"]
    apply_quietly(sharded(linear()), torch.randn(1, 1, 24), hooks=True)


def test_what_changes_the_weights_changes_their_state() -> None:
    layer = linear()
    before = describe_state(layer)
    assert before == describe_state(layer)
    with torch.no_grad():
        layer.weight.mul_(2)
    assert before != describe_state(layer)
    wrapped: Any = nn.Sequential(layer)
    wrapped.active_adapters = ["one"]
    before = describe_state(wrapped)
    wrapped.active_adapters.append("two")
    assert before != describe_state(wrapped)
