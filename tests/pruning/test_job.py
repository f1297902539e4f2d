"""The commands `prune` and `share`, from texts to a checkpoint that loads."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers as tf
from typer.testing import CliRunner

import multihead
from multihead.cli import app
from multihead.pruning.plan import Plan

DOCS = Path(__file__).parents[2] / "docs"


@cache
def texts() -> tuple[str, str]:
    """Two texts of some thousand words, to score on and to judge on."""
    return (DOCS / "attention.md").read_text(), (DOCS / "reading.md").read_text()[:20000]


@pytest.fixture
def two_texts(tmp_path: Path) -> list[Any]:
    for name, text in zip(("calibrate", "evaluate"), texts(), strict=True):
        (tmp_path / f"{name}.txt").write_text(text)
    return ["--calibrate", tmp_path / "calibrate.txt", "--evaluate", tmp_path / "evaluate.txt"]


def run(*args: Any) -> Any:
    return CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=True)


def run_prune(*args: Any) -> Any:
    return run("prune", *args)


@pytest.mark.slow
def test_the_command_writes_a_model_that_loads(tmp_path: Path, two_texts: list[Any]) -> None:
    done = run_prune(
        "--remove",
        "30%",
        *two_texts,
        "--save",
        tmp_path / "smaller",
        "--json",
        tmp_path / "report.json",
        "--tokens",
        3000,
    )
    assert done.exit_code == 0, done.output + str(done.exception)
    assert (
        "random" in done.output
        and "<- chosen" in done.output
        and "10 of 32 heads removed" in done.output
    )
    assert "perplexity:" in done.output and "95% interval" in done.output
    assert "loaded it again in a fresh process: multihead.load loads it" in done.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["plan"]["remove"]) == 10 and report["heads"] == [32, 22]
    smaller = multihead.load(tmp_path / "smaller")
    assert sum(p.numel() for p in smaller.parameters()) == report["parameters"][1]
    assert Plan.load(tmp_path / "smaller" / "plan.json").remove == tuple(report["plan"]["remove"])
    again = run_prune(
        tmp_path / "smaller", "--remove", "2", *two_texts, "--criterion", "norm", "--tokens", 1000
    )  # again
    assert again.exit_code == 0 and "2 of 22 heads" in again.output


def test_the_command_takes_a_plan(tmp_path: Path, two_texts: list[Any]) -> None:
    (tmp_path / "plan.json").write_text(
        '{"kind": "uniform", "remove": ["L0.H0", "L1.H1", "L2.H2", "L3.H3"]}'
    )
    plan = tmp_path / "plan.json"
    done = run_prune("--plan", plan, *two_texts[:2], "--compensate", "none")
    assert done.exit_code == 0, done.exception
    assert "4 of 32 heads removed (uniform; criterion given" in done.output
    assert "Plain transformers can't: hidden_size 192 is not a multiple of 7 heads" in done.output


def test_either_text_may_come_from_standard_input(tmp_path: Path, two_texts: list[Any]) -> None:
    for name, other, args in (
        ("evaluate", "calibrate", two_texts[:2]),
        ("calibrate", "evaluate", two_texts[2:]),
    ):
        command = [
            "prune",
            "--remove",
            "2",
            "--criterion",
            "norm",
            "--tokens",
            "600",
            f"--{name}",
            "-",
            *map(str, args),
        ]
        done = CliRunner().invoke(app, command, input=(tmp_path / f"{name}.txt").read_text())
        assert done.exit_code == 0 and "perplexity:" in done.output, done.exception
        same = CliRunner().invoke(app, command, input=(tmp_path / f"{other}.txt").read_text())
        assert same.exit_code and "hold one" in str(same.exception)


def test_how_to_judge_is_tried_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_texts: list[Any]
) -> None:
    monkeypatch.setattr(
        "multihead.pruning.job.prune", lambda *args, **kwargs: pytest.fail("work began")
    )
    _, tokenizer = multihead.load_builtin()
    encoder = tf.BertForMaskedLM(
        tf.BertConfig(
            hidden_size=24,
            num_attention_heads=3,
            num_hidden_layers=2,
            intermediate_size=20,
            vocab_size=len(tokenizer),
        )
    )
    encoder.save_pretrained(tmp_path / "encoder")
    tokenizer.save_pretrained(tmp_path / "encoder")
    done = run_prune(tmp_path / "encoder", "--remove", 2, *two_texts)
    assert done.exit_code and "similarity" in str(done.exception), done.exception


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--remove", "3"], "--calibrate is missing"),
        (["--remove", "3", "--calibrate", "-", "--evaluate", "-"], "standard input is one text"),
        (
            ["--remove", "3", "--calibrate", "TEXT", "--evaluate", "TEXT"],
            "heads scored on the text that they are judged on",
        ),
        (["--remove", "3", "--calibrate", "TEXT", "--evaluate", "COPY"], "hold one"),
        (["--remove", "3", "--calibrate", "TEXT", "--save", "FULL"], "there is something already"),
    ],
)
def test_the_command_refuses_in_words(
    tmp_path: Path, args: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {
        "TEXT": tmp_path / "text.txt",
        "COPY": tmp_path / "copy.txt",
        "OTHER": tmp_path / "other.txt",
        "FULL": tmp_path,
    }
    for name, half in (("TEXT", 0), ("COPY", 0), ("OTHER", 1)):
        places[name].write_text(texts()[half])
    monkeypatch.chdir(tmp_path)
    done = run_prune(*[places.get(arg, arg) for arg in args])
    assert done.exit_code and words in str(done.exception)
    assert sorted(os.listdir(tmp_path)) == ["copy.txt", "other.txt", "text.txt"]


def test_the_command_shares_and_writes(tmp_path: Path, two_texts: list[Any]) -> None:
    done = run(
        "share",
        "--num-kv-heads",
        1,
        *two_texts,
        "--tokens",
        2000,
        "--save",
        tmp_path / "smaller",
        "--json",
        tmp_path / "report.json",
    )
    assert done.exit_code == 0, done.output + str(done.exception)
    assert "32 key/value heads become 4" in done.output
    assert "plain transformers loads it" in done.output
    report = json.loads((tmp_path / "report.json").read_text())
    found = report["evaluation"]
    assert found["after"] > found["before"] and found["documents"] > 1
    low, high = found["interval"]
    assert low <= found["difference"] <= high
    assert found["difference"] == pytest.approx(found["after"] - found["before"])
    assert json.loads((tmp_path / "smaller" / "sharing.json").read_text())["key/value heads"] == [
        32,
        4,
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "calibrate.txt",
        "evaluate.txt",
        "report.json",
        "smaller",
    ]
    assert multihead.load(tmp_path / "smaller").config.num_key_value_heads == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "--num-kv-heads is missing: expected a number from 1 on"),
        (["--num-kv-heads", "0"], "--num-kv-heads 0: expected a number from 1 on"),
        (["--num-kv-heads", "3", "--calibrate", "TEXT"], "--num-kv-heads 3"),
        (
            ["--num-kv-heads", "8", "--calibrate", "TEXT"],
            "every chosen layer has that many key/value heads already",
        ),
        (["--num-kv-heads", "2"], "--calibrate is missing"),
        (
            ["--num-kv-heads", "2", "--calibrate", "TEXT", "--tokens", "0"],
            "--tokens 0: expected at least 1",
        ),
        (["--num-kv-heads", "2", "--calibrate", "TEXT", "--method", "glue"], "--method 'glue'"),
    ],
)
def test_share_refuses_in_words(tmp_path: Path, args: list[str], words: str) -> None:
    (tmp_path / "text.txt").write_text(texts()[0][:3000])
    done = run("share", *[tmp_path / "text.txt" if arg == "TEXT" else arg for arg in args])
    assert done.exit_code and words in str(done.exception), done.exception


@pytest.mark.slow
def test_the_command_writes_a_gguf_file(tmp_path: Path, two_texts: list[Any]) -> None:
    out = tmp_path / "x.gguf"
    done = run_prune(
        *("--remove", "50%", "--kind", "uniform", "--criterion", "weights", *two_texts[:2]),
        *("--tokens", 600, "--save", out, "--json", tmp_path / "report.json"),
    )
    assert done.exit_code == 0, done.output + str(done.exception)
    words = " ".join(done.output.split())
    assert f"wrote {out} and loaded it again in a fresh process: multihead.load loads it" in words
    report = json.loads((tmp_path / "report.json").read_text())
    before, after = report["bytes on disk"]
    assert f"weights on disk: {before:,} bytes become {after:,}" in words
    assert after == out.stat().st_size
    assert sum(p.numel() for p in multihead.load(out).parameters()) < report["parameters"][0]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["prune", "--remove", "20%"], "--kind any: a GGUF file of this architecture has one"),
        (["share", "--num-kv-heads", "2", "--layers", "L1"], "with --layers: a GGUF file has one"),
    ],
)
def test_what_a_gguf_file_cant_hold_is_said_first(
    tmp_path: Path, two_texts: list[Any], args: list[str], words: str
) -> None:
    done = run(*args, *two_texts[:2], "--save", tmp_path / "x.gguf")
    assert done.exit_code and words in str(done.exception)
    (tmp_path / "x.gguf").write_text("mine")
    done = run(*args, *two_texts[:2], "--save", tmp_path / "x.gguf")
    assert done.exit_code and "there is something already" in str(done.exception)
