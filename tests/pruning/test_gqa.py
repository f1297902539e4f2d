"""Sharing keys and values from beginning to end: the copy is a plain grouped model."""

from __future__ import annotations

import copy
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

import multihead
from data.test_tokenizing import small_tokenizer
from families import FAMILIES, batches_of, model_of
from multihead.errors import MultiheadError
from multihead.models.site import find_sites
from multihead.pruning.gqa import share
from multihead.pruning.plan import Plan
from multihead.pruning.shared_heads import write_shared_heads
from pruning.sharing import share_weights
from pruning.small_models import BATCHES, SMALL, make, outputs

DOCS = Path(__file__).parents[2] / "docs"


@cache
def texts() -> tuple[str, str]:
    return (DOCS / "attention.md").read_text(), (DOCS / "reading.md").read_text()[:12000]


@pytest.mark.parametrize("bias", [False, True])
def test_repeated_heads_compute_what_a_grouped_model_does(bias: bool) -> None:
    torch.manual_seed(1)
    options: Any = dict(**SMALL, head_dim=8, attention_bias=bias)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**options, num_key_value_heads=4)).eval()
    for p in model.parameters():
        p.data = p.data * 8 if p.ndim == 2 else p.data + 0.1 * torch.randn_like(p)
    grouped = tf.LlamaForCausalLM(tf.LlamaConfig(**options, num_key_value_heads=2)).eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    found = share_weights(model, 2, BATCHES)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [f.label for f in found] == ["L0", "L1"] and found[0].reads == (0, 0, 1, 1)
    grouped.load_state_dict({k: v for k, v in before.items() if "self_attn" not in k}, strict=False)
    for site, small, f in zip(find_sites(model), find_sites(grouped), found, strict=True):
        write_shared_heads(site, f)
        rows = small.slices()
        rows.q.put(f.q, f.q_bias)
        rows.k.put(f.k, f.k_bias)
        rows.v.put(f.v, f.v_bias)
        small.out.weight.data.copy_(f.out.flatten(0, 1).T)
        if bias:
            small.out.bias.data.copy_(f.out_bias)
    torch.testing.assert_close(outputs(grouped), outputs(model), rtol=1e-4, atol=1e-4)
    assert float((outputs(model) - outputs(grouped)).abs().max()) < 1e-3


@pytest.mark.parametrize(
    "family",
    [f for f in FAMILIES if f.name in ("bert", "llama", "phi3", "t5")],
    ids=lambda f: f.name,
)
def test_families(family: Any) -> None:
    """Fused, grouped already, encoders, cross-attention: every site can go to one key/value head,
    and the model still runs.
    """
    model = copy.deepcopy(model_of(family))
    batches = [dict(b) for b in BATCHES[:2]]
    if family.inputs == "both":
        batches = [b | {"decoder_input_ids": b["input_ids"][:, :9]} for b in batches]
    found = share_weights(model, 1, batches)
    pooled = share_weights(model, 1, batches, method="mean", refit=False)
    assert len(found) == len(find_sites(model))
    assert found[0].error < pooled[0].error
    for site, f in zip(find_sites(model), found, strict=True):
        write_shared_heads(site, f)
        assert f.k.shape[0] == 1 and 0 <= f.error < 1.2


@pytest.mark.parametrize(
    ("num_kv_heads", "options", "words"),
    [
        (
            3,
            {},
            "num_kv_heads=3: model.layers.0.self_attn has 4 key/value heads.*expected one of 1, 2,"
            " 4",
        ),
        (0, {}, "num_kv_heads=0"),
        (2, {"method": "best"}, "method='best': expected one of svd, aligned, mean"),
        (2, {"method": "first"}, "method='first': expected one of svd, aligned, mean"),
        (2, {"choice": "near"}, "choice='near': expected one of similar, neighbours"),
        (2, {"layers": [7]}, "layers=7 names no layer; expected labels, .* of L0 to L1"),
    ],
)
def test_bad_input(num_kv_heads: int, options: dict[str, Any], words: str) -> None:
    with pytest.raises(MultiheadError, match=words):
        share_weights(make("llama"), num_kv_heads, BATCHES, **options)


