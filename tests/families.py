"""Tiny random models of many families, with weights large enough that masks, caps, sinks, bias and
scale matter.

Every size differs from the others (layers, query heads, key/value heads, widths, lengths), so that
an axis taken for another does not go unnoticed, and a word repeats often, so that duplicates and
inductions exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers as tf
from torch import nn
from transformers.pytorch_utils import Conv1D

from oracles.eager import Stored, doubles, stored_attention
from oracles.statistics import Call, Flags, Floats, Ints, Statistics, statistics

Batch = dict[str, torch.Tensor]

SPECIAL = frozenset({0, 2})
SOME = (2, 3, 7, 10)  # tokens of a class
WORDS = 17  # vocabulary
PADDING = 5  # also an ordinary word, so that padding told from text by its token is found out
BOS = dict(pad_token_id=PADDING, bos_token_id=0, eos_token_id=2)
DECODER = dict(hidden_size=48, intermediate_size=40, num_hidden_layers=2, vocab_size=WORDS, **BOS)
GROUPED = dict(**DECODER, num_attention_heads=6, num_key_value_heads=3, head_dim=10)


@dataclass(frozen=True)
class Family:
    """How to make a model of the family, and what it is fed."""

    name: str
    make: Callable[[], tf.PreTrainedModel]
    projection: str  # the path of the output projection from the attention module
    inputs: str = (
        "decoder"  # or "encoder", "both" (encoder and decoder), "sound", "image", "image and text"
    )
    gain: float = 1.6  # standard deviation of what a matrix makes of a unit input
    features: tuple[str, ...] = ()  # what an oracle that left it out would get wrong

    def paddings(self) -> tuple[str, ...]:
        if self.inputs == "image":
            return ("none",)
        return (
            ("none", "right")
            if self.inputs in ("encoder", "image and text")
            else ("none", "right", "left")
        )


def enlarge(model: nn.Module, seed: int, gain: float) -> None:
    """Large random weights in place of a model's own, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        owner = modules[name.rpartition(".")[0]]
        if not parameter.numel():
            continue
        noise = torch.empty(parameter.shape).normal_(generator=generator)
        last = name.rpartition(".")[2]
        if last == "sinks":
            parameter.copy_(1 + noise)
        elif "relative_attention_bias" in name:
            parameter.copy_(2 * noise)
        elif "q_norm" in name or "k_norm" in name:
            parameter.add_(0.6 + 0.2 * noise)
        elif "norm" in name.lower() or "ln_" in name:
            parameter.add_(0.2 * noise)
        elif last.endswith("bias"):
            parameter.copy_(0.3 * noise)
        elif isinstance(owner, nn.Embedding) or parameter.ndim < 2 or "embedding" in last:
            parameter.copy_(noise)
        else:
            inputs_first = isinstance(owner, Conv1D) or (
                parameter.ndim == 3 and not isinstance(owner, nn.Conv1d)
            )
            fan_in = parameter.shape[-2] if inputs_first else parameter[0].numel()
            parameter.copy_(gain * fan_in**-0.5 * noise)


@cache
def model_of(family: Family) -> tf.PreTrainedModel:
    """The model with its large random weights, the same at every call."""
    model = family.make().eval().float()
    enlarge(model, sum(family.name.encode()), family.gain)
    return model


