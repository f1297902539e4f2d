"""The mask that a model makes for a module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

from families import enlarge
from in_models import calls_in, convert, run_layer
from multihead import MultiHeadAttention

SIZES = dict(hidden_size=32, num_attention_heads=4, intermediate_size=24, vocab_size=17)


def test_text_models_that_mask_for_their_modules() -> None:
    model = tf.CLIPTextModel(
        tf.CLIPTextConfig(**SIZES, num_hidden_layers=1, bos_token_id=0, eos_token_id=2)
    ).eval()
    enlarge(model, 3, 1.6)
    (call,) = calls_in(model, {"input_ids": torch.randint(3, 17, (2, 9))})
    assert not call.module.is_causal
    layer = convert(call.module)
    torch.testing.assert_close(run_layer(layer, call), call.out, atol=1e-5, rtol=1e-5)


def test_a_window_to_both_sides_is_that_of_the_model() -> None:
    config = tf.Gemma3TextConfig(
        **SIZES,
        num_key_value_heads=2,
        head_dim=8,
        num_hidden_layers=1,
        sliding_window=6,
        layer_types=["sliding_attention"],
        use_bidirectional_attention=True,
    )
    model = tf.Gemma3TextModel(config).eval()
    enlarge(model, 3, 1.6)
    (call,) = calls_in(model, {"input_ids": torch.randint(3, 17, (2, 13))})
    layer = convert(call.module)
    torch.testing.assert_close(run_layer(layer, call), call.out, atol=1e-5, rtol=1e-5)
    assert (layer.mask.low, layer.mask.high) == (-3, 4)


def pegasus_x() -> Any:
    config = tf.PegasusXConfig(
        d_model=32, decoder_attention_heads=4, decoder_layers=1, encoder_layers=1, vocab_size=17
    )
    return tf.PegasusXModel(config).decoder.layers[0].self_attn


def test_what_only_the_model_knows_is_asked_for() -> None:
    module = pegasus_x()
    with pytest.raises(ValueError, match=r"PegasusXAttention: nothing .*is_causal=True or"):
        MultiHeadAttention.from_transformers(module)
    for is_causal in (True, False):
        layer = MultiHeadAttention.from_transformers(module, is_causal=is_causal)
        assert (layer.mask is not None) == is_causal
    config = tf.MoonshineConfig(
        hidden_size=32,
        intermediate_size=24,
        encoder_num_hidden_layers=1,
        decoder_num_hidden_layers=1,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
        vocab_size=17,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
    )
    module = tf.MoonshineModel(config).decoder.layers[0].encoder_attn
    with pytest.raises(ValueError, match=r"MoonshineAttention: .*give is_cross=True"):
        MultiHeadAttention.from_transformers(module)
    assert MultiHeadAttention.from_transformers(module, is_cross=True).positions is None
    assert MultiHeadAttention.from_transformers(module, is_cross=False).positions is not None
