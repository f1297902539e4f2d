"""Predicted from the config alone, held against the model itself: what it holds, computes and
caches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as tf
from torch.utils.flop_counter import FlopCounterMode

from families import FAMILIES, Family, batches_of, model_of
from measured import cache_bytes, differences, measured
from multihead import cost
from multihead.costs import Cost

DECODERS = [family for family in FAMILIES if family.inputs in ("decoder", "both", "sound")]
by_name = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def predicted(model: Any, **options: Any) -> Cost:
    """From a copy of the config, which names its class so that modules are called the same."""
    config = type(model.config).from_dict(
        model.config.to_dict() | {"architectures": [type(model).__name__]}
    )
    return cost(config, dtype="float32", **options)


@by_name
def test_every_module_of_every_family(family: Family) -> None:
    """Parameters; sizes of queries, keys, values; operations of eager attention as torch counts
    them; pairs that masks allow.
    """
    model = model_of(family)
    found = predicted(model)
    real = measured(model, batches_of(family, "none")[0])
    assert [shape.name for shape in found.shapes] == list(real) and not found.notes[1:]
    assert all(one.heads for one in real.values())
    assert {shape.label: differences(shape, real[shape.name]) for shape in found.shapes} == {
        s.label: [] for s in found.shapes
    }
    assert "other" not in found.parameters


@pytest.mark.parametrize("family", DECODERS, ids=lambda family: family.name)
def test_cache_and_one_more_token(family: Family) -> None:
    """Bytes of transformers' own cache after 11 or 13 tokens, and operations of the token after
    them.
    """
    require_measured(family, model_of(family), batches_of(family, "none")[0])


LATENT = dict(
    hidden_size=48,
    intermediate_size=40,
    num_hidden_layers=2,
    vocab_size=17,
    num_attention_heads=6,
    num_key_value_heads=6,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=10,
    max_position_embeddings=64,
)


@pytest.mark.parametrize(
    ("kind", "q_lora_rank"),
    [
        ("deepseek_v2", None),
        ("deepseek_v2", 20),
        ("deepseek_v3", None),
        ("deepseek_v3", 20),
        ("minicpm3", 20),
    ],
)
def test_latents(kind: str, q_lora_rank: int | None) -> None:
    """Keys and values from one latent, with and without one for queries, with biases."""
    dense = {} if kind == "minicpm3" else dict(first_k_dense_replace=2)
    config = tf.AutoConfig.for_model(
        kind, **LATENT, **dense, q_lora_rank=q_lora_rank, attention_bias=True
    )
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    batch = {"input_ids": torch.arange(22).view(2, 11) % 17}
    found, real = predicted(model), measured(model, batch)
    assert {s.label: differences(s, real[s.name]) for s in found.shapes} == {"L0": [], "L1": []}
    assert all("norms" in s.parameters and "other" not in s.parameters for s in found.shapes)
    require_measured(Family(kind, lambda: model, "o_proj"), model, batch)


def require_measured(family: Family, model: Any, batch: Any) -> None:
    """Raise unless the cache's bytes and a step's operations are those predicted."""
    ids = "input_ids" if family.inputs == "decoder" else "decoder_input_ids"
    texts, length = batch[ids].shape
    source = batch.get(
        "input_features", batch["input_ids"] if family.inputs == "both" else batch[ids]
    ).shape[-1]
    with torch.no_grad():
        out = model(**batch, use_cache=True)
        found = predicted(model, context_length=length, batch_size=texts)
        found = replace(found, source_length=source // 2 if family.inputs == "sound" else source)
        assert cache_bytes(out.past_key_values) == found.cache("transformers")
        more = (
            {}
            if family.inputs == "decoder"
            else {"encoder_outputs": (out.encoder_last_hidden_state,)}
        )
        name = "cache" if family.inputs == "decoder" else "past_key_values"
        model.set_attn_implementation("eager")
        with FlopCounterMode(display=False) as counter:
            model(**{ids: batch[ids][:, :1], name: out.past_key_values, **more})
    root = type(model).__name__
    counts = {
        at.removeprefix(root).lstrip("."): sum(ops.values())
        for at, ops in counter.get_flop_counts().items()
    }
    real = sum(counts.get(shape.name, 0) for shape in found.shapes)
    assert real == found.decode(expanded=True).total
    assert found.decode().total <= real
    assert found.cache() >= found.cache("transformers")


def test_smollm2(smollm2_gguf: Any) -> None:
    """The config that a GGUF file holds; no weights are read."""
    found = cost(smollm2_gguf, context_length=8192, dtype="float16")
    assert len(found.shapes) == 30 and {
        (s.num_heads, s.num_kv_heads, s.head_dim) for s in found.shapes
    } == {(9, 3, 64)}
    assert sum(found.parameters.values()) == 30 * 2 * 576 * (576 + 192)
    assert found.cache_per_token == 23_040 and found.cache() == 180 * 2**20


def test_a_folder_with_weights(minilm_dir: Any) -> None:
    found = cost(minilm_dir)
    assert sum(found.parameters.values()) == 6 * 4 * (384**2 + 384) and found.context_length == 512
    assert found.cache() == found.cache_per_token == found.decode().total == 0
    assert found.prefill() == found.prefill(full=True)  # no mask
