"""Texts that share a file, a document or a passage of fifty words are refused, with the place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multihead.data.sources import Documents
from multihead.pruning.overlap import require_disjoint

NOVEL = [f"word{n}" for n in range(400)]


@settings(max_examples=40)
@given(st.data())
def test_a_shared_passage_is_found_wherever_it_stands_from_fifty_words_on(
    data: st.DataObject,
) -> None:
    length = data.draw(st.integers(40, 60))
    start = data.draw(st.integers(0, 400 - length))
    before, after = data.draw(st.integers(0, 30)), data.draw(st.integers(0, 30))
    passage = NOVEL[start : start + length]
    other = (
        [f"x{n}" for n in range(before)]
        + [word.upper() + "," for word in passage]
        + [f"y{n}" for n in range(after)]
    )
    texts = ["nothing here", " ".join(NOVEL)], ["-", " \n".join(other), "nor here"]
    for calibrate, evaluation in (texts, texts[::-1]):
        if length < 50:
            require_disjoint(calibrate, evaluation)
            continue
        with pytest.raises(
            ValueError, match=r"calibrate\[1\] and evaluate\[1\] hold one passage of (\d+) words, '"
        ) as caught:
            require_disjoint(calibrate, evaluation)
        assert f"of {length} words" in str(caught.value)
        assert f"{passage[0]}" in str(caught.value).casefold()


def test_one_short_document_in_both() -> None:
    with pytest.raises(ValueError) as caught:
        require_disjoint(["one thing", "a cat\n sat."], ["A cat sat", "another"])
    assert str(caught.value).startswith(
        "calibrate[1] and evaluate[0] hold one document, 'a cat sat': heads scored on the text"
    )
    require_disjoint(["a cat sat"], ["a cat sat down", "", "a cat"])
    require_disjoint([], ["a"])
    require_disjoint(["a"], ["..."])


def test_letters_of_chinese_are_words() -> None:
    text = "".join(chr(0x4E00 + n) for n in range(120))
    with pytest.raises(ValueError, match="passage of 50 words"):
        require_disjoint(text, "另" * 3 + text[30:80] + "一")
    require_disjoint(text, "另" * 3 + text[30:79] + "一")


def test_one_file_under_two_names(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words")
    os.link(tmp_path / "a.txt", tmp_path / "hard.txt")
    (tmp_path / "soft.txt").symlink_to("a.txt")
    for other in ("a.txt", "hard.txt", "soft.txt"):
        with pytest.raises(ValueError) as caught:
            require_disjoint(Documents([tmp_path / "a.txt"]), Documents([tmp_path / other]))
        assert (
            f"calibrate='{tmp_path}/a.txt' and evaluate='{tmp_path}/{other}' are one file: heads"
            " scored" in str(caught.value)
        )


def test_files_name_the_place(tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").write_text('{"text": "one"}\n\n{"text": "two words"}\n')
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_text("two words")
    (tmp_path / "folder" / "empty.txt").write_text("")
    with pytest.raises(ValueError) as caught:
        require_disjoint(Documents([tmp_path / "lines.jsonl"]), Documents([tmp_path / "folder"]))
    assert (
        f"calibrate='{tmp_path}/lines.jsonl' (text 2) and evaluate='{tmp_path}/folder/a.txt'"
        " hold one" in str(caught.value)
    )
    require_disjoint(Documents([tmp_path / "folder"]), ["other words"])
    with pytest.raises(ValueError, match=r"calibrate has standard input.*give list\(documents\)"):
        require_disjoint(Documents(["-"]), ["a"])


def test_boilerplate_of_fewer_words_is_no_passage() -> None:
    """Forty words that come again and again in both are not enough."""
    often = " ".join(f"b{n}" for n in range(40))
    a, b = (" ".join(f"{often} {name}{n}" for n in range(60)) for name in "xy")
    require_disjoint(a, b)
    with pytest.raises(ValueError, match="hold one passage of 81 words, 'b0 b1"):
        require_disjoint(a, f"{b} {often} x7 {often}")
