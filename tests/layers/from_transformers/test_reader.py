"""Options of a layer, read from a module's attributes and calls."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import MistralConfig
from transformers.models.mistral.modeling_mistral import MistralAttention

from multihead import MultiHeadAttention
from multihead.layers.from_transformers.reader import Reader

SIZES = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2)


def mistral(**options: Any) -> MistralAttention:
    return MistralAttention(MistralConfig(**SIZES, **options), 0)


def test_masks_are_those_of_the_model() -> None:
    mask = Reader(mistral(sliding_window=5)).mask({})
    assert (mask.low, mask.high) == (-4, 1)  # type: ignore[union-attr]
    mask = Reader(mistral(sliding_window=None)).mask({})
    assert (mask.low, mask.high) == (None, 1)  # type: ignore[union-attr]
    assert Reader(mistral(sliding_window=None), is_causal=False).mask({}) is None


def test_what_isnt_seen_in_a_short_trial_is_refused() -> None:
    module = mistral()
    module.attn_temperature_tuning = True
    with pytest.raises(ValueError, match="MistralAttention: attn_temperature_tuning=True"):
        Reader(module)
    module = mistral()
    module.layer_type = "chunked_attention"
    with pytest.raises(ValueError, match="layer_type='chunked_attention'"):
        Reader(module).mask({})
    with pytest.raises(TypeError, match="is_causal='yes'"):
        Reader(module, is_causal="yes")  # type: ignore[arg-type]


def test_a_layer_of_multihead_is_named_as_one() -> None:
    layer = MultiHeadAttention(8, 2)
    with pytest.raises(ValueError, match="MultiHeadAttention: it is a module of multihead; after"):
        MultiHeadAttention.from_transformers(layer)
