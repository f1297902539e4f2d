"""`cost()` and its command: arguments, windows, the page in docs, what bad input gets."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers as tf
from torch import nn

import multihead
from multihead import cli, cost
from multihead.costs.shape import count_pairs

SMALL = dict(
    hidden_size=48,
    intermediate_size=40,
    num_hidden_layers=3,
    vocab_size=17,
    max_position_embeddings=64,
)


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


def test_a_window_laid_over_a_model() -> None:
    """Costs what a model costs that comes with it."""
    sizes = dict(**SMALL, num_attention_heads=6, num_key_value_heads=2, head_dim=8)
    laid, own = (
        cost(tf.LlamaConfig(**sizes), context_length=20, window=4),
        cost(tf.MistralConfig(**sizes, sliding_window=4), context_length=20),
    )
    assert numbers(laid) == numbers(own) and laid.cache() == 4 * laid.cache_per_token
    assert (
        laid.prefill().scores == 3 * 2 * 6 * 8 * count_pairs(20, 4) < laid.prefill(full=True).scores
    )
    assert numbers(cost(tf.LlamaConfig(**sizes), context_length=20, window=50)) == numbers(
        cost(tf.LlamaConfig(**sizes), context_length=20)
    )


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
    found = cost(tmp_path, context_length=20, batch_size=3, dtype="float32", window=8)
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
    assert str(cost(embed_dim=768, num_heads=12, num_kv_heads=4, head_dim=32, num_layers=2)) in out


def test_the_page_about_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Its Python runs, and the predictions next to the measured numbers are those of today."""
    page = (Path(__file__).parents[2] / "docs" / "cost.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, names)
    out = capsys.readouterr().out
    assert "131,072 bytes a token" in out and names["cost"].cache() == 2**30
    latent = names["latent"]
    sizes = latent.cache(), latent.decode().total, latent.decode(expanded=True).total
    assert sizes == (4096 * 288 * 4, 39_395_840, 2_161_707_520)
    assert "4 x 8" in out
    rows = re.findall(r"^\| (\d+) \| ([\d,]+) \| (\w+) \| (.*) \|$", page, re.MULTILINE)
    for batch, tokens, dtype, cells in rows:
        found = cost(
            embed_dim=576,
            num_heads=9,
            num_kv_heads=3,
            num_layers=30,
            dtype=dtype,
            batch_size=int(batch),
            context_length=int(tokens.replace(",", "")),
        )
        said = (found.cache("transformers"), found.prefill(full=True).total, found.decode().total)
        assert [int(cell.replace(",", "")) for cell in cells.split(" | ")] == [
            number for one in said for number in (one, one)
        ]
    assert len(rows) == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--embed-dim", "768"], "--embed-dim 768: give the number of heads too, --num-heads"),
        (["--embed-dim", "768", "--num-heads", "7"], "7 heads don't divide 768"),
        (
            ["--embed-dim", "768", "--num-heads", "12", "--num-kv-heads", "5"],
            "12 query heads can't share 5 key/value heads evenly",
        ),
        (["--num-heads", "4"], "--num-heads 4: goes with --embed-dim, not with a model"),
        (
            ["FOLDER", "--embed-dim", "8", "--num-heads", "2"],
            "give one of them, a model or its sizes",
        ),
        (["--context-length", "-1"], "--context-length -1: expected a whole number, at least 1"),
        (["--batch-size", "0"], "--batch-size 0: expected a whole number, at least 1"),
        (["--window", "0"], "--window 0: expected a whole number, at least 1"),
        (["--dtype", "float17"], "--dtype 'float17': expected one of float64, float32"),
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
        (["FOLDER/rwkv.json"], "has no attention that is known here"),
        (["FOLDER/model.safetensors"], "a cost needs no weights"),
        (["--plot", "FOLDER/x.svg"], "expected a name that ends in .png"),
        (["--json", "FOLDER/no/x.json"], "doesn't exist; create it first"),
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
        "rwkv": {
            "model_type": "rwkv",
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
        cost(embed_dim=8, num_heads=True)
