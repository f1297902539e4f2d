"""`prune`, `share` and `tune` of a model that is being read or has heads ablated: they take the model
as it came, and leave the reading and the model as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import multihead
from multihead.errors import MultiheadError

TEXT = "One head attends to the previous word, and another one to itself. " * 20


def prune(model: Any, tokenizer: Any) -> Any:
    return multihead.prune(
        model, TEXT, tokenizer=tokenizer, remove=3, criterion="fisher", context=32, tokens=300
    )


def share(model: Any, tokenizer: Any) -> Any:
    return multihead.share(
        model, TEXT, tokenizer=tokenizer, num_kv_heads=4, layers=["L1"], tokens=100
    )


def state(model: Any) -> tuple[Any, ...]:
    """Weights, attributes and hooks of all modules."""
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    modules = [
        (name, sorted(vars(module)), len(module._forward_hooks), len(module._forward_pre_hooks))
        for name, module in model.named_modules()
    ]
    return weights, modules, model.config._attn_implementation, model.training


def assert_same_state(a: tuple[Any, ...], b: tuple[Any, ...]) -> None:
    torch.testing.assert_close(a[0], b[0], rtol=0, atol=0)
    assert a[1:] == b[1:]


@pytest.mark.parametrize("change", [prune, share])
def test_within_a_reading(change: Callable[..., Any]) -> None:
    model, tokenizer = multihead.load_builtin()
    inputs, before = tokenizer(TEXT[:200], return_tensors="pt"), state(model)
    expected = change(model, tokenizer)
    tables = []
    for with_change in (False, True):
        with torch.no_grad(), multihead.reading(model) as reading:
            model(**inputs)
            if with_change:
                result = change(model, tokenizer)
            model(**inputs)
        tables.append(reading.table())
    assert_same_state(state(model), before)
    torch.testing.assert_close(result.model.state_dict(), expected.model.state_dict())
    for column in ("entropy", "norm", "share"):
        torch.testing.assert_close(
            torch.tensor(tables[1].value(column)), torch.tensor(tables[0].value(column))
        )


@pytest.mark.parametrize("change", [prune, share])
def test_heads_ablated_around_it_dont_count(change: Callable[..., Any]) -> None:
    model, tokenizer = multihead.load_builtin()
    before, expected = state(model), change(model, tokenizer)
    with multihead.ablate_heads(model, ["L0.H0", "L1.H3"]):
        result = change(model, tokenizer)
    assert_same_state(state(model), before)
    torch.testing.assert_close(result.model.state_dict(), expected.model.state_dict())


@pytest.mark.parametrize("change", [prune, share])
def test_an_exception_in_the_middle_leaves_the_model_as_it_came(
    change: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = multihead.load_builtin()
    before, calls = state(model), 0
    forward = type(model.model.layers[1].mlp).forward

    def fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise RuntimeError("in the middle")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model.model.layers[1].mlp), "forward", fail)
    with pytest.raises((RuntimeError, MultiheadError), match="in the middle"):
        change(model, tokenizer)
    assert_same_state(state(model), before)
