"""Each feature of a family is in the converted layer: without it the output is another.

Models are tiny, with weights large enough that every feature counts, and run whole: a module is
compared with what it gives in its model, in one pass and in steps with a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf

from families import enlarge
from in_models import calls_in, convert, run_layer, run_steps
from multihead.layers.rotary import Rotary
from multihead.masks import causal

TOLERANCE = 1e-5
WORDS, LENGTH = 17, 13
SIZES = dict(
    hidden_size=48,
    intermediate_size=40,
    num_hidden_layers=2,
    vocab_size=WORDS,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    num_attention_heads=6,
)
GROUPED = SIZES | dict(num_key_value_heads=3)
HEADS = GROUPED | dict(head_dim=12)
TWO_KINDS = dict(sliding_window=4, layer_types=["sliding_attention", "full_attention"])


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=100.0, **more))


LLAMA3 = rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=8, beta_fast=4.0, truncate=False)
LONG = dict(short_factor=[1.0, 1.5, 2.0], long_factor=[2.0, 3.0, 5.0])
LONGROPE = rope("longrope", partial_rotary_factor=0.5, **LONG)


def text(config: Any) -> Any:
    return lambda: tf.AutoModelForCausalLM.from_config(config)


# family -> its model, and the features without which some layer's output moves
MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "llama": (text(tf.LlamaConfig(**HEADS, **LLAMA3)), "rotary scaling causal groups"),
    "llama, biases": (text(tf.LlamaConfig(**HEADS, attention_bias=True)), "bias out_bias"),
    "qwen2": (text(tf.Qwen2Config(**GROUPED)), "rotary bias"),
    "qwen3": (text(tf.Qwen3Config(**HEADS)), "rotary norm"),
    "qwen3, moe": (
        text(tf.Qwen3MoeConfig(**HEADS, num_experts=2, num_experts_per_tok=1)),
        "rotary norm",
    ),
    "mistral": (text(tf.MistralConfig(**GROUPED, sliding_window=4)), "window"),
    "mixtral": (text(tf.MixtralConfig(**GROUPED, sliding_window=5)), "window rotary"),
    "starcoder2": (
        text(tf.Starcoder2Config(**GROUPED, sliding_window=4, use_bias=True)),
        "window bias out_bias",
    ),
    "gemma": (text(tf.GemmaConfig(**HEADS)), "rotary"),
    "gemma2": (
        text(
            tf.Gemma2Config(
                **HEADS, **TWO_KINDS, attn_logit_softcapping=2.0, query_pre_attn_scalar=5
            )
        ),
        "softcap window scale",
    ),
    "gemma3": (
        text(tf.Gemma3TextConfig(**HEADS, **TWO_KINDS, query_pre_attn_scalar=5)),
        "norm window scale rotary",
    ),
    "gpt-oss": (
        text(
            tf.GptOssConfig(
                **HEADS, **TWO_KINDS, **YARN, num_local_experts=2, num_experts_per_tok=1
            )
        ),
        "sinks window scaling bias",
    ),
    "phi": (text(tf.PhiConfig(**GROUPED, qk_layernorm=True)), "norm partial bias"),
    "phi3": (
        text(
            tf.Phi3Config(
                **SIZES | dict(hidden_size=72),
                num_key_value_heads=3,
                sliding_window=4,
                original_max_position_embeddings=16,
                max_position_embeddings=64,
                **LONGROPE,
            )
        ),
        "scaling partial window",
    ),
    "glm": (text(tf.GlmConfig(**HEADS)), "interleaved partial bias"),
    "glm4": (text(tf.Glm4Config(**HEADS)), "interleaved partial"),
    "glm4, moe": (
        text(tf.Glm4MoeConfig(**HEADS, use_qk_norm=True, first_k_dense_replace=2)),
        "norm partial",
    ),
    "cohere": (text(tf.CohereConfig(**GROUPED, use_qk_norm=True)), "interleaved norm"),
    "cohere2": (text(tf.Cohere2Config(**HEADS, **TWO_KINDS)), "interleaved window"),
    "olmo": (text(tf.OlmoConfig(**GROUPED, clip_qkv=0.5)), "clip rotary"),
    "olmo2": (text(tf.Olmo2Config(**GROUPED)), "norm rotary"),
    "olmo3": (text(tf.Olmo3Config(**GROUPED, **TWO_KINDS)), "norm window"),
    "olmoe": (
        text(tf.OlmoeConfig(**GROUPED, clip_qkv=0.5, num_experts=2, num_experts_per_tok=1)),
        "norm clip",
    ),
    "granite": (text(tf.GraniteConfig(**GROUPED, attention_multiplier=0.9)), "scale rotary"),
    "stablelm": (text(tf.StableLmConfig(**GROUPED, qk_layernorm=True)), "norm"),
    "smollm3": (text(tf.SmolLM3Config(**GROUPED, no_rope_layers=[1, 0])), "rotary"),
    "gpt-neox": (text(tf.GPTNeoXConfig(**SIZES, rotary_pct=0.5)), "partial bias out_bias"),
    "gpt-j": (
        text(tf.GPTJConfig(n_embd=48, n_head=4, n_layer=1, rotary_dim=4, vocab_size=WORDS)),
        "interleaved partial",
    ),
    "gpt-2": (
        text(
            tf.GPT2Config(
                n_embd=48,
                n_head=4,
                n_layer=2,
                vocab_size=WORDS,
                scale_attn_by_inverse_layer_idx=True,
            )
        ),
        "scale bias out_bias causal",
    ),
    "gpt-neo": (
        text(
            tf.GPTNeoConfig(
                hidden_size=48,
                num_heads=4,
                num_layers=2,
                attention_types=[[["global", "local"], 1]],
                window_size=4,
                vocab_size=WORDS,
            )
        ),
        "window scale",
    ),
    "opt": (
        text(
            tf.OPTConfig(
                hidden_size=48,
                ffn_dim=40,
                num_hidden_layers=1,
                num_attention_heads=4,
                vocab_size=WORDS,
                word_embed_proj_dim=48,
                pad_token_id=0,
            )
        ),
        "bias causal",
    ),
    "falcon": (text(tf.FalconConfig(**SIZES, multi_query=True)), "rotary causal"),
    "falcon, groups": (
        text(tf.FalconConfig(**SIZES, new_decoder_architecture=True, num_kv_heads=3, bias=True)),
        "rotary bias",
    ),
    "bloom": (
        text(tf.BloomConfig(hidden_size=48, n_head=6, n_layer=1, vocab_size=WORDS)),
        "position bias",
    ),
    "mpt": (text(tf.MptConfig(d_model=48, n_heads=4, n_layers=1, vocab_size=WORDS)), "position"),
    "qwen3-next": (
        text(
            tf.Qwen3NextConfig(
                **SIZES,
                num_key_value_heads=3,
                head_dim=16,
                layer_types=["full_attention", "full_attention"],
                num_experts=2,
                num_experts_per_tok=1,
            )
        ),
        "gate norm partial",
    ),
    "modernbert": (
        lambda: tf.ModernBertModel(
            tf.ModernBertConfig(
                **SIZES,
                local_attention=6,
                layer_types=["sliding_attention", "full_attention"],
                cls_token_id=3,
                sep_token_id=4,
            )
        ),
        "rotary any_window",
    ),
    "t5": (
        lambda: tf.T5EncoderModel(
            tf.T5Config(
                d_model=48,
                d_kv=6,
                num_heads=5,
                num_layers=1,
                d_ff=40,
                vocab_size=WORDS,
                relative_attention_num_buckets=8,
                relative_attention_max_distance=10,
            )
        ),
        "scale position",
    ),
    "distilbert": (
        lambda: tf.DistilBertModel(
            tf.DistilBertConfig(dim=48, n_heads=4, n_layers=1, hidden_dim=40, vocab_size=WORDS)
        ),
        "bias out_bias",
    ),
    "esm": (
        lambda: tf.EsmModel(
            tf.EsmConfig(
                **SIZES, position_embedding_type="rotary", mask_token_id=5, token_dropout=False
            )
        ),
        "rotary bias",
    ),
}


def plain(layer: Any) -> Rotary | None:
    old = layer.positions
    if not isinstance(old, Rotary):
        return None
    return Rotary(
        old.head_dim, theta=old.theta, rotary_dim=old.rotary_dim, interleaved=old.interleaved
    )


def drop(layer: Any, feature: str) -> None:
    """Take a feature out of a layer."""
    old = layer.positions
    if feature in ("rotary", "position"):
        layer.positions = None
    elif feature == "scaling":
        layer.positions = plain(layer)
    elif feature == "interleaved" and isinstance(old, Rotary):
        layer.positions.interleaved = False
    elif feature == "partial" and isinstance(old, Rotary):
        layer.positions = Rotary(old.head_dim, theta=old.theta, interleaved=old.interleaved)
    elif feature == "norm":
        layer.q_norm = layer.k_norm = None
    elif feature == "window":
        layer.mask = causal()
    elif feature in ("causal", "any_window"):
        layer.mask = None
    elif feature == "softcap":
        layer.softcap = None
    elif feature == "sinks":
        layer.sinks = None
    elif feature == "clip":
        layer.clip_qkv = None
    elif feature == "gate":
        layer.gate = None
    elif feature == "scale":
        layer.scale = layer.head_dim**-0.5
    elif feature == "bias":
        layer.q_proj.bias = layer.v_proj.bias = None
    elif feature == "out_bias":
        layer.out_proj.bias = None
    elif feature == "groups":
        for proj in (layer.k_proj, layer.v_proj):
            proj.weight.data = proj.weight.data.roll(layer.head_dim, 0)


@pytest.mark.parametrize("name", MODELS)
def test_every_feature_of_a_family_is_in_the_layer(name: str) -> None:
    make, features = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    enlarge(model, len(name), 1.6)
    words = torch.randint(3, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    calls = calls_in(model, {"input_ids": words})
    calls = [c for c in calls if not any(o.name.startswith(f"{c.name}.") for o in calls)]
    moved = dict.fromkeys(features.split(), 0.0)
    converted = 0
    for call in calls:
        layer = convert(call.module)
        size = float(call.out.abs().max())
        assert float((run_layer(layer, call) - call.out).abs().max()) < TOLERANCE * size
        if layer.mask is not None and layer.mask.high == 1:
            assert float((run_steps(layer, call) - call.out).abs().max()) < TOLERANCE * size
        for feature in moved:
            other = convert(call.module)
            drop(other, feature)
            change = float((run_layer(other, call) - call.out).abs().max()) / size
            moved[feature] = max(moved[feature], change)
        converted += 1
    assert converted
    assert all(change > 100 * TOLERANCE for change in moved.values()), moved
