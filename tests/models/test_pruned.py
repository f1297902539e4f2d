"""The config of a pruned model: loaded by multihead, by plain transformers if possible, and pruned again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import multihead
from multihead.models.pruned import finalize_config, pruned_class
from multihead.models.site import find_sites
from multihead.pruning.surgery import remove_heads
from pruning.test_checkpoint import pruned


def test_a_config_of_another_version_is_refused(tmp_path: Path) -> None:
    smaller, _, _ = pruned("llama", {0: [0], 1: [1]})
    smaller.save_pretrained(tmp_path / "it")
    file = tmp_path / "it" / "config.json"
    told = json.loads(file.read_text())
    told["multihead"]["version"] = 7
    file.write_text(json.dumps(told))
    with pytest.raises(
        ValueError,
        match=r"\"multihead\" in its config\.json is of version 7; this multihead reads 1",
    ):
        multihead.load(tmp_path / "it")


def test_pruned_saved_and_pruned_again(tmp_path: Path) -> None:
    smaller, batch, plain = pruned("llama", {0: [0, 1], 1: [4, 5]})
    assert plain
    smaller.save_pretrained(tmp_path / "once")
    again = multihead.load(tmp_path / "once")
    sites = find_sites(again)
    twice = remove_heads(again, {sites[0].name: [3], sites[1].name: [0]}, batch)
    assert not finalize_config(twice)
    twice.save_pretrained(tmp_path / "twice")
    back = multihead.load(tmp_path / "twice")
    assert [s.head_label(h) for s in find_sites(back) for h in range(s.num_heads)] == [
        "L0.H2",
        "L0.H3",
        "L0.H4",
        "L1.H1",
        "L1.H2",
        "L1.H3",
    ]
    with torch.no_grad():
        torch.testing.assert_close(back(**batch).logits, twice(**batch).logits, rtol=0, atol=1e-6)


def test_generates_and_trains(tmp_path: Path) -> None:
    smaller, batch, _ = pruned("llama", {0: [0], 1: [1, 2, 3]}, means=True)
    smaller.save_pretrained(tmp_path / "it")
    model = multihead.load(tmp_path / "it")
    ids = batch["input_ids"][:1, :5]
    plain = model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False, pad_token_id=5)
    assert (
        model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=5).tolist()
        == plain.tolist()
    )
    table = multihead.read(model, [dict(batch)])
    assert [row["head"] for row in table.rows()] == [
        s.head_label(h) for s in find_sites(model) for h in range(s.num_heads)
    ]
    model.train().requires_grad_(True)
    loss = model(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    assert all(
        p.grad is not None and torch.isfinite(p.grad).all()
        for n, p in model.named_parameters()
        if "self_attn" in n
    )


def test_a_config_describes_the_heads_where_it_can() -> None:
    """Equal layers become the config's own numbers; others stay under the name "multihead"."""
    plain, _batch, is_plain = pruned("llama", {0: [0, 1], 1: [4, 5]})
    assert is_plain and plain.config.num_attention_heads == 4
    assert plain.config.num_key_value_heads == 2
    uneven, _, is_plain = pruned("llama", {0: [0, 1]})
    assert not is_plain and uneven.config.num_attention_heads == 6
    sites = uneven.config.multihead["sites"]
    assert list(sites) == ["model.layers.0.self_attn"] and sites[next(iter(sites))]["of"] == 6


def test_models_without_an_entry_have_their_own_class() -> None:
    assert pruned_class(torch.nn.Linear, {}) is None
    with pytest.raises(ValueError, match="is of version None"):
        pruned_class(torch.nn.Linear, {"multihead": []})
