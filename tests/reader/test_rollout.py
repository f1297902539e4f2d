"""Attention rollout and the mean over heads and layers, against their definitions in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

import multihead
from multihead.reader import read_mean_map, read_rollout
from small import IDS, llama

TEXT = {"input_ids": IDS[:1]}
SIZES: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4
)


def bert(**options: Any) -> Any:
    torch.manual_seed(0)
    config = tf.BertConfig(**SIZES, initializer_range=0.5, **options)
    return tf.BertModel(config, add_pooling_layer=False).eval()


def t5() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_heads=4)
    return tf.T5Model(tf.T5Config(**sizes, num_layers=2)).eval()


def stored(attentions: Any) -> list[Any]:
    return [layer[0].double().mean(0).detach().numpy() for layer in attentions]


def rollout(layers: list[Any]) -> Any:
    """Abnar and Zuidema 2020, with row-normalised A + I."""
    rolled = np.eye(len(layers[0]))
    for weights in layers:
        mixed = weights + np.eye(len(weights))
        rolled = mixed / mixed.sum(-1, keepdims=True) @ rolled
    return rolled


def albert(**options: Any) -> Any:
    torch.manual_seed(0)
    return tf.AlbertModel(tf.AlbertConfig(**SIZES, embedding_size=16, **options)).eval()


@pytest.mark.parametrize("make", [bert, albert, llama])
def test_rollout_and_mean_are_their_definitions(make: Any) -> None:
    """Causal and bidirectional, grouped heads, and layers that share one module."""
    layers = stored(make(attn_implementation="eager")(**TEXT, output_attentions=True).attentions)
    found, mean = read_rollout(make(), TEXT), read_mean_map(make(), TEXT)
    np.testing.assert_allclose(found.weights, rollout(layers), atol=1e-5)
    np.testing.assert_allclose(mean.weights, np.mean(layers, 0), atol=1e-5)
    np.testing.assert_allclose(found.weights.sum(-1), 1, atol=1e-5)
    for one, name in ((found, "rollout"), (mean, "mean")):
        assert one.head == name and one.contributions is None
        assert one.tokens == one.row_tokens == [str(i) for i in IDS[0].tolist()]


def test_one_stack_of_several() -> None:
    model = t5()
    inputs = {"input_ids": IDS[:1], "decoder_input_ids": IDS[:1, :5]}
    attentions = tf.T5EncoderModel(model.config).eval()
    attentions.encoder.load_state_dict(model.encoder.state_dict())
    attentions.set_attn_implementation("eager")
    layers = stored(attentions(**TEXT, output_attentions=True).attentions)
    found = read_rollout(model, inputs, stack="encoder")
    np.testing.assert_allclose(found.weights, rollout(layers), atol=1e-5)
    for stack, words in (
        (None, "several stacks of attention, encoder, decoder.*stack='encoder'"),
        ("decoder", "EncDecAttention reads another sequence"),
        ("text", "stack='text': expected one of 'encoder', 'decoder'"),
    ):
        with pytest.raises(multihead.MultiheadError, match=words):
            read_rollout(model, inputs, stack=stack)


def test_layers_without_attention_are_named() -> None:
    config = tf.Qwen3NextConfig(
        **SIZES,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=0,
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        mlp_only_layers=[0, 1, 2],
    )
    model = tf.Qwen3NextForCausalLM(config).eval()
    with pytest.raises(multihead.MultiheadError, match=r"layers 0, 2 of model\.layers|not read"):
        read_rollout(model, TEXT)


def test_words_and_labels() -> None:
    model, tokenizer = multihead.load_builtin()
    found = read_rollout(model, "a zebra", tokenizer=tokenizer)
    merged = read_rollout(model, "a zebra", tokenizer=tokenizer, by="word")
    assert merged.tokens == ["<s>", "a", "zebra"]
    pieces = slice(2, len(found.tokens))
    assert merged.weights[2, 2] == pytest.approx(found.weights[pieces, pieces].sum(1).mean())
    with pytest.raises(multihead.MultiheadError, match="2 texts"):
        read_mean_map(model, ["a", "b"], tokenizer=tokenizer)
    with pytest.raises(multihead.MultiheadError, match="by='letter'"):
        read_mean_map(model, "a", tokenizer=tokenizer, by="letter")


def test_the_caveat_is_in_their_documentation() -> None:
    for function in (read_rollout, read_mean_map):
        assert "Weights aren't effects" in " ".join((function.__doc__ or "").split())
