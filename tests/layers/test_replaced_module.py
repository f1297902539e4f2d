"""Where the weights of an attention module go, and how they come back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from families import FAMILIES, model_of
from multihead.errors import MultiheadError
from multihead.layers.replaced_module import convert_unit, find_units, rebuild_unit, swap_unit
from small import llama


def family(name: str) -> nn.Module:
    return copy.deepcopy(model_of(next(f for f in FAMILIES if f.name == name)))


def test_units_are_innermost() -> None:
    bert, t5 = find_units(family("bert")), find_units(family("t5"))
    assert {u.path.rpartition(".")[2] for u in bert} == {"self"}
    assert all(u.parent is not None and u.whole is u.parent for u in bert)
    assert {type(u.module).__name__ for u in t5} == {"T5Attention"}
    assert all(u.parent is None and u.whole is u.module for u in t5)


@pytest.mark.parametrize("name", ["gpt2", "phi3", "gemma3", "whisper", "bert", "deepseek_v3"])
def test_changed_weights_come_back(name: str) -> None:
    """A module that is restored computes what its layer does, whatever became of the weights."""
    model = family(name)
    unit = find_units(model)[0]
    converted = convert_unit(unit, model)
    swap_unit(unit, converted, model)
    layer = converted.layer
    with torch.no_grad():
        for weight in layer.parameters():
            weight.mul_(1.25)
    attention = model.get_submodule(unit.path)
    parent = model.get_submodule(unit.path.rpartition(".")[0])
    for path, module in rebuild_unit(unit.path, attention, parent).items():
        model.set_submodule(path, module)
    assert model.get_submodule(unit.path) is unit.module
    again = convert_unit(find_units(model)[0], model).layer
    for (key, got), want in zip(again.named_parameters(), layer.parameters(), strict=True):
        if want.requires_grad or want.any():
            torch.testing.assert_close(got, want, msg=key)


def test_hooks_and_own_forwards_are_refused() -> None:
    model = llama()
    unit = find_units(model)[0]
    unit.module.q_proj.forward = unit.module.q_proj.forward
    with pytest.raises(MultiheadError, match=r"layers\.0\.self_attn .*Linear in it has hooks, or"):
        convert_unit(unit, model)
