"""The command share."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import multihead
from multihead.cli import app

DOCS = Path(__file__).parents[2] / "docs"


@cache
def texts() -> tuple[str, str]:
    return (DOCS / "attention.md").read_text(), (DOCS / "reading.md").read_text()[:12000]


@pytest.fixture
def two_texts(tmp_path: Path) -> list[Any]:
    for name, text in zip(("calibrate", "evaluate"), texts(), strict=True):
        (tmp_path / f"{name}.txt").write_text(text)
    return [
        "--calibrate",
        tmp_path / "calibrate.txt",
        "--evaluate",
        tmp_path / "evaluate.txt",
        "--tokens",
        2000,
    ]


def run(*args: Any) -> Any:
    return CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=True)


def test_the_command_shares_and_writes(tmp_path: Path, two_texts: list[Any]) -> None:
    done = run(
        "share",
        "--num-kv-heads",
        1,
        *two_texts,
        "--save",
        tmp_path / "smaller",
        "--json",
        tmp_path / "report.json",
    )
    assert done.exit_code == 0, done.output + str(done.exception)
    assert "32 key/value heads become 4" in done.output
    assert "plain transformers loads it" in done.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["evaluation"]["after"] > report["evaluation"]["before"]
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
        (["--num-kv-heads", "3", "--calibrate", "TEXT"], "num_kv_heads=3"),
        (
            ["--num-kv-heads", "8", "--calibrate", "TEXT"],
            "every chosen layer has that many key/value heads already",
        ),
        (["--num-kv-heads", "2"], "--calibrate is missing"),
        (
            ["--num-kv-heads", "2", "--calibrate", "TEXT", "--tokens", "0"],
            "tokens=0: expected at least 1",
        ),
        (["--num-kv-heads", "2", "--calibrate", "TEXT", "--method", "glue"], "method='glue'"),
    ],
)
def test_the_command_refuses_in_words(tmp_path: Path, args: list[str], words: str) -> None:
    (tmp_path / "text.txt").write_text(texts()[0][:3000])
    done = run("share", *[tmp_path / "text.txt" if arg == "TEXT" else arg for arg in args])
    assert done.exit_code and words in str(done.exception), done.exception
