"""Files of other users that a command reads: one line and exit code 2, in time, and nothing raw."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.commands import call
from models.test_hostile import time_limit
from multihead import cli
from multihead.errors import MultiheadWarning

ESCAPES = "\x1b]8;;http://evil\x1b\\x\x1b[31m\x07\u202e"
KINDS: dict[str, Callable[[Path], object]] = {
    "nested brackets": lambda file: file.write_text("[" * 200_000),
    "nested objects": lambda file: file.write_text('{"a":' * 100_000),
    "a number of 5,000 digits": lambda file: file.write_text("9" * 5000),
    "not UTF-8": lambda file: file.write_bytes(b'{"\xff\xfe": 1}'),
    "empty": lambda file: file.write_text(""),
    "zeros": lambda file: file.write_bytes(b"\0" * 1000),
    "a pipe": os.mkfifo,
    "a device": lambda file: file.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
    "a link to itself": lambda file: file.symlink_to(file.name),
    "escapes": lambda file: file.write_text(f'{{"{ESCAPES}": "{ESCAPES}"}}'),
    "escapes as JSON": lambda file: file.write_text(
        '{"format": "\\u001b[31m", "remove": "\\u001b]8;;x\\u0007", "a": "\\u001b[2J", "text": 3}'
    ),
    "ten million letters": lambda file: file.write_text('{"remove": "' + "x" * 10**7 + '"}'),
}
COMMANDS = {
    "table show": ["table", "show", "FILE.json"],
    "table compare": ["table", "compare", "FILE.json", "FILE.json"],
    "prune --plan": ["prune", "--calibrate", "TEXT", "--plan", "FILE.json"],
    "evaluate --similarity": ["evaluate", "--similarity", "FILE.jsonl"],
    "read --relations": ["read", "--prompt", "the cat", "--relations", "FILE.conllu"],
    "cost": ["cost", "FILE.json"],
}
LINES = ("nested brackets", "not UTF-8", "a link to itself", "escapes", "escapes as JSON")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_file_is_refused_in_one_line(
    kind: str,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    refuse(COMMANDS[command], kind, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("kind", LINES)
def test_a_hostile_text_is_refused_in_one_line(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse(["read", "--text", "FILE.jsonl"], kind, tmp_path, monkeypatch, capsys)


def refuse(
    command: list[str],
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("MULTIHEAD_DEBUG", raising=False)
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the cat sat on the hat " * 40)
    arguments: list[object] = []
    for word in command:
        path = tmp_path / word if word.startswith("FILE") else None
        if path is not None and not os.path.lexists(path):
            KINDS[kind](path)
        arguments.append(path or (tmp_path / "text.txt" if word == "TEXT" else word))
    with time_limit(60):
        code, out, err = call(monkeypatch, capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.rstrip("\n").isprintable() and len(err) < 3_200


def test_remarks_are_notes(capsys: pytest.CaptureFixture[str]) -> None:
    cli._print_warning(MultiheadWarning("six of \x1b[31m eight"), MultiheadWarning, "a.py", 1)
    assert capsys.readouterr().err == "note: six of \ufffd[31m eight\n"
    cli._print_warning(FutureWarning("another library's"), FutureWarning, "a.py", 1)
    assert capsys.readouterr().err == "a.py:1: FutureWarning: another library's\n"


def test_commands_print_through_one_function() -> None:
    found = []
    for file in Path(cli.__file__).parent.glob("*.py"):
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                calls = [n.func for n in ast.walk(function) if isinstance(n, ast.Call)]
                if any(isinstance(f, ast.Name) and f.id == "print" for f in calls):
                    found.append(function.name)
    assert sorted(found) == ["_print_traceback", "_print_version", "main", "print_text"]