def batches_of(family: Family, padding: str) -> list[Batch]:
    """Two batches, of three texts and of one, without padding or padded on one side."""
    generator = torch.Generator().manual_seed(11)

    def text(texts: int, length: int, lengths: tuple[int, ...], ids: str, mask: str) -> Batch:
        words = torch.randint(
            6 if family.inputs == "encoder" else 2, 12, (texts, length), generator=generator
        )
        words[words == 8] = 2  # a special token in the middle of a text
        words[:, 0] = 0
        if padding == "none":
            return {ids: words}
        real = torch.zeros(texts, length, dtype=torch.long)
        for row, count in enumerate(lengths):
            real[row, slice(count) if padding == "right" else slice(length - count, length)] = 1
            if padding == "left":
                words[row, length - count] = 0
        return {
            ids: torch.where(
                real == 1, words, model_of(family).config.get_text_config().pad_token_id
            ),
            mask: real,
        }

    def numbers(*shape: int) -> torch.Tensor:
        return torch.empty(shape).normal_(generator=generator)

    found = []
    longest = (
        10 if family.inputs == "image and text" else 13
    )  # as long as the image, whose mask the text's is not
    for texts, length, lengths in ((3, longest, (longest, longest - 2, longest - 1)), (1, 9, (7,))):
        main = text(texts, length, lengths, "input_ids", "attention_mask")
        decoder = text(
            texts,
            length - 2,
            tuple(n - 4 for n in lengths),
            "decoder_input_ids",
            "decoder_attention_mask",
        )
        pixels = {
            "pixel_values": numbers(texts, 3, 12, 12 if family.inputs == "image and text" else 16)
        }
        sound = {"input_features": numbers(texts, 10, 30)}
        found.append(
            {
                "decoder": main,
                "encoder": main,
                "both": main | decoder,
                "sound": sound | decoder,
                "image": pixels,
                "image and text": pixels | main,
            }[family.inputs]
        )
    return found


# The twin of a reading.


def projection_weight(family: Family, model: nn.Module, site: str) -> Floats:
    """W_O as [H*Ev, D]: rows are what goes in."""
    path = site
    for step in family.projection.split("."):
        path = path.rpartition(".")[0] if step == "<parent>" else f"{path}.{step}"
    projection = model.get_submodule(path)
    weight = doubles(projection.weight)
    return weight if isinstance(projection, Conv1D) else weight.T


def is_cross(site: str) -> bool:
    return any(name in site for name in ("encoder_attn", "EncDecAttention"))


def sequences(site: str, batch: Batch) -> tuple[str, str]:
    """The names, in the batch, of the prefix of the queries' and of the keys' sequence; "none" in
    images and sound.
    """
    encoder = "none" if "input_features" in batch else ""
    if "decoder_input_ids" in batch:
        queries = encoder if site.startswith(("encoder.", "model.encoder.")) else "decoder_"
        return queries, encoder if is_cross(site) else queries
    image = "vision" in site or "input_ids" not in batch
    return ("none", "none") if image else ("", "")


def call_of(
    family: Family,
    model: nn.Module,
    stored: Stored,
    batch: Batch,
    special: frozenset[int] = SPECIAL,
) -> Call:
    """A stored call with what the inputs say of its rows and keys."""

    def real(prefix: str, length: int) -> Flags:
        mask = batch.get(f"{prefix}attention_mask")
        texts = stored.query.shape[0]
        return np.ones((texts, length), bool) if mask is None else mask.numpy().astype(bool)

    queries, keys = sequences(stored.site, batch)
    cross = is_cross(stored.site)
    ids: Ints | None = None if cross or keys == "none" else batch[f"{keys}input_ids"].numpy()
    real_keys = real(keys, stored.key.shape[2])
    return Call(
        weights=stored.weights,
        values=stored.value,
        allowed=stored.allowed,
        projection=projection_weight(family, model, stored.site),
        real_queries=real(queries, stored.query.shape[2]),
        real_keys=real_keys,
        ids=ids,
        special=None if ids is None else special,
        cross=cross,
        some=None if ids is None else np.isin(ids, SOME) & real_keys,
    )


def stored_calls(model: tf.PreTrainedModel, batches: list[Batch]) -> Iterator[tuple[Stored, Batch]]:
    for batch in batches:
        with stored_attention(model) as stored, torch.no_grad():
            model(**batch)
        for call in stored:
            yield call, batch


def twin(
    family: Family,
    model: tf.PreTrainedModel,
    batches: list[Batch],
    special: frozenset[int] = SPECIAL,
    readers: int = 64,
) -> dict[str, Statistics]:
    """Every site's statistics over the batches, from the stored probabilities."""
    calls: dict[str, list[Call]] = {}
    for stored, batch in stored_calls(model, batches):
        calls.setdefault(stored.site, []).append(call_of(family, model, stored, batch, special))
    return {site: statistics(site_calls, readers) for site, site_calls in calls.items()}


