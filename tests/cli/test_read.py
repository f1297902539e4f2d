"""`multihead read`: what it prints and writes, and its messages for wrong arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import multihead
from cli.commands import call, run


def test_reads_the_built_in_model_and_writes_all_three_files(tmp_path: Path) -> None:
    page, table, csv = tmp_path / "heads.html", tmp_path / "heads.json", tmp_path / "heads.csv"
    done = run("read", "--page", str(page), "--json", str(table), "--csv", str(csv))
    assert done.returncode == 0, done.stderr
    assert "L0.H0" in done.stdout and f"wrote {page}" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr  # no colours in a pipe
    read = multihead.load_table(table)
    assert len(read.heads) >= 32 and read.count("probe:induction").all()
    assert len(csv.read_text().splitlines()) == len(read.heads) + 1
    assert page.stat().st_size < 3_000_000 and "L0.H0" in page.read_text()


def test_reads_a_prompt_a_file_and_standard_input_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
    minilm_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(
        monkeypatch, capsys, "read", str(minilm_dir), "--prompt", "The cat sat on the mat.", "--all"
    )
    assert code == 0, err
    assert all(f"L{layer}.H{head} " in out for layer in range(6) for head in range(12))


def test_a_text_longer_than_the_positions_is_cut_and_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "long.txt").write_text("a long and winding road " * 400)
    code, out, _ = call(monkeypatch, capsys, "read", "--text", str(tmp_path / "long.txt"))
    words = " ".join(out.split())
    assert code == 0 and "512" in words and "read the first" in words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["read", "--page", "{tmp}/nowhere/heads.html"],
            ["--page", "nowhere", "doesn't exist", "create it first"],
        ),
        (["read", "--json", "{tmp}/nowhere/heads.json"], ["--json", "nowhere", "doesn't exist"]),
        (["read", "--csv", "{tmp}/heads.txt"], ["--csv", "heads.txt", ".csv"]),
        (["read", "--page", "{tmp}"], ["--page", "is a folder"]),
        (["read", "--json", "{tmp}/x.json", "--page", "{tmp}/x.json"], ["x.json", "given twice"]),
        (["read", "--prompt", "  "], ["prompt", "empty"]),
        (["read", "--prompt", "a \udcff b"], ["prompt", "UTF-8"]),
        (["read", "--prompt", "a", "--text", "b"], ["--text 'b'", "--prompt 'a'", "exactly one"]),
        (["read", "--text", "{tmp}/none.txt"], ["none.txt", "no such file"]),
        (["read", "{tmp}/no-model"], ["no-model"]),
        (["read", "{tmp}"], ["config.json"]),
        (["read", "--device", "tpu"], ["tpu", "cpu"]),
        (["read", "--dtype", "int8"], ["int8", "float32"]),
        (["read", "--oops"], ["--oops"]),
        (["reed"], ["reed"]),
    ],
)
def test_words(
    arguments: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 2, on standard error: the argument, its value, what was expected. Nothing is
    written.
    """
    code, out, err = call(monkeypatch, capsys, *(a.format(tmp=tmp_path) for a in arguments))
    assert code == 2 and not out
    assert all(word in err for word in words), err
    assert "Traceback" not in err and list(tmp_path.iterdir()) == []


def test_a_folder_without_a_tokenizer_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    multihead.load_builtin()[0].save_pretrained(tmp_path / "model")
    code, _, err = call(monkeypatch, capsys, "read", str(tmp_path / "model"), "--prompt", "a text")
    assert code == 2 and "has no tokenizer" in err and "tokenizer.json" in err


