"""Running the command in tests: in a process, or in this one."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from multihead import cli


def run(*arguments: Any, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, as a user has it."""
    command = [sys.executable, "-m", "multihead", *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True)


def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: Any
) -> tuple[int, str, str]:
    """The command in this process: exit code, output, errors."""
    monkeypatch.setattr(sys, "argv", ["multihead", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err
