"""What plain transformers loads is proved by loading it, and the number in the way is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import multihead
from multihead.models import plain as plain_module
from multihead.models.plain import find_plain_config
from multihead.models.pruned import finalize_config
from multihead.models.site import find_sites
from multihead.pruning.surgery import remove_heads

SIZES: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=8, vocab_size=40
)
GROUPED: dict[str, Any] = {"num_key_value_heads": 4, "pad_token_id": 0}
BATCH = {"input_ids": torch.arange(2, 14).reshape(2, 6)}


def build(name: str, **changes: Any) -> Any:
    """A small random model, of which `NAMEConfig` and `NAMEForCausalLM` or `NAMEModel` are
    classes.
    """
    config = getattr(tf, f"{name.removesuffix('Text')}{'Text' * name.endswith('Text')}Config")
    kind = next(
        kind
        for end in ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "Model")
        if (kind := getattr(tf, f"{name.removesuffix('Text')}{end}", None)) is not None
    )
    torch.manual_seed(0)
    model = kind(config(**SIZES | changes)).eval()
    for parameter in model.parameters():
        parameter.data = 0.4 * torch.randn_like(parameter)
    return model


def cut(model: Any, kept: int, batch: Any = BATCH) -> Any:
    """The model with the first groups of its first layer, and the last of the others."""
    removed = {}
    for number, site in enumerate(find_sites(model)):
        heads = list(range(site.num_heads))
        removed[site.name] = heads[kept:] if number == 0 else heads[: len(heads) - kept]
    return remove_heads(model, removed, batch)


# family, changes of its config, heads that are kept of 8 in groups of 2
LOADED = [
    ("Llama", GROUPED | {"head_dim": 6}, 4),
    ("Llama", GROUPED | {"attention_bias": True}, 4),
    ("Mistral", GROUPED, 6),
    ("Qwen2", GROUPED, 6),
    ("Qwen2", GROUPED | {"tie_word_embeddings": True}, 2),
    ("Qwen2", {"num_key_value_heads": 8}, 5),
    ("Qwen3", GROUPED | {"head_dim": 6}, 6),
    ("Gemma", GROUPED | {"head_dim": 6}, 6),
    ("Gemma2", GROUPED | {"head_dim": 6}, 4),
    ("Gemma3Text", GROUPED | {"head_dim": 6}, 4),
    ("Phi3", GROUPED, 6),
    ("Granite", GROUPED, 6),
    ("Starcoder2", GROUPED, 6),
    ("Cohere", GROUPED, 6),
    ("Olmo", GROUPED, 6),
    ("Phi", GROUPED, 6),
]


@pytest.mark.parametrize(("name", "changes", "kept"), LOADED)
def test_plain_transformers_loads_it(
    tmp_path: Path, name: str, changes: dict[str, Any], kept: int
) -> None:
    smaller = cut(build(name, **changes), kept)
    found = finalize_config(smaller, BATCH)
    assert found, found.reason
    smaller.save_pretrained(tmp_path)
    loaded = type(smaller).from_pretrained(tmp_path)
    site = find_sites(loaded)[0]
    assert site.num_heads == kept and site.num_kv_heads == kept * site.num_kv_heads // kept
    with torch.no_grad():
        torch.testing.assert_close(
            loaded(**BATCH).logits, smaller(**BATCH).logits, rtol=1e-4, atol=1e-5
        )


GPT2 = dict(n_embd=32, n_head=8, n_layer=2, n_positions=16)
REASONS = [
    ("Llama", GROUPED, 6, "hidden_size 32 is not a multiple of 6 heads"),
    (
        "GPTNeoX",
        {},
        4,
        "hidden_size 32 over 4 heads would make them 8 wide, and they are 4 wide: GPTNeoXConfig",
    ),
    ("GPT2", GPT2, 4, "n_embd 32 over 4 heads would make them 8 wide, and they are 4 wide"),
    ("Bert", {}, 6, "hidden_size 32 is not a multiple of 6 heads"),
    ("Bert", {}, 2, "hidden_size 32 over 2 heads would make them 16 wide, and they are 4 wide"),
    ("OPT", {"ffn_dim": 24, "word_embed_proj_dim": 32}, 4, "hidden_size 32 over 4 heads"),
    ("Gemma2", GROUPED | {"head_dim": 6}, 6, "hidden_size 32 is not a multiple of 6 heads"),
]


@pytest.mark.parametrize(("name", "changes", "kept", "reason"), REASONS)
def test_the_number_in_the_way_is_named(
    name: str, changes: dict[str, Any], kept: int, reason: str
) -> None:
    found = find_plain_config(cut(build(name, **changes), kept), BATCH)
    assert not found and found.reason.startswith(reason), found.reason


@pytest.mark.parametrize(
    ("removed", "reason"),
    [
        ({1: range(8)}, "model.layers.1.self_attn has no heads left, and the configs"),
        ({0: [0], 1: [0]}, "the query heads of model.layers.0.self_attn share its key/value heads"),
        ({0: [0, 1]}, "its layers have 6 to 8 heads, and Qwen2Config has one number for all"),
    ],
)
def test_layers_that_differ(removed: dict[int, Any], reason: str) -> None:
    model = build("Qwen2", **GROUPED)
    sites = find_sites(model)
    smaller = remove_heads(model, {sites[n].name: list(h) for n, h in removed.items()}, BATCH)
    assert find_plain_config(smaller, BATCH).reason.startswith(reason)


LAGUNA = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
STEP = LAGUNA | {"n_routed_experts": 4, "share_expert_dim": 8, "sliding_window": 4}


def test_a_list_of_numbers_by_layer(tmp_path: Path) -> None:
    """Laguna's config has one; query heads differ by layer, and what reads the rest stays."""
    model = build("Laguna", **GROUPED | LAGUNA | {"head_dim": 6})
    first = find_sites(model)[0].name
    smaller = remove_heads(model, {first: [1, 3, 5, 7]}, BATCH)
    assert finalize_config(smaller, BATCH)
    assert smaller.config.num_attention_heads_per_layer == [4, 8]
    smaller.save_pretrained(tmp_path)
    for load in (type(smaller).from_pretrained, multihead.load):
        with torch.no_grad():
            torch.testing.assert_close(load(tmp_path)(**BATCH).logits, smaller(**BATCH).logits)
    found = find_plain_config(remove_heads(model, {first: [6, 7]}, BATCH), BATCH)
    assert found.reason == "its layers have 6 to 8 heads, and LagunaConfig has one number for all"


