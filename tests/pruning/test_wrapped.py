"""Models inside wrappers are pruned, tuned, timed and counted as the models themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import multihead
from multihead.pruning.latency import measure_cache
from multihead.pruning.losses import evaluate


class Forwarding(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return self.inner(x).logits


WRAPPERS = [nn.DataParallel, nn.Sequential, Forwarding]
TEXT = "One head attends to the previous word, and another one to itself. " * 40


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_model_is_pruned_and_tuned(wrapper: Callable[[Any], Any]) -> None:
    model, tokenizer = multihead.load_builtin()
    plan = multihead.Plan(("L0.H3", "L1.H2"))
    options: dict[str, Any] = dict(tokenizer=tokenizer, remove=plan, context=32, tokens=200)
    want = multihead.prune(model, TEXT, **options)
    got = multihead.prune(wrapper(model), TEXT, **options)
    assert got.num_heads == want.num_heads and type(got.model) is type(want.model)
    assert got.loads_in_transformers == want.loads_in_transformers
    ids = torch.tensor([tokenizer("the cat sat")["input_ids"]])
    with torch.no_grad():
        torch.testing.assert_close(got.model(ids).logits, want.model(ids).logits)
    multihead.tune(
        wrapper(got.model), wrapper(model), TEXT, tokenizer=tokenizer, steps=1, context=32
    )
    with torch.no_grad():
        assert not torch.equal(got.model(ids).logits, want.model(ids).logits)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_model_is_measured(wrapper: Callable[[Any], Any]) -> None:
    model, tokenizer = multihead.load_builtin()
    got = evaluate(wrapper(model), TEXT, tokenizer=tokenizer, context=32, tokens=100)
    want = evaluate(model, TEXT, tokenizer=tokenizer, context=32, tokens=100)
    assert got.perplexity == want.perplexity
    assert measure_cache(wrapper(model), 10) == measure_cache(model, 10)
    got, want = (multihead.cost(m, context_length=64) for m in (wrapper(model), model))
    assert str(got) == str(want)
