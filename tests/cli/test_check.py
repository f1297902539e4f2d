"""`multihead warm`, and the page of `multihead check`; the rest of it is tested with the checks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cli.commands import call


def test_warm_compiles_every_kernel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from multihead.ops.backends import jit

    asked = []
    monkeypatch.setattr(jit, "kernel", asked.append)
    code, out, err = call(monkeypatch, capsys, "warm")
    if jit.MISSING is None:
        assert (
            code == 0
            and f"{len(asked)} kernels are ready" in out
            and set(asked) >= set(jit.KERNELS)
        ), err
    monkeypatch.setattr(jit, "MISSING", "Numba isn't installed (pip install numba)")
    code, out, err = call(monkeypatch, capsys, "warm")
    assert code == 2 and not out and "pip install numba" in err


CODE = """
import torch
from torch import nn
class Attention(nn.Module):
    def __init__(self, scale=None):
        super().__init__()
        self.num_heads, self.scale = 2, scale
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scale = {"": None}.get(self.scale, self.scale)
        y = nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)
        return self.o(y.transpose(1, 2).flatten(2))
"""


@pytest.mark.parametrize(
    ("args", "exit_code", "words"),
    [("", 0, "all held"), ("scale=1.0", 1, "missing or wrong scale")],
)
def test_check_writes_a_page(
    args: str,
    exit_code: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = "a<script>b.py"
    (tmp_path / name).write_text(CODE)
    monkeypatch.chdir(tmp_path)
    target = f"{name}:Attention"
    code, out, err = call(
        monkeypatch, capsys, "check", target, "--args", args, "--page", "page.html"
    )
    assert (
        code == exit_code and words in out and f"wrote {tmp_path / 'page.html'}: open it" in out
    ), err
    page = (tmp_path / "page.html").read_text("utf-8")
    assert words in page and page.count("<script") == 2 and f"Exit code {exit_code}" in page


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("page.pdf", "--page page.pdf: expected a name that ends in .html or .htm"),
        ("nowhere/page.html", "--page nowhere/page.html: the folder"),
        (".", "--page . is a folder"),
    ],
)
def test_a_page_that_cant_be_written_is_refused_before_any_work(
    page: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs.py").write_text("raise SystemExit('was run')")
    code, out, err = call(monkeypatch, capsys, "check", "runs.py:f", "--page", page)
    assert code == 2 and words in err and "was run" not in err and not out


def test_on_a_terminal_the_verdict_is_first_and_in_colour_and_lines_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.py").write_text(CODE)
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "60"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    where = f"{tmp_path / 'a.py'}:Attention"
    code, out, _ = call(monkeypatch, capsys, "check", where, "--args", "scale=1.0")
    lines = out.splitlines()
    assert code == 1 and lines[0].startswith("\x1b[1;31mAttention: wrong")
    assert max(len(re.sub(r"\x1b\[[\d;]*m", "", line)) for line in lines) <= 60


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--num-heads", "3"], "--num-heads 3: none of its matrices divides"),
        (["--num-heads", "0"], "--num-heads 0: expected a number above 0"),
        (["--scale", "0"], "--scale 0.0: expected a number above 0"),
        (["--args", "scale="], "--args 'scale=': expected arguments as in a call"),
        (["--args", "scale="], "--args '64, num_heads=4'"),
    ],
)
def test_options_that_cant_be_meant(
    options: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "a.py").write_text(CODE)
    where = f"{tmp_path / 'a.py'}:Attention"
    code, out, err = call(monkeypatch, capsys, "check", where, *options)
    assert code == 2 and words in err and not out


def test_a_crash_of_the_check_is_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise ZeroDivisionError("inside")

    (tmp_path / "a.py").write_text(CODE)
    monkeypatch.setattr("multihead.checks.run.check", fail)
    code, out, err = call(monkeypatch, capsys, "check", f"{tmp_path / 'a.py'}:Attention")
    assert code == 2 and "ZeroDivisionError" in err and "by a bug in multihead" in err and not out
