"""README, CONTRIBUTING and docs/: their Python runs on the built-in model, their commands, options and
links exist, and the pages that scripts write are up to date.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import multihead
from multihead.cli import app

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", read(name), re.DOTALL)


def test_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, tokenizer = multihead.load_builtin()
    inputs = dict(tokenizer("the cat and the cat", return_tensors="pt"))
    names = {
        "folder": Path(multihead.__file__).parent / "models" / "builtin",
        "inputs": inputs,
        "batches": [inputs],
    }
    assert len(blocks("README.md")) == 3
    for block in blocks("README.md"):
        exec(block, names)
    assert multihead.load_table("heads.json").heads and names["y"].shape == (2, 8, 100, 64)
    assert names["z"].shape == (2, 40, 512) and names["weights"].shape == (2, 8, 100, 100)


def test_python_of_docs_attention_runs() -> None:
    assert blocks("docs/attention.md")
    for block in blocks("docs/attention.md"):
        exec(block, {})


def test_a_user_defined_statistic(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks("CONTRIBUTING.md")
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


def test_links_and_paths_exist() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
            if not link.startswith("http"):
                assert (page.parent / link).exists(), f"{page.name}: {link}"
        for path in re.findall(r"`((?:tests|scripts|src|docs|benchmarks)/[\w/.]+)`", text):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        used = re.findall(r"(?:^    |`)make ((?:[a-z-]+ ?)+)", text, re.MULTILINE)
        assert {word for words in used for word in words.split()} <= targets, page.name


def command_lines() -> list[tuple[str, str]]:
    """Lines of the pages that call the command, without their comments."""
    lines = []
    for page in PAGES:
        for line in page.read_text(encoding="utf-8").splitlines():
            found = re.match(r"(?:    )?(?:\.venv/bin/|torchrun .*-m )?(multihead [a-z].*)", line)
            if found:
                lines.append((page.name, found.group(1).split("  #")[0]))
    return lines


def test_commands_and_options_exist() -> None:
    root = typer.main.get_command(app)
    lines = command_lines()
    assert len(lines) > 40
    for page, line in lines:
        command: Any = root
        for word in line.split()[1:]:
            inner = getattr(command, "commands", None)
            if inner is None:
                break
            assert word in inner, f"{page}: {line}"
            command = inner[word]
        known = {spelling for p in command.params for spelling in (*p.opts, *p.secondary_opts)}
        assert set(re.findall(r"(?<!\S)--[a-z-]+", line)) <= known | {"--help"}, f"{page}: {line}"


def test_docs_api_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "write_api.py"), "--check"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
