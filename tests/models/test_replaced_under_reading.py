"""Reading transformers models whose attention is this library's layers: the tables of the models as
they came.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import multihead
from families import FAMILIES, batches_of, model_of
from multihead.layers import replace_attention
from multihead.models import find_sites

NAMES = ("gpt2", "gemma3", "bert", "t5", "deepseek_v3")
REPLACED = [family for family in FAMILIES if family.name in NAMES]


def require_equal(got: Any, want: Any) -> None:
    """Equal tables but for the paths of the sites, to the rounding of float32."""
    for one, other in zip(got.rows(), want.rows(), strict=True):
        assert one["site"].startswith(other["site"].removesuffix(".self"))
        for name in other.keys() - {"site"}:
            expected = other[name]
            close = isinstance(expected, float)
            assert one[name] == (pytest.approx(expected, abs=1e-4, rel=1e-4) if close else expected)


@pytest.mark.parametrize("family", REPLACED, ids=lambda family: family.name)
def test_a_reading_is_that_of_the_model(family: Any) -> None:
    model = model_of(family)
    replaced = replace_attention(copy.deepcopy(model))
    batches = batches_of(family, family.paddings()[-1])
    want = multihead.read(model, batches, probe=False)
    require_equal(multihead.read(replaced, batches, probe=False), want)


@pytest.mark.parametrize("name", ["mistral", "deepseek_v3"])
def test_steps_with_the_models_cache(name: str) -> None:
    """Latent attention's steps are absorbed outside of a reading."""
    family = next(f for f in FAMILIES if f.name == name)
    model, ids = model_of(family), batches_of(family, "none")[0]["input_ids"]
    replaced = replace_attention(copy.deepcopy(model))
    tables = []
    for one in (model, replaced):
        with torch.no_grad(), multihead.reading(one) as reading:
            out = one(input_ids=ids[:, :4], use_cache=True)
            for i in range(4, ids.shape[1]):
                out = one(input_ids=ids[:, i : i + 1], cache=out.past_key_values)
        tables.append(reading.table())
    require_equal(tables[1], tables[0])


def test_ablated_heads_are_those_of_the_model() -> None:
    family = next(f for f in FAMILIES if f.name == "mistral")
    model, batch = model_of(family), batches_of(family, "none")[0]
    replaced = replace_attention(copy.deepcopy(model))
    assert [s.label for s in find_sites(replaced)] == [s.label for s in find_sites(model)]
    outs = []
    for one in (model, replaced):
        with torch.no_grad(), multihead.ablate_heads(one, ["L1.H3"]):
            outs.append(one(**batch).logits)
    torch.testing.assert_close(outs[1], outs[0], rtol=0, atol=1e-4)