@pytest.mark.parametrize(
    ("texts", "tokenizer", "words"),
    [
        ([], small_tokenizer(), r"texts=\[\] is empty: expected at least one text"),
        ("it was", None, "tokenizer=None: this model came without one, so it can't read text"),
        (
            "a b c",
            small_tokenizer(),
            "texts hold 5 tokens: the keys and values of each group are fitted",
        ),
    ],
)
def test_bad_texts(texts: Any, tokenizer: Any, words: str) -> None:
    with pytest.raises(MultiheadError, match=words):
        share(make("llama"), texts, tokenizer=tokenizer, num_kv_heads=2)


def test_sharing_leaves_a_plain_grouped_model(tmp_path: Path) -> None:
    model, tokenizer = multihead.load_builtin()
    merged = multihead.share(model, texts()[0], tokenizer=tokenizer, num_kv_heads=2, tokens=1000)
    assert merged.loads_in_transformers and merged.num_kv_heads == (32, 8)
    assert {site.slices().num_kv_heads for site in find_sites(merged.model)} == {2}
    assert merged.model.config.num_key_value_heads == 2 and model.config.num_key_value_heads == 8
    names = [site.head_label(h) for site in find_sites(merged.model) for h in range(site.num_heads)]
    assert sorted(names) == sorted(
        site.head_label(h) for site in find_sites(model) for h in range(8)
    )
    merged.model.save_pretrained(tmp_path / "it")
    plain = type(model).from_pretrained(tmp_path / "it")
    ids = tokenizer("Heads that share keys and values.", return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(
            plain(**ids).logits, merged.model(**ids).logits, rtol=0, atol=1e-4
        )


def test_methods_in_their_order() -> None:
    """Of the ways to share, fitted ones leave the layers nearer to what they were than pooling
    does.
    """
    model, tokenizer = multihead.load_builtin()
    errors = {}
    for method, refit in (("svd", True), ("aligned", False), ("mean", False)):
        merged = multihead.share(
            model,
            texts()[0],
            tokenizer=tokenizer,
            num_kv_heads=4,
            method=method,
            refit=refit,
            tokens=1500,
            layers=["1-2"],
        )
        assert set(merged.errors) == {"L1", "L2"} and not merged.loads_in_transformers
        errors[method] = sum(merged.errors.values())
    assert errors["svd"] < errors["aligned"] < errors["mean"]


def test_layers_are_the_sites_that_were_named() -> None:
    family = next(f for f in FAMILIES if f.name == "bart")
    model, batches = model_of(family), batches_of(family, "none")
    found = share_weights(model, 2, batches, layers=["decoder.L0.cross"], refit=False)
    assert [one.label for one in found] == ["decoder.L0.cross"]  # and not the encoder's layer 0


def test_heads_that_share_unevenly_are_not_shared_again() -> None:
    model, tokenizer = multihead.load_builtin()
    grouped = multihead.share(
        model, texts()[0], tokenizer=tokenizer, num_kv_heads=4, method="mean", tokens=500
    ).model
    uneven = multihead.prune(
        grouped,
        texts()[0],
        tokenizer=tokenizer,
        remove=Plan(("L1.H0",)),
        compensate="none",
        context=64,
        tokens=700,
    ).model
    share = partial(multihead.share, uneven, texts()[0], tokenizer=tokenizer, num_kv_heads=2)
    with pytest.raises(
        ValueError, match=r"share its key/value heads unevenly.*; share first and prune then"
    ):
        share(method="mean", tokens=500)
    found = share(method="mean", tokens=500, layers=["L0", "2-3"])
    assert set(found.errors) == {"L0", "L2", "L3"}


def test_too_little_text_is_said() -> None:
    model, tokenizer = multihead.load_builtin()
    with pytest.raises(
        ValueError, match=r"texts hold \d tokens: .* which takes at least 64; give more"
    ):
        multihead.share(model, "Heads.", tokenizer=tokenizer, num_kv_heads=4)