def test_numbers_by_layer_in_per_layer_config(tmp_path: Path) -> None:
    """The general form of transformers, which few families' code reads (Step-3.7)."""
    sizes = SIZES | GROUPED | STEP | {"head_dim": 6, "num_hidden_layers": 3}
    torch.manual_seed(0)
    model = tf.Step3p7TextModel(tf.Step3p7TextConfig(**sizes)).eval()
    smaller = remove_heads(model, {find_sites(model)[1].name: [1, 3, 5, 7]}, BATCH)
    assert finalize_config(smaller, BATCH)
    smaller.save_pretrained(tmp_path)
    stated = json.loads((tmp_path / "config.json").read_text())["per_layer_config"]
    assert stated == {"1": {"num_attention_heads": 4}}
    for load in (type(smaller).from_pretrained, multihead.load):
        with torch.no_grad():
            state, want = load(tmp_path)(**BATCH)[0], smaller(**BATCH)[0]
        torch.testing.assert_close(state, want)


def test_pictures_too() -> None:
    batch = {"pixel_values": torch.randn(1, 3, 8, 8)}
    smaller = cut(build("ViT", image_size=8, patch_size=4), 5, batch)
    assert find_plain_config(smaller, batch).config.head_dim == 4


def test_a_config_read_back_must_be_valid_and_give_the_same(monkeypatch: Any) -> None:
    """Shapes alone don't prove it: two heads of 8 have the weights of four heads of 4."""
    smaller = cut(build("Qwen2", **GROUPED), 4)
    change = {((), "num_attention_heads"): 2, ((), "num_key_value_heads"): 1, ((), "head_dim"): 8}
    monkeypatch.setattr(plain_module, "_changes", lambda parts: [change])
    assert find_plain_config(smaller)
    found = find_plain_config(smaller, BATCH)
    assert not found and "its outputs differ by" in found.reason


def test_a_bias_that_no_setting_gives_is_named() -> None:
    model = build("Qwen2", **GROUPED)
    out = find_sites(model)[0].out
    out.bias = torch.nn.Parameter(torch.ones(32))
    found = find_plain_config(model, BATCH)
    assert found.reason.startswith("model.layers.0.self_attn.o_proj.bias replaces removed heads")


@pytest.mark.parametrize("name", ["Llama", "Granite", "Gemma", "Cohere", "Olmo"])
def test_a_setting_for_biases_is_found(name: str) -> None:
    """Zeros for the projections that have none, as for the queries and in the other layer."""
    model = build(name, **GROUPED | ({"head_dim": 6} if name == "Gemma" else {}))
    find_sites(model)[0].out.bias = torch.nn.Parameter(torch.ones(32))
    found = find_plain_config(model, BATCH)
    assert found.config.attention_bias and "model.layers.1.self_attn.o_proj" in found.biases
    assert "model.layers.0.self_attn.o_proj" not in found.biases


@settings(max_examples=12, deadline=None)
@given(
    kept=st.lists(st.sampled_from([1, 2, 3, 4]), min_size=2, max_size=2),
    name=st.sampled_from(["Qwen2", "Llama", "Phi3"]),
    head_dim=st.sampled_from([None, 4, 6]),
)
def test_whatever_is_called_plain_is(kept: list[int], name: str, head_dim: int | None) -> None:
    """Layers of one number, and others; a width that the class declares or not."""
    changes = GROUPED | ({} if head_dim is None else {"head_dim": head_dim})
    model = build(name, **changes)
    removed = {
        site.name: list(range(2 * groups, 8))
        for site, groups in zip(find_sites(model), kept, strict=True)
    }
    smaller = remove_heads(model, removed, BATCH)
    found = find_plain_config(smaller, BATCH)
    works = kept[0] == kept[1] and (name != "Llama" or 32 % (2 * kept[0]) == 0)
    assert bool(found) == works, found.reason
    if not works:
        assert ("its layers have" if kept[0] != kept[1] else "is not a multiple") in found.reason
