"""Sources to documents: files, folders, JSON lines and standard input, and words for what can't be
read.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from multihead.data.sources import Documents, builtin_text, describe_sources, read_text


def stdin(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def test_files_folders_lines_and_standard_input_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in" / "side").mkdir(parents=True)
    (tmp_path / "in" / ".git").mkdir()
    for name, text in {
        "in/b.txt": "b",
        "in/a.MD": "a",
        "in/side/c.txt": "c",
        "in/.hidden.txt": "no",
        "in/.git/d.txt": "no",
        "in/e.py": "no",
        "in/empty.txt": " \n",
        "one.py": "one",
    }.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "in" / "lines.jsonl").write_text(
        '{"text": "x"}\n\n{"text": "  "}\n{"text": "y", "more": 1}'
    )
    stdin(monkeypatch, "last\nof all")
    documents = Documents([tmp_path / "one.py", str(tmp_path / "in"), "-"])
    assert list(documents) == ["one", "a", "b", "x", "y", "c", "last\nof all"]
    assert documents.left_out == 2
    again = Documents([tmp_path / "in"])
    assert list(again) == list(again)


def test_a_field_of_ones_own_also_makes_standard_input_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_bytes(
        b'\xef\xbb\xbf{"body": "x"}\r\n{"body": "\\u00e4\\ud83d\\ude42"}\r\n'
    )
    stdin(monkeypatch, '{"body": "z"}\n')
    assert list(Documents([tmp_path / "a.jsonl", "-"], field="body")) == ["x", "ä🙂", "z"]


def test_lines_are_read_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "first"}\nnonsense\n')
    documents = iter(Documents([tmp_path / "a.jsonl"]))
    assert next(documents) == "first"
    with pytest.raises(ValueError, match="line 2"):
        next(documents)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nonsense", ["isn't JSON", '{"text": "..."}']),
        (
            '{"text": 5}',
            ["a number under 'text', not a text or a list of messages; rename it in the file"],
        ),
        ('{"body": "x", "id": 1}', ["no text under 'text'", "the names 'body', 'id'", "--field"]),
        ('["text"]', ["no text under 'text'", "but a list", "--field"]),
        ('{"text": "\\ud800"}', ["an unpaired surrogate"]),
        ("[" * 100_000, ["isn't JSON"]),
        ('{"text": "caf\udce9"}', ["isn't JSON"]),
    ],
)
def test_a_line_without_a_text_is_named(tmp_path: Path, line: str, words: list[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(ValueError) as caught:
        list(Documents([path]))
    message = str(caught.value)
    assert f"text={str(path)!r}, line 2" in message and all(word in message for word in words), (
        message
    )


def test_words(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "picture.png").write_bytes(b"")
    (tmp_path / "empty.txt").write_text("")
    cases: list[tuple[list[Any], type[Exception], list[str]]] = [
        ([tmp_path / "none"], FileNotFoundError, ["none", "no such file"]),
        ([tmp_path / "empty"], ValueError, ["is a folder without text files", ".jsonl", ".txt"]),
        ([], ValueError, ["text=[]"]),
        ([""], ValueError, ["text='' is empty", "a folder, or . for"]),
        (["-", "-"], ValueError, ["given twice"]),
        ([tmp_path / "empty.txt"], ValueError, ["empty.txt", "is empty"]),
    ]
    for sources, error, words in cases:
        with pytest.raises(error) as caught:
            list(Documents(sources))
        assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_name_for_a_table() -> None:
    assert describe_sources(["a.txt"], "some  words\n") == "a.txt: some words"
    assert (
        describe_sources(["-", "b", "c", "d", "e"], "w " * 50)
        == f"standard input, b, c and 2 more: {('w ' * 30)[:60]}…"
    )
    assert json.dumps(describe_sources([Path("x")], ""))


def test_text_from_a_file_a_prompt_and_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes("\ufeffWörter\r\n".encode())
    assert read_text(file) == read_text(str(file)) == "Wörter\r\n"
    monkeypatch.setattr(
        "sys.stdin", io.TextIOWrapper(io.BytesIO("Größe".encode()), encoding="latin1")
    )
    assert read_text("-") == "Größe"
    assert read_text(prompt="-") == "-"


def test_built_in_text_is_there() -> None:
    assert len(builtin_text().split()) > 50


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty; give a text with at least one word"),
        (b" \n\t ", "is empty"),
        (
            "Größe".encode("latin1"),
            "is not UTF-8 text: byte 2 is 0xf6. If it is text in another encoding, convert it",
        ),
        (b"ab\0c", "is not text: byte 2 is 0"),
    ],
)
def test_files_that_are_no_text(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_text(tmp_path / "text")
    assert f"text={str(tmp_path / 'text')!r} {words}" in str(caught.value)


@pytest.mark.parametrize(
    ("sources", "content", "words"),
    [
        (["missing.txt"], None, "='missing.txt': there is no such file; give a text file, or -"),
        ([], None, "=[] names no source"),
        ([""], None, "='' is empty"),
        (["-", "-"], None, "='-' is given twice"),
        (["folder"], None, " is a folder without text files"),
        (["lines.jsonl"], b"{", ", line 1 isn't JSON"),
        (["text.txt"], b"", " is empty; give a text"),
        (["text.txt"], b"\xff", " is not UTF-8 text"),
    ],
)
def test_messages_name_the_argument_that_gave_the_sources(
    sources: list[str],
    content: bytes | None,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    if content is not None:
        (tmp_path / sources[0]).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        list(Documents(sources, argument="calibrate"))
    message = str(caught.value)
    assert message.startswith("calibrate=") and words in message, message
    assert "text=" not in message and "prompt" not in message, message


def test_no_file_and_no_text(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"text='missing.txt': there is no such file; give a text file"
    ):
        read_text("missing.txt")
    with pytest.raises(ValueError, match="is a folder; give a text file in it"):
        read_text(tmp_path)
    with pytest.raises(ValueError, match=r"prompt='  ' is empty"):
        read_text(prompt="  ")
    with pytest.raises(ValueError, match="text=None and prompt=None: give exactly one"):
        read_text()
    with pytest.raises(ValueError, match="text='a' and prompt='b': give exactly one"):
        read_text("a", prompt="b")


CHAT = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "a dog"}]


def lines(path: Path, *entries: Any) -> Path:
    path.write_text("\n".join(map(json.dumps, entries)))
    return path


def test_conversations_in_json_lines(tmp_path: Path) -> None:
    file = lines(
        tmp_path / "a.jsonl", {"messages": CHAT}, {"text": "b"}, {"text": "c", "messages": CHAT}
    )
    assert list(Documents([file])) == [CHAT, "b", "c"]
    assert list(Documents([lines(tmp_path / "b.jsonl", {"turns": CHAT})], field="turns")) == [CHAT]
    empty = Documents(
        [lines(tmp_path / "c.jsonl", {"messages": [{"role": "user", "content": " "}]})]
    )
    assert list(empty) == [] and empty.left_out == 1


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"messages": []}, "a list under 'messages', not a text or a list of messages"),
        ({"messages": ["a"]}, "a list under 'messages', not a text or a list of messages"),
        ({"messages": [*CHAT, {"content": "a"}]}, "line 1: messages[2] is a dict with 'content'"),
        (
            {"conversations": CHAT},
            "has no text under 'text', but the names 'conversations'; rename it",
        ),
    ],
)
def test_conversations_that_are_none(entry: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        list(Documents([lines(tmp_path / "a.jsonl", entry)]))
    assert words in str(caught.value)
