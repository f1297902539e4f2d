"""Shapes by their formulas, what other heads would cost, the table, and what bad input gets."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as tf
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import multihead
from multihead import MultiHeadAttention, cli, cost
from multihead.costs.shape import DTYPES, Shape, allowed, size

SMALL = dict(
    hidden_size=48,
    intermediate_size=40,
    num_hidden_layers=3,
    vocab_size=17,
    max_position_embeddings=64,
)


# ---- formulas


@given(st.integers(1, 40), st.integers(1, 45), st.booleans(), st.booleans())
def test_pairs_that_masks_allow(rows: int, window: int, causal: bool, chunked: bool) -> None:
    i, j = np.arange(rows)[:, None], np.arange(rows)
    if causal:
        may = (j <= i) & ((i // window == j // window) if chunked else (i - j < window))
    else:
        may = abs(i - j) <= window
    assert allowed(rows, window, causal=causal, chunked=causal and chunked) == may.sum()
    assert allowed(rows, causal=causal) == ((j <= i) if causal else (i >= 0) | (j >= 0)).sum()


@given(
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 60),
    st.integers(1, 60),
)
def test_a_cache_holds_what_the_next_token_may_read(
    groups: int, share: int, head: int, value: int, context: int, window: int
) -> None:
    shape = Shape(8, groups * share, groups, head, value, window=window)
    row = groups * (head + value) * 2
    assert shape.cache("float16", context) == row * min(context, window)
    assert shape.cache("float16", context, kept="transformers") == row * min(context, window - 1)
    full = replace(shape, window=None)
    assert full.cache("float16", context, kept="paged") == row * (context + -context % 16)
    touched = {t // 16 for t in range(max(0, context - window + 1), context)} or {
        0
    }  # pages of the window but the next token
    paged = shape.cache("float16", context, kept="paged")
    assert len(touched) * 16 * row <= paged <= full.cache("float16", context, kept="paged")
    assert shape.decode(context, 0).scores == 2 * groups * share * head * min(context + 1, window)


def test_bytes_of_quantised_numbers() -> None:
    sizes = pytest.importorskip("gguf").GGML_QUANT_SIZES
    for kind, (held, stored) in sizes.items():
        if (name := kind.name.lower()) in DTYPES:
            assert DTYPES[name] == (stored, held), name
    assert {name: size(name, 256) for name in DTYPES if not name.startswith("q")} == {
        "float64": 2048,
        "float32": 1024,
        "bfloat16": 512,
        "float16": 512,
        "float8": 256,
        "int8": 272,
        "int4": 144,
        "int2": 80,
    }
    assert size("q4_0", 33) == 36  # a block more
    found = cost(d_model=256, heads=4, context=10, dtype="q8_0")
    assert found.cache() == 10 * 2 * 8 * 34
    assert (
        found.memory == cost(d_model=256, heads=4, context=10).memory
    )  # only the cache is quantised


def test_memory() -> None:
    found = cost(d_model=64, heads=8, kv_heads=2, layers=3, context=100, batch=5, dtype="float32")
    rows = 5 * 100
    assert found.memory == {
        "probabilities": rows * 8 * 100 * 4,
        "probabilities, all layers": 3 * rows * 8 * 100 * 4,
        "streamed": rows * 8 * 4,
        "streamed, all layers": 3 * rows * 8 * 4,
        "activations": (
            rows * (64 + 64 + 16 + 16 + 64 + 64) * 4
        ),  # input, queries, keys, values, heads' outputs, output
        "activations, all layers": 3 * rows * 288 * 4,
    }
    assert (
        cost(d_model=64, heads=8, context=100).memory["streamed"] == 100 * 8 * 4
    )  # in float32, whatever the dtype


# ---- other heads


def llama(groups: int, heads: int = 6, head_dim: int = 8) -> tf.LlamaConfig:
    return tf.LlamaConfig(
        **SMALL,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        attention_bias=True,
    )


def numbers(found: multihead.costs.Cost) -> tuple[Any, ...]:
    return (
        found.parameters,
        found.prefill(),
        found.prefill(full=True),
        found.decode(),
        found.cache(),
        found.memory,
    )


def test_other_heads_cost_what_such_a_model_costs() -> None:
    found = cost(llama(2), context=20)
    ways = found.alternatives()
    assert [name for name, _ in ways] == [
        "MHA",
        "GQA",
        "GQA",
        "MQA",
        "MLA",
        "MHA, fewer heads",
        "MHA, more heads",
    ]
    for (_, one), groups in zip(ways, (6, 3, 2, 1), strict=False):
        assert numbers(one) == numbers(cost(llama(groups), context=20)), groups
    for (_, one), (heads, wide) in zip(ways[5:], ((3, 16), (12, 4)), strict=True):
        assert numbers(one) == numbers(cost(llama(heads, heads, wide), context=20)), heads
        assert (one.parameters, one.prefill()) == (
            ways[0][1].parameters,
            ways[0][1].prefill(),
        )  # whatever the number of heads


def test_a_latent_costs_what_such_a_model_costs() -> None:
    plain = tf.LlamaConfig(**SMALL, num_attention_heads=6, num_key_value_heads=2, head_dim=8)
    latent = tf.DeepseekV3Config(
        **SMALL,
        num_attention_heads=6,
        num_key_value_heads=6,
        q_lora_rank=None,
        kv_lora_rank=32,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        first_k_dense_replace=3,
    )
    found = dict(cost(plain, context=20).alternatives())["MLA"]
    assert numbers(found) == numbers(cost(latent, context=20))
    assert found.cache_per_token == 3 * (32 + 4) * 2
    back = dict(cost(latent, context=20).alternatives())["MHA"]
    assert numbers(back) == numbers(dict(cost(plain, context=20).alternatives())["MHA"])


def test_decoding_from_a_latent() -> None:
    """Absorbed, a score is a product over latent and position; made anew, every cached token is
    projected again.
    """
    shape = Shape(48, 6, 6, 12, 8, latent=32, rope=4)
    up, keys = 32 * 6 * (8 + 8), 21
    absorbed, anew = shape.decode(20, 0), shape.decode(20, 0, expanded=True)
    assert (absorbed.scores, absorbed.mixing) == (2 * 6 * 36 * keys, 2 * 6 * 32 * keys)
    assert (
        anew.projections - absorbed.projections == 2 * up * 20 and anew.scores == 2 * 6 * 12 * keys
    )
    kept = replace(shape, expands=True)  # transformers before it kept latents
    assert kept.decode(20, 0, expanded=True).projections == absorbed.projections
    assert (
        kept.cache("float16", 20, kept="transformers")
        == 20 * 6 * 20 * 2
        != kept.cache("float16", 20)
    )


# ---- modules, and layers that differ


def test_a_model_whose_layers_differ() -> None:
    """As after pruning: every module is its own shape."""
    layers = nn.ModuleList(
        MultiHeadAttention(24, heads, num_kv_heads=groups, head_dim=8)
        for heads, groups in ((3, 1), (2, 2))
    )
    found = cost(layers, context=7)
    assert [(s.heads, s.kv_heads, s.head_dim) for s in found.shapes] == [(3, 1, 8), (2, 2, 8)]
    assert sum(found.parameters.values()) == sum(p.numel() for p in layers.parameters())
    assert cost(nn.MultiheadAttention(24, 3)).parameters == dict.fromkeys(
        ("query", "key", "value", "output"), 24 * 25
    )


@pytest.mark.parametrize(
    "config",
    [
        tf.BloomConfig(hidden_size=48, n_head=6, n_layer=2, vocab_size=17),
        tf.FalconConfig(
            hidden_size=48,
            num_attention_heads=6,
            num_hidden_layers=2,
            vocab_size=17,
            multi_query=True,
        ),
        tf.GPTNeoConfig(
            hidden_size=48,
            num_heads=6,
            num_layers=2,
            attention_types=[[["global", "local"], 1]],
            vocab_size=17,
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_attention_that_cannot_be_read_is_counted(config: Any) -> None:
    found = cost(config)
    model = tf.AutoModel.from_config(config)
    names = [shape.name for shape in found.shapes]
    assert (
        len(names) == 2
        and "other" not in found.parameters
        and all(s.causal and s.cached for s in found.shapes)
    )
    assert sum(found.parameters.values()) == sum(
        p.numel() for n in names for p in model.get_submodule(n).parameters()
    )


def test_hybrids_and_shared_modules() -> None:
    types = ["linear_attention", "full_attention"]
    hybrid = cost(
        tf.Qwen3NextConfig(
            **SMALL | {"num_hidden_layers": 2},
            num_attention_heads=6,
            num_key_value_heads=3,
            head_dim=8,
            layer_types=types,
            num_experts=2,
            num_experts_per_tok=1,
        )
    )
    assert [s.label for s in hybrid.shapes] == ["L1"] and hybrid.parameters["gate"] == 48 * 48
    assert any("Qwen3NextGatedDeltaNet" in note for note in hybrid.notes)
    sizes = dict(
        embedding_size=16,
        hidden_size=48,
        num_attention_heads=6,
        intermediate_size=40,
        vocab_size=17,
    )
    albert = cost(tf.AlbertConfig(**sizes, num_hidden_layers=5), context=7)
    one = cost(tf.AlbertConfig(**sizes, num_hidden_layers=1), context=7)
    assert albert.parameters == one.parameters and albert.prefill().total == 5 * one.prefill().total


def test_layers_that_share_a_cache() -> None:
    sizes = dict(
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=8,
        laurel_rank=4,
        hidden_size_per_layer_input=4,
    )
    config = tf.Gemma3nTextConfig(
        **SMALL | {"num_hidden_layers": 4},
        **sizes,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        sliding_window=5,
        activation_sparsity_pattern=[0.0] * 4,
        vocab_size_per_layer_input=17,
    )
    found = cost(config, context=20, dtype="bfloat16")
    assert [s.own_keys for s in found.shapes] == [True, True, False, False]
    assert found.cache() == (5 + 20) * 3 * 16 * 2 and found.shapes[2].parameters["key"] == 0
    assert [s.window for s in found.shapes] == [5, None, 5, None]


def test_a_window_laid_over_a_model() -> None:
    """Costs what a model costs that comes with it."""
    sizes = dict(**SMALL, num_attention_heads=6, num_key_value_heads=2, head_dim=8)
    laid, own = (
        cost(tf.LlamaConfig(**sizes), context=20, window=4),
        cost(tf.MistralConfig(**sizes, sliding_window=4), context=20),
    )
    assert numbers(laid) == numbers(own) and laid.cache() == 4 * laid.cache_per_token
    assert laid.prefill().scores == 3 * 2 * 6 * 8 * allowed(20, 4) < laid.prefill(full=True).scores
    assert numbers(cost(tf.LlamaConfig(**sizes), context=20, window=50)) == numbers(
        cost(tf.LlamaConfig(**sizes), context=20)
    )


# ---- what a user sees


def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["multihead", "cost", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    llama(2).save_pretrained(tmp_path)
    table, picture = tmp_path / "cost.json", tmp_path / "cost.png"
    code, out, err = call(
        monkeypatch,
        capsys,
        str(tmp_path),
        "--context-length",
        "20",
        "--batch-size",
        "3",
        "--dtype",
        "float32",
        "--window",
        "8",
        "--json",
        str(table),
        "--plot",
        str(picture),
    )
    assert code == 0, err
    found = cost(tmp_path, context=20, batch=3, dtype="float32", window=8)
    assert str(found) in out and f"wrote {table}" in out and picture.read_bytes()[1:4] == b"PNG"
    assert json.loads(table.read_text()) == found.to_dict()
    one = found.to_dict()
    assert one["cache"] == {
        "theory": 3 * 8 * 384,
        "transformers": 3 * 7 * 384,
        "paged": 3 * 32 * 384,
    }
    assert (
        sum(layer["parameters"]["total"] for layer in one["layers"]) == one["parameters"]["total"]
    )
    assert (
        len(one["alternatives"]) == 7
        and one["layers"][0]["label"] == "L0"
        and one["layers"][0]["window"] == 8
    )
    assert code == 0 and "window 8" in out and "6/2 x 8" in out and "10.12 KiB" in out


def test_numbers_instead_of_a_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = call(
        monkeypatch,
        capsys,
        "--embed-dim",
        "768",
        "--num-heads",
        "12",
        "--num-kv-heads",
        "4",
        "--head-dim",
        "32",
        "--num-layers",
        "2",
    )
    assert code == 0 and "L0-L1" in out and "12/4 x 32" in out
    assert str(cost(d_model=768, heads=12, kv_heads=4, head_dim=32, layers=2)) in out


def test_the_built_in_model_its_config_alone_and_the_model_itself(tmp_path: Path) -> None:
    found = cost(dtype="float32")
    model, _ = multihead.load_builtin()
    assert (
        numbers(cost(model)) == numbers(found) == numbers(cost(model.config))
    )  # in the dtype that it was loaded in
    assert sum(found.parameters.values()) == 4 * 4 * 192 * 192 and found.name == "built-in"
    (tmp_path / "any.json").write_text(json.dumps(model.config.to_dict()))
    assert (
        numbers(cost(tmp_path / "any.json"))
        == numbers(found)
        == numbers(cost(model.config.to_dict()))
    )


@pytest.mark.parametrize(
    "config",
    [
        tf.WhisperConfig(),
        tf.DeepseekV3Config(num_hidden_layers=4),
        tf.Gemma3TextConfig(),
        tf.GptOssConfig(num_hidden_layers=8),
        tf.BertConfig(),
        tf.CLIPConfig(),
    ],
    ids=lambda config: config.model_type,
)
def test_the_table_fits(config: Any) -> None:
    shown = str(cost(config, batch=64)).splitlines()
    assert max(len(line) for line in shown if not line.startswith("note")) <= 100
    assert ("no cache" in "\n".join(shown)) == (config.model_type in ("bert", "clip"))


def test_the_source_of_an_encoder_decoder() -> None:
    config = tf.WhisperConfig(
        d_model=48,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=6,
        encoder_ffn_dim=40,
        decoder_ffn_dim=40,
    )
    found = cost(config, context=100, dtype="float16")
    assert found.source == 1500 and [s.cross for s in found.shapes].count(True) == 3
    assert (
        found.cache() == 3 * 2 * 48 * 2 * (100 + 1500) and found.cache_per_token == 3 * 2 * 48 * 2
    )
    assert cost(config, context=200).at(100).source == 1500
    assert (
        found.decode().projections == 2 * 3 * (4 + 2) * 48 * 48
    )  # nothing of the source is projected again


def test_the_page_about_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Its Python runs, and what it says stands beside the measured numbers is what is said
    today.
    """
    page = (Path(__file__).parents[2] / "docs" / "cost.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    assert "131,072 bytes a token" in capsys.readouterr().out and names["found"].cache() == 2**30
    rows = re.findall(r"^\| (\d+) \| ([\d,]+) \| (\w+) \| (.*) \|$", page, re.MULTILINE)
    for batch, tokens, dtype, cells in rows:
        found = cost(
            d_model=576,
            heads=9,
            kv_heads=3,
            layers=30,
            dtype=dtype,
            batch=int(batch),
            context=int(tokens.replace(",", "")),
        )
        said = (found.cache("transformers"), found.prefill(full=True).total, found.decode().total)
        assert [int(cell.replace(",", "")) for cell in cells.split(" | ")] == [
            number for one in said for number in (one, one)
        ]
    assert len(rows) == 4


# ---- bad input


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--embed-dim", "768"], "d_model=768: give the number of heads too (--num-heads)"),
        (["--embed-dim", "768", "--num-heads", "7"], "7 heads don't divide 768"),
        (
            ["--embed-dim", "768", "--num-heads", "12", "--num-kv-heads", "5"],
            "12 query heads can't share 5 key/value heads evenly",
        ),
        (["--num-heads", "4"], "heads=4: goes with d_model (--embed-dim)"),
        (
            ["FOLDER", "--embed-dim", "8", "--num-heads", "2"],
            "give one of them, a model or its numbers",
        ),
        (["--context-length", "-1"], "context=-1: expected a whole number from 1 on"),
        (["--batch-size", "0"], "batch=0: expected a whole number from 1 on"),
        (["--window", "0"], "window=0: expected a whole number from 1 on"),
        (["--dtype", "float17"], "dtype='float17': expected one of float64, float32"),
        (["FOLDER"], "the folder has no config.json; give the folder of a transformers checkpoint"),
        (["FOLDER/nowhere.json"], "there is no such file or folder"),
        (["FOLDER/list.json"], "list.json: holds a list, expected named entries"),
        (["FOLDER/broken.json"], "broken.json': is not valid JSON"),
        (
            ["FOLDER/bare.json"],
            (
                "has no model_type, so its attention can't be built; give its sizes instead:"
                " --embed-dim"
            ),
        ),
        (["FOLDER/alien.json"], "has model_type='alien', unknown to transformers"),
        (["FOLDER/empty.json"], "has no entry for the model's width (hidden_size"),
        (
            ["FOLDER/headless.json"],
            "has no entry for the model's number of heads (num_attention_heads",
        ),
        (["FOLDER/uneven.json"], "transformers can't build a config from it"),
        (["FOLDER/unshared.json"], "8 query heads can't share 3 key/value heads evenly"),
        (["FOLDER/mamba.json"], "has no attention that is known here"),
        (["FOLDER/model.safetensors"], "a cost needs no weights"),
        (["--plot", "FOLDER/x.svg"], "expected a name that ends in .png"),
        (["--json", "FOLDER/no/x.json"], "doesn't exist; make it first"),
    ],
)
def test_what_is_wrong_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    words: str,
) -> None:
    sizes = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1}
    for name, content in {
        "list": [1],
        "bare": {"hidden_size": 8, "num_heads": 2},
        "alien": {"model_type": "alien"},
        "empty": {"model_type": "llama"},
        "headless": sizes,
        "uneven": sizes | {"num_attention_heads": 5},
        "unshared": sizes | {"num_attention_heads": 8, "num_key_value_heads": 3},
        "mamba": {
            "model_type": "mamba",
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_heads": 2,
            "vocab_size": 7,
        },
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "model.safetensors").write_text("")
    before = sorted(tmp_path.iterdir())
    code, out, err = call(
        monkeypatch, capsys, *(option.replace("FOLDER", str(tmp_path)) for option in options)
    )
    assert code == 2 and words in err and not out and "Traceback" not in err
    assert sorted(tmp_path.iterdir()) == before


def test_what_is_no_model() -> None:
    with pytest.raises(TypeError, match="model=int: expected a folder"):
        cost(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Linear has no attention that is known here"):
        cost(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="heads=True: expected a whole number"):
        cost(d_model=8, heads=True)
