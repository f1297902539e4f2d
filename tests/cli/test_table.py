"""`multihead table`: saved tables printed, added and compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import multihead
from cli.commands import call


def saved(path: Path, text: str) -> multihead.Table:
    model, tokenizer = multihead.load_builtin()
    table = multihead.read(model, text, tokenizer=tokenizer)
    table.save(path)
    return table


def test_merge_adds_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, out = (tmp_path / name for name in ("a.json", "b.json", "sum.json"))
    want = saved(a, "the cat and the cat") + saved(b, "the dog sat on the mat")
    code, printed, err = call(
        monkeypatch,
        capsys,
        "table",
        "merge",
        str(a),
        str(b),
        "--json",
        str(out),
        "--csv",
        str(tmp_path / "s.csv"),
    )
    assert code == 0, err
    got = multihead.load_table(out)
    assert (
        got.meta["documents"] == 2
        and got.meta["text"].startswith("2 tables: ")
        and "2 documents" in printed
    )
    assert (
        all((got.sums[c] == want.sums[c]).all() for c in want.sums)
        and (tmp_path / "s.csv").exists()
    )


def test_compare_shows_what_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, out = (tmp_path / name for name in ("a.json", "b.json", "c.json"))
    saved(a, "the cat and the cat"), saved(b, "the dog sat on the mat")
    code, printed, err = call(
        monkeypatch,
        capsys,
        "table",
        "compare",
        str(a),
        str(b),
        "--json",
        str(out),
        "--csv",
        str(tmp_path / "c.csv"),
    )
    assert code == 0, err
    assert "roles changed" in printed and "32 in both" in printed and f"wrote {out}" in printed
    found = json.loads(out.read_text())
    assert len(found["rows"]) == len((tmp_path / "c.csv").read_text().splitlines()) - 1 > 32


def test_words_of_merge_and_compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "a.json", "the cat and the cat")
    other = multihead.load_table(tmp_path / "a.json")
    multihead.Table(other.heads[:3]).save(tmp_path / "b.json")
    multihead.Table([]).save(tmp_path / "none.json")
    (tmp_path / "copy.json").write_bytes((tmp_path / "a.json").read_bytes())
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "link.json").symlink_to(tmp_path / "a.json")
    before = sorted(tmp_path.iterdir())
    for arguments, words in (
        (["table", "merge", "a.json", "a.json"], ["a.json is given twice", "count twice"]),
        (
            ["table", "merge", "a.json", "copy.json"],
            ["a.json and", "copy.json hold the same numbers", "count twice"],
        ),
        (["table", "merge", "a.json", "link.json"], ["a.json is given twice", "count twice"]),
        (
            ["table", "merge", "a.json", "b.json", "--json", "x.json"],
            ["a.json and", "b.json", "tables of 32 and 3 heads"],
        ),
        (["table", "merge", "a.json", "bad.json"], ["bad.json", "isn't a table of heads"]),
        (["table", "merge", "a.json", "nothing.json"], ["nothing.json"]),
        (["table", "merge", "a.json", "--json", "x.txt"], ["--json", "x.txt", ".json"]),
        (["table", "compare", "a.json", "none.json"], ["no head in common"]),
        (["table", "compare", "a.json", "b.json", "--csv", "x.json"], ["--csv", ".csv"]),
        (["table", "compare", "a.json"], ["'b'"]),
        (["read", "--text", "none.jsonl", "--text", "a.json"], ["none.jsonl", "no such file"]),
        (["read", "--prompt", "a text", "--context", "1"], ["--context 1 leaves no room"]),
        (["read", "--prompt", "a text", "--generate", "0"], ["--generate 0"]),
    ):
        given = [
            str(tmp_path / a) if a.endswith((".json", ".jsonl", ".txt")) else a for a in arguments
        ]
        code, out, err = call(monkeypatch, capsys, *given)
        assert code == 2 and not out and all(word in err for word in words), (arguments, err)
        assert sorted(tmp_path.iterdir()) == before and "Traceback" not in err


def test_tables_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for verb in ("compare", "merge"):
        code, _, err = call(monkeypatch, capsys, "table", verb, "nowhere.json", "other.json")
        assert code == 2 and "'nowhere.json': there is no such file; expected the JSON" in err


def test_show_prints_a_saved_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = saved(tmp_path / "a.json", "the cat and the cat")
    csv = tmp_path / "a.csv"
    code, printed, err = call(
        monkeypatch, capsys, "table", "show", tmp_path / "a.json", "--csv", csv
    )
    assert code == 0, err
    assert printed == f"{table}\nwrote {csv}\n"
    assert len(csv.read_text().splitlines()) == 33