def real_outputs(model: tf.PreTrainedModel, batch: Batch) -> Floats:
    """The model's main output at real positions (what stands at padding means nothing)."""
    with torch.no_grad():
        out: Any = model(**batch)
    if hasattr(out, "text_embeds"):
        return np.concatenate([doubles(out.text_embeds), doubles(out.image_embeds)]).ravel()
    hidden = doubles(out.logits if "logits" in out else out.last_hidden_state)
    mask = batch.get("decoder_attention_mask" if "decoder_input_ids" in batch else "attention_mask")
    return hidden.ravel() if mask is None else hidden[mask.numpy().astype(bool)].ravel()


# The families.


def gpt2() -> tf.PreTrainedModel:
    sizes = dict(n_embd=48, n_head=4, n_layer=3, n_positions=32, vocab_size=WORDS, **BOS)
    return tf.GPT2LMHeadModel(tf.GPT2Config(scale_attn_by_inverse_layer_idx=True, **sizes))


def llama() -> tf.PreTrainedModel:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED, attention_bias=True))


def qwen3() -> tf.PreTrainedModel:
    return tf.Qwen3ForCausalLM(tf.Qwen3Config(**GROUPED | {"head_dim": 12}))


def mistral() -> tf.PreTrainedModel:
    return tf.MistralForCausalLM(tf.MistralConfig(**GROUPED, sliding_window=5))


def gemma2() -> tf.PreTrainedModel:
    return tf.Gemma2ForCausalLM(
        tf.Gemma2Config(
            **GROUPED, sliding_window=5, attn_logit_softcapping=2.0, query_pre_attn_scalar=5
        )
    )


def gemma3() -> tf.PreTrainedModel:
    layers = ["sliding_attention", "full_attention"]
    return tf.Gemma3ForCausalLM(
        tf.Gemma3TextConfig(
            **GROUPED, sliding_window=4, query_pre_attn_scalar=20, layer_types=layers
        )
    )


def gpt_oss() -> tf.PreTrainedModel:
    return tf.GptOssForCausalLM(
        tf.GptOssConfig(**GROUPED, sliding_window=5, num_local_experts=3, num_experts_per_tok=2)
    )


def bert() -> tf.PreTrainedModel:
    sizes = dict(
        intermediate_size=40, num_hidden_layers=2, max_position_embeddings=32, type_vocab_size=2
    )
    return tf.BertModel(
        tf.BertConfig(
            hidden_size=40, num_attention_heads=5, vocab_size=WORDS, pad_token_id=PADDING, **sizes
        )
    )


def roberta() -> tf.PreTrainedModel:
    sizes = dict(
        intermediate_size=40, num_hidden_layers=2, max_position_embeddings=32, type_vocab_size=1
    )
    return tf.RobertaModel(
        tf.RobertaConfig(hidden_size=42, num_attention_heads=3, vocab_size=WORDS, **sizes)
    )


def vit() -> tf.PreTrainedModel:
    sizes = dict(intermediate_size=40, num_hidden_layers=2, image_size=(12, 16), patch_size=4)
    return tf.ViTModel(tf.ViTConfig(hidden_size=48, num_attention_heads=4, **sizes))


def whisper() -> tf.PreTrainedModel:
    sizes = dict(
        encoder_layers=2, decoder_layers=2, encoder_ffn_dim=40, decoder_ffn_dim=40, num_mel_bins=10
    )
    return tf.WhisperModel(
        tf.WhisperConfig(
            d_model=48,
            encoder_attention_heads=4,
            decoder_attention_heads=6,
            vocab_size=WORDS,
            max_source_positions=15,
            max_target_positions=32,
            decoder_start_token_id=0,
            **sizes,
            **BOS,
        )
    )


def t5() -> tf.PreTrainedModel:
    sizes = dict(
        num_layers=2, num_heads=5, d_ff=40, vocab_size=WORDS, relative_attention_num_buckets=8
    )
    return tf.T5Model(
        tf.T5Config(
            d_model=48,
            d_kv=6,
            relative_attention_max_distance=10,
            decoder_start_token_id=0,
            **sizes,
            **BOS,
        )
    )