def test_a_closed_pipe_loses_no_file(tmp_path: Path) -> None:
    """`multihead read --json heads.json | head -1`: the file is there, and no traceback is."""
    out = tmp_path / "heads.json"
    command = [
        sys.executable,
        "-m",
        "multihead",
        "read",
        "--prompt",
        "the cat and the cat",
        "--json",
        str(out),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    process.wait()
    assert multihead.load_table(out).heads


def test_letters_that_the_terminal_lacks_are_replaced(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "multihead", "read", "--prompt", "déjà vu 🙂 déjà vu"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
    )
    assert done.returncode == 0 and b"d?j? vu" in done.stdout, done.stderr


def test_a_full_disk_leaves_the_old_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "heads.html"
    page.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    code, _, err = call(
        monkeypatch, capsys, "read", "--prompt", "the cat and the cat", "--page", str(page)
    )
    assert code == 2 and "No space left" in err
    assert page.read_text() == "old" and list(tmp_path.iterdir()) == [page]


def test_a_hostile_text_stays_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the prompt to the page: a script in the text adds no element, in the maps, the header or
    the title.
    """
    pages = []
    hostile = "</script><script>alert(1)</script> <img src=x onerror=alert(1)>"
    for n, prompt in enumerate(["a harmless text of some words", hostile]):
        code, _, err = call(
            monkeypatch, capsys, "read", "--prompt", prompt, "--page", str(tmp_path / f"{n}.html")
        )
        assert code == 0, err
        pages.append((tmp_path / f"{n}.html").read_text())
    counts = [
        [page.lower().count(tag) for tag in ("<script", "</script", "<img", "onerror=")]
        for page in pages
    ]
    assert counts[0][:3] == counts[1][:3]
    assert "alert(1)" in pages[1]


def test_any_number_of_files_folders_and_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table of all is that of their texts from Python; what is empty is left out and told."""
    (tmp_path / "in").mkdir()
    long = "the cat and the dog sat on the mat " * 12
    (tmp_path / "in" / "a.txt").write_text(long)
    (tmp_path / "in" / "b.md").write_text(" ")
    (tmp_path / "c.jsonl").write_text('{"body": "a cat"}\n{"body": "a hat and a cat"}\n')
    out = tmp_path / "heads.json"
    code, printed, err = call(
        monkeypatch,
        capsys,
        "read",
        "--text",
        str(tmp_path / "in"),
        "--text",
        str(tmp_path / "c.jsonl"),
        "--field",
        "body",
        "--context",
        "40",
        "--stride",
        "20",
        "--batch-size",
        "3",
        "--json",
        str(out),
    )
    assert code == 0, err
    words = " ".join(printed.split())
    assert (
        "3 documents" in words
        and "1 empty texts were left out" in words
        and "read in windows, 20 tokens apart" in words
    )
    model, tokenizer = multihead.load_builtin()
    want = multihead.read(
        model,
        [long, "a cat", "a hat and a cat"],
        tokenizer=tokenizer,
        batch_size=3,
        context=40,
        stride=20,
    )
    got = multihead.load_table(out)
    assert all((got.sums[c] == want.sums[c]).all() for c in want.sums)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "c.jsonl",
        "heads.json",
        "in",
    ]  # no progress is left behind


def test_generate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = []
    for more in ([], ["--generate", "5"]):
        code, _, err = call(
            monkeypatch,
            capsys,
            "read",
            "--prompt",
            "the cat and the",
            "--json",
            str(tmp_path / "t.json"),
            *more,
        )
        assert code == 0, err
        tables.append(multihead.load_table(tmp_path / "t.json"))
    assert tables[1].meta["tokens"] == tables[0].meta["tokens"] + 4


# Children of one process, so that the imports are paid for once; each unit of a reading takes its
# time and says so.
STOPS = """
import os, signal, sys, time
import multihead
import multihead.report.page
from multihead import cli
from multihead.reader import run
from multihead.io import ResumeFile

folder, units = sys.argv[1], os.pipe()
signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where the tests run in the background
ResumeFile.is_due = lambda self: True
true = run.ReadingRun._unit

def unit(self, session, one):
    stopped = true(self, session, one)
    os.write(units[1], b".")
    time.sleep(float(slow))
    return stopped

run.ReadingRun._unit = unit
multihead.load_builtin()
for name, slow, signals in (("twice", 0.5, [signal.SIGINT] * 2), ("heads", 0.1, [signal.SIGINT]),
                            ("heads", 0.1, [signal.SIGKILL]), ("heads", 0, []), ("whole", 0, [])):
    sys.stdout.flush()
    child = os.fork()
    if not child:
        os.dup2(os.open(f"{folder}/{name}.out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        page = ["--page", f"{folder}/{name}.html"] if signals == [signal.SIGINT] else []
        sys.argv = ["multihead", "read", "--text", f"{folder}/in.jsonl", "--json", f"{folder}/{name}.json",
                    "--batch-size", "1", *page]
        try:
            cli.main()
        except SystemExit as end:
            sys.stdout.flush()
            os._exit(end.code or 0)
        os._exit(0)
    if signals:
        os.read(units[0], 1), os.read(units[0], 1)
    for number in signals:
        os.kill(child, number)
        time.sleep(0.15)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), *sorted(os.listdir(folder)))
    print(" ".join(open(f"{folder}/{name}.out").read().split()))
"""


