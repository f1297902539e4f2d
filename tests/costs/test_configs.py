"""From a config's JSON to a config of transformers: known types, architectures, defaults."""

from __future__ import annotations

import re
from typing import Any

import pytest

from costs.public_configs import NEMOTRON_NAS, ROWS, latent, plain
from multihead import MultiheadError, cost
from multihead.costs.configs import KIN, OTHER_OUTSIDE, open_config

SMALL = plain("llama", 64, 8, 2, 2)


def notes_of(config: dict[str, Any]) -> list[str]:
    return list(cost(config, context_length=8).notes)


def test_a_full_config_has_no_notes() -> None:
    assert notes_of(SMALL | {"head_dim": 8}) == []


@pytest.mark.parametrize("kind", ["mine", None])
def test_an_unknown_type_by_its_architecture(kind: str | None) -> None:
    known, own = SMALL, SMALL | {"model_type": kind, "architectures": ["LlamaForCausalLM"]}
    found = cost(own, context_length=8)
    assert len(found.shapes) == 2 and found.parameters == cost(known).parameters
    assert found.cache() == cost(known, context_length=8).cache()
    called = "model_type 'mine'" if kind else "a config without model_type"
    note = f"{called}, unknown to transformers, is counted as llama by its architecture"
    assert found.notes[0] == f"{note} LlamaForCausalLM"


@pytest.mark.parametrize("name", sorted(KIN))
def test_architectures_like_others(name: str) -> None:
    """Their attention has the sizes that the config states; their own code isn't run."""
    config = SMALL | {
        "model_type": "theirs",
        "architectures": [name],
        "auto_map": {"AutoModel": "code.Model"},
        "num_layers": 2,
        "block_configs": [{"attention": {"n_heads_in_group": 4}}] * 2,
        "attn_type_list": [1, 1],
    }
    found = cost(config, context_length=1)
    assert found.cache() == 2 * 2 * 2 * 8 * 2
    assert name in found.notes[0] and "its own code isn't run" in found.notes[0]
    differs = name in OTHER_OUTSIDE
    assert ("parameters outside of it are others" in found.notes[0]) is differs
    assert (found.weights.bytes is None) is differs


def test_layers_without_attention() -> None:
    found = cost(NEMOTRON_NAS, context_length=1)
    assert [(s.label, s.num_heads, s.num_kv_heads) for s in found.shapes] == [
        ("L0", 64, 8),
        ("L2", 64, 4),
    ]
    assert cost(NEMOTRON_NAS | {"intermediate_size": None}).shapes == found.shapes  # as stored


def test_defaults_are_listed() -> None:
    left = {k: v for k, v in SMALL.items() if k not in ("num_key_value_heads", "vocab_size")}
    (note,) = notes_of(left)
    assert note == (
        "the config leaves out, so these are llama's defaults: num_key_value_heads=8"
    )  # the width of a head follows from others
    (note,) = notes_of({"model_type": "gpt2", "n_embd": 64, "n_head": 4})
    assert note.endswith("gpt2's defaults: n_layer=12, n_positions=1024")
    window = plain("gemma2", 64, 4, 2, 2) | {"head_dim": 16}
    (note,) = notes_of(window)
    assert "sliding_window=4096" in note
    assert "layer_types (1 sliding_attention, 1 full_attention)" in note
    assert "head_dim" not in note


def test_what_follows_from_other_entries_is_no_default() -> None:
    """The kinds of layers from an interval, and the width of heads from a latent's parts."""
    hybrid = plain("qwen3_next", 64, 4, 2, 4, full_attention_interval=2, num_experts=2)
    assert not any("layer_types" in note for note in open_config("it", hybrid).notes)
    several = open_config("it", {k: v for k, v in hybrid.items() if "interval" not in k})
    assert any("layer_types (3 linear_attention, 1 full_attention)" in n for n in several.notes)
    notes = open_config("it", latent("deepseek_v3", 4, 1)).notes
    assert not any("head_dim" in note for note in notes)


def test_defaults_of_the_text_model_in_another() -> None:
    text = {k: v for k, v in plain("gemma3_text", 64, 4, 2, 2).items() if k != "head_dim"}
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 32}}
    opened = open_config("the config", config)
    (note,) = opened.notes
    assert "gemma3's defaults: head_dim=256" in note and "hidden_size" not in note


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"model_type": "mine", "architectures": ["MyForCausalLM"]},
            "model_type='mine', unknown to transformers with architecture MyForCausalLM, so its",
        ),
        ({"architectures": ["MyForCausalLM"]}, "no model_type with architecture MyForCausalLM"),
        (
            {"model_type": "mine", "llm_config": {"model_type": "its"}},
            "llm_config: has model_type=",
        ),
        ({"model_type": "mine", "architectures": ["PreTrainedModel"]}, "PreTrainedModel"),
        ({"model_type": "rwkv", "hidden_size": 8, "num_hidden_layers": 1}, "no attention"),
        (
            {"model_type": "x", "architectures": ["YiForCausalLM"], "num_attention_heads": 2},
            "has no entry for the model's width",
        ),
    ],
)
def test_what_is_not_known(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        cost(config)


@pytest.mark.parametrize(
    ("name", "sizes", "published"),
    [
        (
            "InternLM2-7B",
            {"intermediate_size": 14336, "vocab_size": 92544, "tie_word_embeddings": False},
            7_737_708_544,
        ),
        ("ChatGLM3-6B", {"add_qkv_bias": True, "tie_word_embeddings": False}, 6_243_584_000),
    ],
)
def test_parameters_of_architectures_like_others(
    name: str, sizes: dict[str, Any], published: int
) -> None:
    """All of them are there, as their pages on the hub count them."""
    assert cost(ROWS[name].config | sizes).weights.parameters == published


@pytest.mark.parametrize(
    ("config", "model"),
    [
        (SMALL | {"model_type": "x", "architectures": ["DeepseekForCausalLM"]}, "DeepseekFor"),
        (
            SMALL | {"model_type": "x", "architectures": ["MiniCPMForCausalLM"], "num_experts": 8},
            "MiniCPMForCausalLM",
        ),
        ({"model_type": "chat", "llm_config": SMALL}, "chat"),
    ],
    ids=["other feed-forward", "experts", "a model around"],
)
def test_weights_that_are_not_known(config: dict[str, Any], model: str) -> None:
    """What fits isn't computed from a stand-in's."""
    found = cost(config, dtype="bfloat16")
    with pytest.raises(MultiheadError, match=f"weights=None: of {model}.* aren't known.*give it"):
        found.fit("1GiB")
    assert found.fit("1GiB", weights="1MiB").max_batch_size
