"""The command: what it prints and writes, in a terminal's stead, and what it says of wrong arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import multihead
from multihead import cli


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, as a user has it."""
    return subprocess.run([sys.executable, "-m", "multihead", *arguments], input=stdin, capture_output=True, text=True)


def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The command in this process: exit code, output, errors."""
    monkeypatch.setattr(sys, "argv", ["multihead", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def test_reads_the_built_in_model_and_writes_all_three_files(tmp_path: Path) -> None:
    page, table, csv = tmp_path / "heads.html", tmp_path / "heads.json", tmp_path / "heads.csv"
    done = run("read", "--out", str(page), "--json", str(table), "--csv", str(csv))
    assert done.returncode == 0, done.stderr
    assert "L0.H0" in done.stdout and f"wrote {page}" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr  # no colours in a pipe
    read = multihead.load_table(table)
    assert len(read.heads) >= 32 and read.count("probe:induction").all()
    assert len(csv.read_text().splitlines()) == len(read.heads) + 1
    assert page.stat().st_size < 3_000_000 and "L0.H0" in page.read_text()


def test_reads_a_prompt_a_file_and_standard_input_alike(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = "The cat sat on the mat and the cat sat on the hat."
    file = tmp_path / "text.txt"
    file.write_text(text)
    tables = []
    for n, source in enumerate((["--prompt", text], ["--text", str(file)], ["--text", "-"])):
        out = tmp_path / f"{n}.json"
        with file.open() as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            code, printed, err = call(monkeypatch, capsys, "read", *source, "--json", str(out))
        assert code == 0, err
        assert "The cat sat" in printed
        tables.append(json.loads(out.read_text())["sums"])
    assert tables[0] == tables[1] == tables[2]


def test_all_prints_every_head_of_a_real_model(
        minilm_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(monkeypatch, capsys, "read", str(minilm_dir), "--prompt", "The cat sat on the mat.", "--all")
    assert code == 0, err
    assert all(f"L{layer}.H{head} " in out for layer in range(6) for head in range(12))


def test_a_text_longer_than_the_positions_is_cut_and_said_so(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "long.txt").write_text("a long and winding road " * 400)
    code, out, _ = call(monkeypatch, capsys, "read", "--text", str(tmp_path / "long.txt"))
    words = " ".join(out.split())
    assert code == 0 and "512" in words and "read the first" in words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["read", "--out", "{tmp}/nowhere/heads.html"], ["--out", "nowhere", "doesn't exist", "make it first"]),
        (["read", "--json", "{tmp}/nowhere/heads.json"], ["--json", "nowhere", "doesn't exist"]),
        (["read", "--csv", "{tmp}/heads.txt"], ["--csv", "heads.txt", ".csv"]),
        (["read", "--out", "{tmp}"], ["--out", "is a folder"]),
        (["read", "--json", "{tmp}/x.json", "--out", "{tmp}/x.json"], ["x.json", "given twice"]),
        (["read", "--prompt", "  "], ["prompt", "empty"]),
        (["read", "--prompt", "a \udcff b"], ["prompt", "UTF-8"]),
        (["read", "--prompt", "a", "--text", "b"], ["text='b'", "prompt='a'", "exactly one"]),
        (["read", "--text", "{tmp}/none.txt"], ["none.txt", "no such file"]),
        (["read", "{tmp}/no-model"], ["no-model"]),
        (["read", "{tmp}"], ["config.json"]),
        (["read", "--device", "tpu"], ["tpu", "cpu"]),
        (["read", "--dtype", "int8"], ["int8", "float32"]),
        (["read", "--oops"], ["--oops"]),
        (["reed"], ["reed"]),
    ],
)
def test_words(arguments: list[str], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
               capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, on standard error: the argument, its value, what was expected. Nothing is written."""
    code, out, err = call(monkeypatch, capsys, *(a.format(tmp=tmp_path) for a in arguments))
    assert code == 2 and not out
    assert all(word in err for word in words), err
    assert "Traceback" not in err and list(tmp_path.iterdir()) == []


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    multihead.builtin()[0].save_pretrained(tmp_path / "model")
    code, _, err = call(monkeypatch, capsys, "read", str(tmp_path / "model"), "--prompt", "a text")
    assert code == 2 and "has no tokenizer" in err and "tokenizer.json" in err


def test_a_closed_pipe_loses_no_file(tmp_path: Path) -> None:
    """`multihead read --json heads.json | head -1`: the file is there, and no traceback is."""
    out = tmp_path / "heads.json"
    command = [sys.executable, "-m", "multihead", "read", "--prompt", "the cat and the cat", "--json", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    process.wait()
    assert multihead.load_table(out).heads


def test_letters_that_the_terminal_lacks_are_replaced(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "multihead", "read", "--prompt", "déjà vu 🙂 déjà vu"], capture_output=True,
                          env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert done.returncode == 0 and b"d?j? vu" in done.stdout, done.stderr


def test_a_full_disk_leaves_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "heads.html"
    page.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    code, _, err = call(monkeypatch, capsys, "read", "--prompt", "the cat and the cat", "--out", str(page))
    assert code == 2 and "No space left" in err
    assert page.read_text() == "old" and list(tmp_path.iterdir()) == [page]


def test_a_hostile_text_stays_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """From the prompt to the page: a script in the text adds no element, in the maps, the header or the title."""
    pages = []
    hostile = "</script><script>alert(1)</script> <img src=x onerror=alert(1)>"
    for n, prompt in enumerate(["a harmless text of some words", hostile]):
        code, _, err = call(monkeypatch, capsys, "read", "--prompt", prompt, "--out", str(tmp_path / f"{n}.html"))
        assert code == 0, err
        pages.append((tmp_path / f"{n}.html").read_text())
    counts = [[page.lower().count(tag) for tag in ("<script", "</script", "<img", "onerror=")] for page in pages]
    assert counts[0][:3] == counts[1][:3]
    assert "alert(1)" in pages[1]
