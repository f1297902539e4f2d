"""The sweep over model types: what it calls read is read, and what is wrong it calls failed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sweep.judge import judge_type


@pytest.mark.parametrize(
    ("name", "kinds", "runs"),
    [
        ("llama", ["self"], {"plain", "right", "left", "packed", "cache", "cache, left"}),
        (
            "qwen3_next",
            ["self"],
            {"plain", "left", "cache"},
        ),  # a gate of each number, and linear attention between
        ("bitnet", ["self"], {"plain", "left"}),  # a norm between the heads and W_O
        (
            "deepseek_v32",
            ["self"],
            {"plain", "left", "cache"},
        ),  # keys chosen by an indexer; values of another width than keys
        (
            "granite_swa",
            ["self"],
            {"plain", "left"},
        ),  # sinks that its eager function applies to the output
        (
            "t5gemma2",
            ["self"],
            {"plain", "left"},
        ),  # one attention over the encoder's and the decoder's keys
        ("idefics2", ["self"], {"plain"}),  # a resampler between picture and text
        ("qwen2_5_vl", ["self"], {"plain", "right", "left"}),  # a call for each picture
        ("markuplm", ["self"], {"plain", "left"}),  # -10000 for padding
        pytest.param("swin", ["self"], {"plain"}, marks=pytest.mark.slow),  # windows
        ("t5", ["cross", "self"], {"plain", "right", "left", "cache"}),
        ("dia", ["cross", "self"], {"plain"}),  # token ids of several channels, with a cache
        (
            "sam2_hiera_det_model",
            ["self"],
            {"plain"},
        ),  # says how many heads it has, not how wide they are
        ("kyutai_speech_to_text", ["self"], {"plain"}),  # a projection that wraps a Linear
        (
            "git",
            ["self"],
            {"plain", "right"},
        ),  # text whose attention doesn't come through the interface adds its mask
        pytest.param(
            "sam3", ["cross", "self"], {"plain", "left"}, marks=pytest.mark.slow
        ),  # queries that are fewer than the words, beside a padded text
    ],
)
def test_read_as_eager_computes_it(name: str, kinds: list[str], runs: set[str]) -> None:
    found = judge_type(name)
    assert found["verdict"] == "read", found
    assert found["kinds"] == kinds and runs <= set(found["runs"]), found
    assert 0 < found["reached"] <= found["sites"]


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("qwen3_next", "Qwen3NextGatedDeltaNet"),
        ("jamba", "JambaMambaMixer"),
        ("lfm2_moe", "Lfm2MoeShortConv"),
    ],
)
def test_a_hybrid_says_which_layers_are_not_read(name: str, other: str) -> None:
    found = judge_type(name)
    assert found["verdict"] == "read" and any(
        note.startswith(f"not read: {other} ") for note in found["notes"]
    ), found


@pytest.mark.parametrize(
    ("name", "verdict", "words"),
    [
        ("bloom", "refused", "BloomAttention.*attention interface"),
        ("mamba", "no attention", "MambaModel can't be read"),
        ("jetmoe", "refused", "JetMoeAttention.*output projection"),
        ("minimax_m3_vl_text", "refused", "block_indices="),
        ("diffllama", "refused", "DiffLlamaAttention.*calls attention 2 times"),
        ("mlcd", "refused", "MLCDAttention.*neither the output of its heads"),
    ],
)
def test_refused_by_name(name: str, verdict: str, words: str) -> None:
    import re

    found = judge_type(name)
    assert found["verdict"] == verdict and re.search(words, found["reason"]), found


def test_a_model_whose_eager_attention_is_another_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """What eager computes is the measure: doubled scores there, and the outputs under reading
    aren't those.
    """
    from transformers.models.llama import modeling_llama

    right = modeling_llama.eager_attention_forward

    def doubled(module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        return right(module, 2 * query, *args, **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", doubled)
    found = judge_type("llama")
    assert found["verdict"] == "failed" and "outputs differ" in found["reason"], found


@pytest.mark.parametrize("column", ["entropy", "contribution:first", "norm", "duplicate"])
def test_a_statistic_that_is_wrong_fails_by_name(
    monkeypatch: pytest.MonkeyPatch, column: str
) -> None:
    from multihead.reader.accumulate import SiteRecord

    right = SiteRecord.add

    def wrong(self: Any, name: str, x: Any, y: Any, rows: Any) -> None:
        right(self, name, x * (1.01 if name == column else 1), y, rows)

    monkeypatch.setattr(SiteRecord, "add", wrong)
    found = judge_type("llama")
    assert found["verdict"] == "failed" and any(
        f"head 0 {column}:" in line for line in found["differences"]
    ), found


def test_a_projection_that_is_another_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """W_O is judged by what the heads' output enters, whatever the table of names has."""
    from multihead.models import names

    # as wide as W_O in the plainer recipes
    monkeypatch.setattr(names, "NAMES", replace(names.NAMES, out=("q_proj",)))
    found = judge_type("vit")
    assert found["verdict"] in ("failed", "refused") and "q_proj" in found["reason"], found


def test_a_site_that_is_left_out_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from multihead.reader import session

    right = session.find_sites
    monkeypatch.setattr(session, "find_sites", lambda model: right(model)[1:])
    found = judge_type("llama")
    assert found["verdict"] == "failed" and "isn't among the sites" in found["reason"], found
