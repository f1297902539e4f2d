"""Rows by the model's own attention function are those of its own pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from families import FAMILIES, WORDS, model_of
from multihead.models import Tap, instrument
from multihead.models.own_attention import OwnAttention, find_function
from small import llama


class Kept(Tap):
    def __init__(self) -> None:
        self.calls: list[tuple[OwnAttention, torch.Tensor]] = []

    def attended(self, site: Any, own: OwnAttention, out: torch.Tensor) -> None:
        self.calls.append((own, out))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss", "gemma2", "bert", "deepseek_v3"])
def test_rows_are_those_of_the_whole_call(family: str, implementation: str) -> None:
    model = model_of(next(f for f in FAMILIES if f.name == family))
    named = model.config._attn_implementation
    if family in ("gpt_oss", "gemma2") and implementation == "sdpa":
        implementation = "eager"
    model.set_attn_implementation(implementation)
    ids = torch.randint(3, WORDS, (2, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    kept = Kept()
    with torch.no_grad(), instrument(model, kept, attention=True):
        model(input_ids=ids, attention_mask=mask)
        for own, out in kept.calls:
            for ranges in ([(0, 20)], [(3, 9)], [(2, 5), (7, 8), (19, 20)]):
                rows, some = own.rows(*ranges)
                got = torch.cat([out[:, start:stop] for start, stop in ranges], 1)
                assert some.shape == got.shape[:2] and bool(some[0].all())
                torch.testing.assert_close(rows[some], got[some], rtol=1e-4, atol=1e-5)
    assert kept.calls
    model.set_attn_implementation(named)


def test_the_rows_of_causal_attention_without_a_mask() -> None:
    model = llama()
    module = model.model.layers[0].self_attn
    q, k = torch.randn(1, 3, 9, 8), torch.randn(1, 1, 9, 8)
    own = OwnAttention(module, q, k, k, None, {"scaling": 0.3})
    function = find_function(module)
    assert function is not None
    whole = function(module, q, k, k, None, scaling=0.3)[0]
    torch.testing.assert_close(own.rows((4, 7))[0], whole[:, 4:7])


def test_modules_without_a_function_of_rows() -> None:
    assert find_function(nn.MultiheadAttention(8, 2)) is None
    model = llama()
    model.config._attn_implementation = "flash_attention_2"
    assert find_function(model.model.layers[0].self_attn) is None
