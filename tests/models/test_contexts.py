"""Models are as before after a context, also after an exception."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from multihead.models.contexts import (
    attention_implementation,
    evaluation,
    temporary_attributes,
    without_stored_weights,
)
from small import llama
from untouched import assert_untouched, snapshot


def test_evaluation_keeps_each_modules_mode() -> None:
    model = llama().train()
    model.model.layers[0].eval()
    before = snapshot(model)
    with pytest.raises(ZeroDivisionError), evaluation(model):  # noqa: PT012
        assert not any(module.training for module in model.modules())
        raise ZeroDivisionError
    assert_untouched(model, before)


def test_attributes_are_set_and_removed_for_a_while() -> None:
    module = nn.Linear(2, 2)
    module.mark = 1
    before = snapshot(module)
    context = temporary_attributes(module, mark=None, other=2)
    with pytest.raises(ZeroDivisionError), context:  # noqa: PT012
        assert not hasattr(module, "mark") and module.other == 2
        raise ZeroDivisionError
    assert_untouched(module, before)
    with temporary_attributes(module, forward=lambda x: x):
        assert module(torch.ones(2)).tolist() == [1, 1]
    assert "forward" not in vars(module)


def test_every_config_names_the_attention_that_it_named() -> None:
    model = llama()
    model.model.layers[0].self_attn.config._attn_implementation_internal = "eager"
    before = snapshot(model)
    with attention_implementation(model, "multihead"):
        assert model.config._attn_implementation == "multihead"
    assert_untouched(model, before)


def test_configs_ask_for_no_weights_for_a_while() -> None:
    model = llama(output_attentions=True, attn_implementation="eager")
    before = snapshot(model)
    with pytest.raises(ZeroDivisionError), without_stored_weights(model) as had:  # noqa: PT012
        assert had and not model.config.output_attentions
        raise ZeroDivisionError
    assert model.config.output_attentions
    assert_untouched(model, before)
    with without_stored_weights(llama()) as had:
        assert not had