def bart() -> tf.PreTrainedModel:
    sizes = dict(encoder_layers=2, decoder_layers=2, encoder_ffn_dim=40, decoder_ffn_dim=40)
    heads = dict(encoder_attention_heads=6, decoder_attention_heads=4)
    words = dict(
        vocab_size=WORDS,
        max_position_embeddings=32,
        decoder_start_token_id=0,
        forced_eos_token_id=None,
    )
    return tf.BartModel(tf.BartConfig(d_model=48, **sizes, **heads, **words, **BOS))


def phi3() -> tf.PreTrainedModel:
    return tf.Phi3ForCausalLM(
        tf.Phi3Config(**DECODER, num_attention_heads=6, num_key_value_heads=3)
    )


def gpt_neox() -> tf.PreTrainedModel:
    return tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**DECODER, num_attention_heads=4))


def granite() -> tf.PreTrainedModel:
    sizes = DECODER | {"hidden_size": 60}
    return tf.GraniteForCausalLM(
        tf.GraniteConfig(
            **sizes, num_attention_heads=6, num_key_value_heads=3, attention_multiplier=0.15
        )
    )


def gpt_bigcode() -> tf.PreTrainedModel:
    sizes = dict(n_embd=48, n_head=4, n_layer=2, n_positions=32, vocab_size=WORDS, **BOS)
    return tf.GPTBigCodeForCausalLM(tf.GPTBigCodeConfig(multi_query=True, **sizes))


def deepseek_v3() -> tf.PreTrainedModel:
    sizes = DECODER | {
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "first_k_dense_replace": 2,
    }
    widths = dict(
        q_lora_rank=20, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=10
    )
    return tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**sizes, **widths))


def llama4() -> tf.PreTrainedModel:
    sizes = dict(intermediate_size_mlp=40, num_local_experts=2, interleave_moe_layer_step=3)
    return tf.Llama4ForCausalLM(
        tf.Llama4TextConfig(
            **GROUPED, **sizes, attention_chunk_size=5, no_rope_layers=[1, 0], floor_scale=4
        )
    )


def clip() -> tf.PreTrainedModel:
    sizes = dict(intermediate_size=40, num_hidden_layers=2)
    text = dict(
        hidden_size=48, num_attention_heads=6, vocab_size=WORDS, max_position_embeddings=32, **sizes
    )
    vision = dict(hidden_size=40, num_attention_heads=5, image_size=12, patch_size=4, **sizes)
    return tf.CLIPModel(
        tf.CLIPConfig(text_config=text | BOS, vision_config=vision, projection_dim=20)
    )


FAMILIES = (
    Family("gpt2", gpt2, "c_proj", features=("scale", "causal", "padding")),
    Family("llama", llama, "o_proj", features=("causal", "padding", "groups")),
    Family("qwen3", qwen3, "o_proj", features=("causal", "padding", "groups")),
    Family("mistral", mistral, "o_proj", features=("window", "padding", "groups")),
    Family(
        "gemma2", gemma2, "o_proj", features=("window", "softcap", "scale", "padding", "groups")
    ),
    Family("gemma3", gemma3, "o_proj", features=("window", "scale", "padding", "groups")),
    Family("gpt_oss", gpt_oss, "o_proj", features=("window", "sinks", "padding", "groups")),
    Family("bert", bert, "<parent>.output.dense", "encoder", features=("padding",)),
    Family("roberta", roberta, "<parent>.output.dense", "encoder", features=("padding",)),
    Family("vit", vit, "o_proj", "image"),
    Family("whisper", whisper, "out_proj", "sound", features=("causal", "scale", "padding")),
    Family("t5", t5, "o", "both", gain=1.0, features=("bias", "scale", "padding")),
    Family("bart", bart, "out_proj", "both", features=("causal", "padding")),
    Family("phi3", phi3, "o_proj", features=("causal", "padding", "groups")),
    Family("gpt_neox", gpt_neox, "dense", features=("causal", "padding")),
    Family("granite", granite, "o_proj", features=("scale", "padding", "groups")),
    Family("gpt_bigcode", gpt_bigcode, "c_proj", features=("causal", "padding")),
    Family("deepseek_v3", deepseek_v3, "o_proj", features=("causal", "padding")),
    Family("llama4", llama4, "o_proj", features=("window", "padding", "groups")),
    Family("clip", clip, "out_proj", "image and text", features=("causal",)),
)
