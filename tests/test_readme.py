"""The README's Python runs as it stands, on the built-in model; its commands and links exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import multihead

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, tokenizer = multihead.load_builtin()
    inputs = dict(tokenizer("the cat and the cat", return_tensors="pt"))
    names = {
        "folder": Path(multihead.__file__).parent / "models" / "builtin",
        "inputs": inputs,
        "batches": [inputs],
    }
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, names)
    assert multihead.load_table("heads.json").heads and names["y"].shape == (2, 8, 100, 64)
    assert names["z"].shape == (2, 40, 512) and names["weights"].shape == (2, 8, 100, 100)


def test_python_of_the_docs_runs() -> None:
    text = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        exec(block, {})


def test_a_statistic_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.DOTALL
    )
    names: dict[str, Any] = {}
    before = multihead.reader.list_statistics()
    exec(block, names)
    table, tokenizer = names["table"], names["tokenizer"]
    assert capsys.readouterr().out.count("[") == 3
    named = multihead.read(
        names["model"],
        "in 1859 it was the best of times",
        tokenizer=tokenizer,
        classes={"digits": r"\d"},
    )
    assert table.value("digits") == pytest.approx(named.value("class:digits"), rel=1e-5)
    assert (table.count("digits") > 0).all()
    assert (table.value("two") >= table.value("confidence")).all()
    assert multihead.reader.list_statistics() == before


def test_commands_and_links_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^    make (\w+)", README, re.MULTILINE)) <= targets
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / link).exists(), link
    for path in (ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        text, name = path.read_text(encoding="utf-8"), path.name
        assert set(re.findall(r"`make (\w+)", text)) <= targets, name
        assert all(
            (ROOT / path).exists()
            for path in re.findall(r"`((?:tests|scripts|src)/[\w/.]+)`", text)
        ), name
    options = set(re.findall(r"multihead (?:read|prune|share|cost|check)[^\n]*", README))
    source = (ROOT / "src/multihead/cli.py").read_text()
    for option in re.findall(r"--([a-z-]+)", " ".join(options)):
        assert f'"--{option}"' in source or f"\n    {option.replace('-', '_')}: " in source, option
