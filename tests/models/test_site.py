"""Sites: projections by what they do, counts by what attention receives, and errors that name the
class.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from families import FAMILIES, model_of
from multihead.errors import MultiheadError
from multihead.models import site as sites
from small import llama


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_output_projection_is_what_it_does_to_unit_vectors(family: Any) -> None:
    model = model_of(family)
    found = sites.find_sites(model)
    assert len({site.label for site in found}) == len(found)
    for site in found:
        weight, bias = site.out_weight()
        assert weight.shape[0] == site.num_heads * site.head_dim
        x = torch.randn(1, 5, weight.shape[0])
        with torch.no_grad():
            assert torch.allclose(site.out(x), x @ weight + bias, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            tf.BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=20),
            ["BloomModel", "BloomAttention"],
        ),
        (
            tf.GPTNeoConfig(
                hidden_size=16,
                num_layers=1,
                num_heads=2,
                vocab_size=20,
                attention_types=[[["global"], 1]],
            ),
            ["GPTNeoModel", "GPTNeo"],
        ),
        (
            tf.MptConfig(d_model=16, n_layers=1, n_heads=2, vocab_size=20),
            ["MptModel", "MptAttention"],
        ),
    ],
    ids=lambda v: type(v).__name__,
)
def test_models_past_the_interface_are_refused_by_name(config: Any, words: list[str]) -> None:
    with pytest.raises(ValueError, match="attention interface") as caught:
        sites.find_sites(tf.AutoModel.from_config(config))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_module_without_attention_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Linear can't be read"):
        sites.find_sites(nn.Linear(2, 2))


def test_an_unknown_projection_or_width_says_where_to_add_it() -> None:
    model = llama()
    attention = model.model.layers[1].self_attn
    attention.strange = attention.o_proj
    del attention.o_proj
    where = r"layers\.1\.self_attn \(LlamaAttention\) can't be read: "
    with pytest.raises(MultiheadError, match=rf"{where}.*register_family\('LlamaAttention', out="):
        sites.find_sites(model)
    attention.o_proj = attention.strange
    del attention.head_dim
    with pytest.raises(MultiheadError, match=rf"{where}.*register_family\(.*, head_dim="):
        sites.find_sites(model)


def test_a_width_is_found_by_the_number_of_heads() -> None:
    """SAM's attention says how many heads it has, not how wide they are."""
    model = llama()
    attention = model.model.layers[1].self_attn
    del attention.head_dim
    attention.num_heads = 3
    assert [site.head_dim for site in sites.find_sites(model)] == [8, 8]


def test_a_projection_of_unknown_width_is_refused_with_its_place() -> None:
    model = llama()
    model.model.layers[1].self_attn.o_proj = nn.Identity()
    with pytest.raises(
        ValueError,
        match=r"layers\.1\.self_attn \(LlamaAttention\) can't be read: .* Identity.*in_features",
    ):
        sites.find_sites(model)


def test_a_projection_that_wraps_a_linear_is_as_wide_as_it() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(24, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    model = llama()
    model.model.layers[0].self_attn.o_proj = wrapped = Wrapped()
    site = sites.find_sites(model)[0]
    assert site.num_heads == 3 and torch.allclose(
        site.out_weight()[0], wrapped.linear.weight.T, atol=1e-6
    )


def test_choosing_heads() -> None:
    found = sites.find_sites(llama())
    assert [(s.label, h) for s, h in sites.select_heads(found, ["L1.H2", "L0.H0"])] == [
        ("L1", 2),
        ("L0", 0),
    ]
    with pytest.raises(
        ValueError,
        match=r"head 'L1\.H3' doesn't exist; did you mean 'L1\.H2'\? .* L0\.H0 to L1\.H2",
    ):
        sites.select_heads(found, "L1.H3")
