"""The commands on classifiers, encoders and encoder-decoders: labels, pairs, and what isn't whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import multihead
from data.test_tokenizing import small_tokenizer
from multihead.cli import app
from multihead.data import targets
from multihead.errors import MultiheadWarning
from multihead.models.loading import load_with_tokenizer
from multihead.pruning import curve
from pruning.test_any_head import MADE, model


def texts(number: int, seed: int) -> list[str]:
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(list("abc"), 20)) for _ in range(number)]


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def saved(name: str, folder: Path, make: Callable[[], Any] | None = None) -> Path:
    whole = model(name) if make is None else make()
    whole.save_pretrained(folder)
    small_tokenizer(pad_token="?", model_max_length=64).save_pretrained(folder)
    return folder


def run(*args: Any) -> Any:
    return CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=True)


@pytest.fixture(autouse=True)
def few_new_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "NEW_TOKENS", 6)


def test_a_classifier_with_labels_and_without(tmp_path: Path) -> None:
    folder = saved("sequences", tmp_path / "model")
    rows = [{"text": text, "label": n % 2} for n, text in enumerate(texts(20, 0))]
    calibrate = lines(tmp_path / "labels.jsonl", rows)
    judged = lines(tmp_path / "texts.jsonl", [{"text": text} for text in texts(12, 1)])
    command = ("prune", folder, "--remove", 2, "--criterion", "taylor", "--context", 16)
    done = run(*command, "--calibrate", calibrate, "--evaluate", judged)
    assert done.exit_code == 0, done.output + str(done.exception)
    assert "loss on labels on the held-out part" in done.output
    assert "distance from the original's outputs: 0.0000 becomes " in done.output
    assert "over 24 documents" in done.output  # windows of 16 tokens
    assert "perplexity" not in done.output
    labels = lines(tmp_path / "numbers.jsonl", [{"text": "a b", "label": float("nan")}] * 9)
    done = run("prune", folder, "--remove", 2, "--calibrate", labels)
    assert done.exit_code and "label nan: expected a finite number" in str(done.exception)
    labels = lines(tmp_path / "names.jsonl", [{"text": "a b", "label": "good"}] * 9)
    done = run("prune", folder, "--remove", 2, "--calibrate", labels)
    assert done.exit_code and "label 'good' isn't one of this model's" in str(done.exception)
    done = run("evaluate", folder, "--text", judged)
    assert done.exit_code and "has no loss on a text; load it with its" in str(done.exception)
    done = run("evaluate", folder, "--against", folder, "--text", judged)
    assert "distance from the original's outputs: 0.0000 becomes 0.0000" in done.output
    done = run("evaluate", folder, "--text", calibrate)
    assert done.output.startswith("loss on labels: ")


def test_pairs_for_an_encoder_decoder(tmp_path: Path) -> None:
    folder = saved("t5", tmp_path / "model")
    rows = [{"source": text, "target": text[:9]} for text in texts(20, 0)]
    pairs = lines(tmp_path / "pairs.jsonl", rows)
    judged = lines(tmp_path / "judged.jsonl", [{"source": t, "target": "a b"} for t in texts(9, 1)])
    smaller = tmp_path / "smaller"
    command = ("prune", folder, "--remove", 3, "--criterion", "weights", "--pairs", pairs)
    done = run(*command, "--evaluate", judged, "--save", smaller)
    assert done.exit_code == 0, done.output + str(done.exception)
    assert "\nperplexity: " in done.output and "token loss: " in done.output
    whole, again = model("t5"), multihead.load(smaller)
    ids = torch.tensor([[0, 2, 3, 1]])
    with torch.no_grad():
        a, b = (one(ids, decoder_input_ids=ids).logits for one in (whole, again))
    assert a.shape == b.shape and not torch.equal(a, b)
    heads = [sum(s.num_heads for s in multihead.models.find_sites(x)) for x in (whole, again)]
    assert heads[0] - heads[1] == 3
    tuned = run("tune", smaller, "--teacher", folder, "--pairs", pairs, "--steps", 2)
    assert tuned.exit_code == 0, tuned.output + str(tuned.exception)


def test_a_text_alone_for_an_encoder_decoder(tmp_path: Path) -> None:
    folder = saved("bart", tmp_path / "model")
    text = lines(tmp_path / "texts.jsonl", [{"text": text} for text in texts(12, 0)])
    other = lines(tmp_path / "other.jsonl", [{"text": text} for text in texts(9, 1)])
    done = run(
        *("prune", folder, "--remove", 2, "--criterion", "norm", "--calibrate", text),
        *("--evaluate", other),
    )
    assert done.exit_code == 0, done.output + str(done.exception)
    assert "token loss on what the original generates: " in done.output


def test_the_curve_of_an_encoder_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides read the text that passes are timed on; the cache holds what the decoder reads."""
    for name, value in (("BATCHES", (1,)), ("TURNS", 1), ("TOKENS", 8)):
        monkeypatch.setattr(curve, name, value)
    folder = saved("t5", tmp_path / "model")
    rows = [{"source": text, "target": text[:9]} for text in texts(20, 0)]
    pairs = lines(tmp_path / "pairs.jsonl", rows)
    judged = lines(tmp_path / "judged.jsonl", [{"source": t, "target": "a b"} for t in texts(9, 1)])
    done = run(
        *("curve", folder, "--pairs", pairs, "--evaluate", judged, "--criterion", "weights"),
        *("--compensate", "mean", "--json", tmp_path / "curve.json"),
    )
    assert done.exit_code == 0, done.output + str(done.exception)
    points = json.loads((tmp_path / "curve.json").read_text())
    # keys and values of two layers, of what each wrote and of what it reads from the encoder
    assert points[0]["cache"] == 2 * 2 * 2 * 8 * 24 * 4
    assert len(points) > 5 and points[-1]["step"]["1"] > 0


