"""FILE.py:NAME runs the file and gives what it defines, or a message that helps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from multihead import MultiheadError
from multihead.user_code import load_name


def test_the_file_runs_as_python_runs_it(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("value = 3\n")
    (tmp_path / "a.py").write_text(
        "from dataclasses import dataclass\nfrom beside import value\n\n"
        "@dataclass\nclass Point:\n    x: int = value\n"
    )
    before = list(sys.path)
    assert load_name(f"{tmp_path / 'a.py'}:Point")().x == 3
    assert sys.path == before


@pytest.mark.parametrize(
    ("where", "error", "words"),
    [
        ("a.py", MultiheadError, ["function='a.py'", "FILE.py:NAME", "such as m.py:f"]),
        ("a.py:", MultiheadError, ["FILE.py:NAME"]),
        ("none.py:f", FileNotFoundError, ["no such file", "none.py"]),
        ("a.py:attenton", MultiheadError, ["'attenton'", "did you mean 'attention'?"]),
        ("a.py:zzz", MultiheadError, ["has no 'zzz'", "it has attention, SIZE"]),
        ("broken.py:f", MultiheadError, ["line 2: ZeroDivisionError"]),
        ("exits.py:f", MultiheadError, ["SystemExit"]),
    ],
)
def test_errors(
    where: str,
    error: type[Exception],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "a.py").write_text("import os\n\ndef attention(q): ...\n\nSIZE, _x = 3, 4\n")
    (tmp_path / "broken.py").write_text("\n1 / 0\n")
    (tmp_path / "exits.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error) as caught:
        load_name(where, argument="function", example="m.py:f")
    assert all(word in str(caught.value) for word in words), str(caught.value)