@pytest.mark.slow
def test_stopped_by_hand_or_killed(tmp_path: Path) -> None:
    """One Ctrl-C ends with what was read so far, two at once; the same command goes on, also after
    a kill.
    """
    (tmp_path / "in.jsonl").write_text(
        "".join(f'{{"text": "{"the cat and the dog " * (n % 4 + 1)}"}}\n' for n in range(12))
    )
    done = subprocess.run(
        [sys.executable, "-c", STOPS, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
    )
    assert done.returncode == 0, done.stderr
    twice, said, once, partial, killed, _, finished, _, whole, _ = done.stdout.splitlines()
    assert (
        twice.split()[0] == "130" and "twice.json" not in twice.split() and "Ctrl-C again" in said
    )
    assert once.split()[0] == "130" and {"heads.json", "heads.html", "heads.json.progress"} <= set(
        once.split()
    )
    assert (
        "the reading is partial" in partial
        and "the same command resumes" in partial
        and "12 documents" not in partial
    )
    assert killed.split()[0] == "-9" and "heads.json.progress" in killed.split()
    assert (
        finished.split()[0] == whole.split()[0] == "0"
        and "heads.json.progress" not in finished.split()
    )
    got, want = (multihead.load_table(tmp_path / f"{name}.json") for name in ("heads", "whole"))
    assert got.meta == want.meta and got.meta["documents"] == 12
    for column in want.sums:
        np.testing.assert_allclose(got.sums[column], want.sums[column], rtol=1e-12, atol=1e-300)
    assert "the reading is partial" in (tmp_path / "heads.html").read_text()


def test_statistics_are_listed() -> None:
    done = run("statistics")
    assert done.returncode == 0
    for s in multihead.reader.list_statistics():
        assert f"{s.name}  {s.formula}" in done.stdout
    assert "--statistic copying" in " ".join(done.stdout.split()) and "0..1" in done.stdout


def test_what_is_asked_for_is_in_the_table(tmp_path: Path) -> None:
    trees = Path(__file__).parents[1] / "fixtures" / "sentences.conllu"
    done = run(
        "read",
        "--prompt",
        "the 3 cats and the 3 dogs",
        "--class",
        r"digits=\d",
        "--statistic",
        "copying",
        "--statistic",
        "nearest",
        "--relations",
        str(trees),
        "--json",
        str(tmp_path / "t.json"),
    )
    assert done.returncode == 0, done.stderr
    table = multihead.load_table(tmp_path / "t.json")
    assert {"class:digits", "copying", "nearest", "relation:all"} <= {*table.columns}
    header = next(line for line in done.stdout.splitlines() if line.startswith("head  "))
    assert {"class:digits", "copying", "nearest"} <= {
        *header.split()
    } and "relations: the most accurate of 32 heads" in done.stdout


def test_by_words(tmp_path: Path) -> None:
    done = run(
        *("read", "--prompt", "a zebra and a zebra", "--class", "animal=^zebra$", "--by", "word"),
        *("--json", tmp_path / "t.json", "--page", tmp_path / "page.html"),
    )
    assert done.returncode == 0, done.stderr
    assert (multihead.load_table(tmp_path / "t.json").count("class:animal") > 0).all()
    assert '"by":"word"' in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--class", "digits"], "--class digits: expected NAME=REGEX"),
        (["--by", "letter"], "--by letter: expected 'token' or 'word'"),
        (["--class", "a=x", "--class", "a=y"], "--class a=y: there is a class a already (x)"),
        (["--class", "a=("], "isn't a regular expression"),
        (["--statistic", "coping"], "--statistic 'coping': did you mean 'copying'?"),
        (["--relations", "nowhere.conllu"], "--relations nowhere.conllu: there is no such file"),
        (["--statistic", "effect", "--generate", "2"], "--statistic ['effect'] with --generate 2"),
    ],
)
def test_what_is_asked_for_wrongly(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    code, out, err = call(monkeypatch, capsys, "read", *arguments)
    assert code == 2 and words in err and out == ""