def test_notes_name_options(tmp_path: Path) -> None:
    folder = saved("sequences", tmp_path / "model")
    text = lines(tmp_path / "texts.jsonl", [{"text": text} for text in texts(12, 0)])
    command = ("prune", folder, "--remove", "50%", "--kind", "uniform", "--criterion", "weights")
    with pytest.warns(MultiheadWarning, match="^--kind 'uniform' with 2 of 4 heads left"):
        run(*command, "--calibrate", text)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--pairs", "P", "--calibrate", "P"], "--calibrate P and --pairs P: give one of them"),
        (
            ["--pairs", "missing.jsonl"],
            "--pairs 'missing.jsonl': there is no such file; give a file of JSON lines",
        ),
        (["--calibrate", "missing.txt"], "--calibrate 'missing.txt': there is no such file"),
        (["--pairs", "T"], "expected JSON lines, a name that ends in .jsonl"),
        (
            ["--pairs", "texts.jsonl"],
            """line 1 has the names 'text'; expected {"source": "...", "target": "..."} in each""",
        ),
        (["--pairs", "number.jsonl"], "line 2 has a text under 'source' and a number under 'targ"),
        (["--pairs", "list.jsonl"], "line 1 has a list; expected {"),
        (["--pairs", "broken.jsonl"], '; expected an object in each line, such as {"source": "'),
        (["--pairs", "empty.jsonl"], "empty.jsonl' has no line; give at least two"),
        (["--pairs", "one.jsonl"], "texts hold 5 tokens in one row: heads are scored on one part"),
    ],
)
def test_pairs_that_are_none(
    tmp_path: Path, args: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved("t5", tmp_path / "model")
    Path("T").write_text("a text")
    lines(Path("texts.jsonl"), [{"text": "a"}])
    lines(Path("one.jsonl"), [{"source": "a b c", "target": "a"}])
    lines(Path("number.jsonl"), [{"source": "a", "target": "b"}, {"source": "a", "target": 3}])
    lines(Path("list.jsonl"), [["a", "b"]])
    Path("broken.jsonl").write_text("{")
    Path("empty.jsonl").touch()
    done = run("prune", "model", "--remove", 2, *args)
    assert done.exit_code and words in str(done.exception), done.exception


def test_what_was_loaded_must_be_what_the_file_holds(tmp_path: Path) -> None:
    """A classifier opened as a bare encoder is read with a note; pruned, it would be lost."""
    folder = saved("sequences", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["BertModel"]}))
    text = lines(tmp_path / "texts.jsonl", [{"text": text} for text in texts(12, 0)])
    for command in (["prune", "--remove", 2], ["share", "--num-kv-heads", 2]):
        done = run(command[0], folder, *command[1:], "--calibrate", text)
        assert done.exit_code and "2 weights of the checkpoint have no place in BertModel" in str(
            done.exception
        )
        assert "neither would the smaller one be. To keep all of it, name the class" in str(
            done.exception
        )


def test_random_weights_are_not_saved_as_if_they_were_trained(tmp_path: Path) -> None:
    folder = saved("encoder", tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    kept = {name: x for name, x in weights.items() if "pooler" not in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    assert load_with_tokenizer(folder).differences  # which reading takes
    text = lines(tmp_path / "texts.jsonl", [{"text": text} for text in texts(12, 0)])
    done = run("prune", folder, "--remove", 2, "--calibrate", text)
    assert "2 weights of BertModel aren't in the checkpoint and are random" in str(done.exception)
    assert "add_pooling_layer=False" in str(done.exception)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["answers", "tuples", "whisper"])
def test_checkpoints_of_any_head_load_again(name: str, tmp_path: Path) -> None:
    from pruning.test_any_head import given

    result = multihead.prune(model(name), **given(name), remove=2, criterion="weights")
    result.save(tmp_path / "smaller")
    again = multihead.load(tmp_path / "smaller")
    assert type(again) is type(MADE[name]())
    assert isinstance(again, tf.PreTrainedModel)
