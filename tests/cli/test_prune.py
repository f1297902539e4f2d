"""`multihead tune`, `curve` and `evaluate`; `prune` and `share` are tested with pruning."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import multihead
from multihead.cli import app
from multihead.pruning import curve
from multihead.pruning.plan import Plan

DOCS = Path(__file__).parents[2] / "docs"


@cache
def texts() -> tuple[str, str]:
    return (DOCS / "attention.md").read_text(), (DOCS / "reading.md").read_text()[:12000]


@pytest.fixture
def two_texts(tmp_path: Path) -> list[Any]:
    for name, text in zip(("calibrate", "evaluate"), texts(), strict=True):
        (tmp_path / f"{name}.txt").write_text(text)
    return ["--calibrate", tmp_path / "calibrate.txt", "--evaluate", tmp_path / "evaluate.txt"]


def run(*args: Any) -> Any:
    return CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=True)


def prune(folder: Path, **options: Any) -> Path:
    """A checkpoint of the built-in model without some of its heads."""
    model, tokenizer = multihead.load_builtin()
    pruned = multihead.prune(
        model, texts()[0], tokenizer=tokenizer, compensate="none", context=64, tokens=700, **options
    )
    pruned.save(folder)
    return folder


@pytest.mark.slow
def test_tune_lowers_the_loss_and_writes_a_checkpoint(tmp_path: Path, two_texts: list[Any]) -> None:
    small = prune(tmp_path / "small", remove="50%", criterion="fisher")
    report = tmp_path / "report.json"
    done = run(
        *("tune", small, *two_texts, "--tokens", 600, "--steps", 6, "--context", 64),
        *("--save", tmp_path / "tuned", "--json", report),
    )
    assert done.exit_code == 0, done.output + str(done.exception)
    assert "after 6 steps of tuning, token loss:" in done.output
    found = json.loads(report.read_text())
    before, after = found["evaluation"], found["after 6 steps of tuning"]
    assert before["before"] == after["before"] < after["after"] < before["after"]
    tuned = multihead.load(tmp_path / "tuned")
    assert sum(p.numel() for p in tuned.parameters()) == sum(
        p.numel() for p in multihead.load(small).parameters()
    )
    files = {path.name for path in (tmp_path / "tuned").iterdir()}
    assert {"plan.json", "pruning.json", "tuning.json"} <= files
    assert not (tmp_path / "tuned.progress").exists()


def test_tune_has_nothing_to_do_where_nothing_was_changed(
    tmp_path: Path, two_texts: list[Any]
) -> None:
    model, tokenizer = multihead.load_builtin()
    model.save_pretrained(tmp_path / "same")
    tokenizer.save_pretrained(tmp_path / "same")
    done = run("tune", tmp_path / "same", *two_texts[:2], "--steps", 1)
    assert done.exit_code and "nothing to tune" in str(done.exception)


def test_evaluate_gives_the_loss_of_one_model_and_the_difference_of_two(
    tmp_path: Path, two_texts: list[Any]
) -> None:
    small = prune(tmp_path / "small", remove=Plan(("L1.H0", "L2.H1")))
    text = ["--text", two_texts[3], "--tokens", 1100]
    one = run("evaluate", small, *text)
    assert one.exit_code == 0 and one.output.startswith("token loss: "), one.exception
    both = run("evaluate", small, "--against", two_texts[1].parent / "small", *text)
    assert "(+0.0000, 95% interval +0.0000 to +0.0000" in both.output, both.exception
    report = tmp_path / "report.json"
    _, tokenizer = multihead.load_builtin()
    multihead.load_builtin()[0].save_pretrained(tmp_path / "whole")
    tokenizer.save_pretrained(tmp_path / "whole")
    both = run("evaluate", small, "--against", tmp_path / "whole", *text, "--json", report)
    found = json.loads(report.read_text())
    assert both.exit_code == 0 and f"wrote {report}" in both.output
    assert found["before"] < found["after"]
    assert f"{found['after']:.4f}" in one.output


def test_evaluate_takes_a_user_defined_measure(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def size(model, tokenizer):\n    return sum(p.numel() for p in model.parameters())\n"
    )
    done = run("evaluate", "--measure", f"{tmp_path / 'mine.py'}:size")
    assert done.exit_code == 0 and done.output == "size: 2164416.0000\n", done.exception


def test_evaluate_refuses_pairs_that_overlap_with_the_calibration_text(
    tmp_path: Path, two_texts: list[Any]
) -> None:
    pairs = tmp_path / "pairs.jsonl"
    first = ["a cat", "a dog", texts()[0]]
    rows = [{"a": text, "b": f"number {n}", "score": n} for n, text in enumerate(first)]
    pairs.write_text("\n".join(map(json.dumps, rows)))
    done = run("evaluate", "--similarity", pairs, *two_texts[:2])
    assert done.exit_code and "pairs.jsonl: calibrate[0] and evaluate[" in str(done.exception)


@pytest.mark.slow
def test_curve_is_measured_once_and_written_twice(
    tmp_path: Path, two_texts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(curve, "BATCHES", (1,))
    monkeypatch.setattr(curve, "TURNS", 1)
    monkeypatch.setattr(curve, "SHARES", (0.25, 0.5))
    done = run(
        *("curve", *two_texts, "--tokens", 1500, "--criterion", "fisher"),
        *("--json", tmp_path / "c.json", "--plot", tmp_path / "c.png"),
    )
    assert done.exit_code == 0, done.exception
    points = json.loads((tmp_path / "c.json").read_text())
    assert points[0]["heads"] == 32 > points[-1]["heads"]
    assert points[0]["loss"] < points[-1]["loss"]
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["tune", "--calibrate", "TEXT"], "Missing argument 'model'"),
        (["tune", "FOLDER"], "--calibrate is missing: give a text to train on"),
        (["tune", "FOLDER", "--calibrate", "TEXT", "--steps", "0"], "--steps 0: expected"),
        (["tune", "FOLDER", "--calibrate", "TEXT", "--save", "FULL"], "--save"),
        (["curve", "--calibrate", "TEXT", "--evaluate", "OTHER"], "--json and --plot are missing"),
        (
            ["curve", "--calibrate", "TEXT", "--json", "a.json"],
            "--evaluate and --measure: give one",
        ),
        (
            [
                "curve",
                "--calibrate",
                "TEXT",
                "--evaluate",
                "OTHER",
                "--measure",
                "a.py:b",
                "--json",
                "a.json",
            ],
            "--evaluate and --measure: give one",
        ),
        (
            ["curve", "--calibrate", "TEXT", "--plot", "a.gif"],
            "--plot a.gif: expected a name that ends in .png or .svg",
        ),
        (
            ["prune", "--calibrate", "TEXT", "--keep", "3", "--plan", "plan.json"],
            "--keep 3 and --plan plan.json: give one of them",
        ),
        (["prune", "--calibrate", "TEXT"], "--remove, --keep and --plan are missing: give one"),
        (["prune", "--calibrate", "TEXT", "--remove", "3", "--rounds", "0"], "--rounds 0: expec"),
        (
            ["prune", "--calibrate", "TEXT", "--plan", "plan.json", "--rounds", "2"],
            "--rounds 2 with --plan plan.json: the plan names the heads",
        ),
        (
            ["prune", "--calibrate", "TEXT", "--remove", "3", "--layers", "L9"],
            "--layers 'L9' names no layer",
        ),
        (["evaluate", "--measure", "none.py:f"], "--measure 'none.py:f': there is no such file"),
        (["evaluate", "--similarity", "none.jsonl"], "--similarity 'none.jsonl': there is no suc"),
        (["evaluate"], "--text, --similarity, --measure: give one of them"),
        (
            ["evaluate", "--text", "TEXT", "--measure", "a.py:b"],
            "--text, --similarity, --measure: give one of them",
        ),
        (["evaluate", "--text", "TEXT", "--calibrate", "COPY"], "hold one"),
    ],
)
def test_messages(
    tmp_path: Path, args: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {"FULL": tmp_path, "FOLDER": tmp_path / "none"}
    for name, half in (("TEXT", 0), ("COPY", 0), ("OTHER", 1)):
        places[name] = tmp_path / f"{name}.txt"
        places[name].write_text(texts()[half])
    monkeypatch.chdir(tmp_path)
    done = run(*[places.get(arg, arg) for arg in args])
    assert done.exit_code and words in f"{done.exception}{done.output}", done.output
    assert sorted(os.listdir(tmp_path)) == ["COPY.txt", "OTHER.txt", "TEXT.txt"]
