"""A layer behind the arguments of transformers' attention modules."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaAttention

from multihead.errors import MultiheadError
from multihead.layers import MultiHeadAttention, Rotary
from multihead.layers.model_attention import ModelAttention
from small import llama

X = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0))


def modules() -> tuple[LlamaAttention, ModelAttention, torch.nn.Module]:
    model = llama()
    theirs = model.model.layers[1].self_attn
    layer = MultiHeadAttention.from_transformers(theirs)
    layer.mask = None
    return theirs, ModelAttention(layer, theirs), model.model.rotary_emb


def test_arguments_by_name_and_in_order() -> None:
    theirs, ours, rotary = modules()
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    cos_sin = rotary(X, ids)
    want = theirs(X, cos_sin)[0]
    for got in (
        ours(X, cos_sin),
        ours(hidden_states=X, position_embeddings=cos_sin, attention_mask=None, use_cache=False),
        ours(X, position_ids=ids),
        ours(X, tuple(x[..., :4] for x in cos_sin)),
    ):
        torch.testing.assert_close(got[0], want)
        assert got[1] is None
    free = theirs(X, cos_sin, is_causal=False)[0]
    torch.testing.assert_close(ours(X, cos_sin, is_causal=False)[0], free)
    assert (free - want).abs().max() > 1e-3


def test_neighbours_share_an_angle() -> None:
    theirs = modules()[0]
    layer = MultiHeadAttention(24, 3, positions=Rotary(8, interleaved=True))
    ids = torch.arange(5)
    cos, sin = layer.positions.cos_sin(ids)
    twice = tuple(x.repeat_interleave(2, -1)[None] for x in (cos, sin))
    ours = ModelAttention(layer, theirs, pairs="neighbours")
    want = layer(X, position_ids=ids)
    torch.testing.assert_close(ours(X, twice, is_causal=False)[0], want)


def test_it_says_what_it_replaces_and_has_what_models_ask_for() -> None:
    theirs, ours, _ = modules()
    assert "in place of LlamaAttention" in repr(ours)
    assert (ours.layer_idx, ours.is_causal, ours.config) == (1, True, theirs.config)
    twin = copy.deepcopy(ours)
    torch.testing.assert_close(twin(X)[0], ours(X)[0])


def test_what_isnt_known_is_refused() -> None:
    _, ours, rotary = modules()
    cos_sin = rotary(X, torch.arange(5)[None])
    for name in ("head_mask", "indices"):
        with pytest.raises(MultiheadError, match=f"passes {name}= to LlamaAttention"):
            ours(X, cos_sin, **{name: torch.ones(3)})
    ours(X, cos_sin, head_mask=None, output_attentions=False)
