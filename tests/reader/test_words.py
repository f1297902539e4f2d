"""Words are aligned with the tokens that a model reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import multihead
from conllu_files import PIECES, pieces, write
from multihead.reader.conllu import read_conllu
from multihead.reader.words import align_words


def aligned(rows: list[str], tmp_path: Path, tokenizer: Any) -> Any:
    return align_words(read_conllu(write(tmp_path / "one.conllu", [rows]))[0], tokenizer)


def test_pieces_belong_to_their_word(tmp_path: Path) -> None:
    found = aligned(
        ["1 abcd 2 det", "2 dd 0 root SpaceAfter=No", "3 . 2 punct"], tmp_path, pieces()
    )
    assert [PIECES[n] for n in found.ids] == ["<s>", "ab", "##cd", "dd", ".", "</s>"]
    assert found.word_of == [-1, 0, 0, 1, 2, -1] and found.words == 3
    assert found.arcs == [(0, 1, "det"), (2, 1, "punct")]


def test_words_that_share_their_letters_are_one(tmp_path: Path) -> None:
    """du = de + le: the arcs of both begin at the one token, and the one between them is none."""
    rows = ["1 a 0 root", "2-3 dab _ _", "2 d 4 case", "3 bb 2 det", "4 c 1 nmod"]
    found = aligned(rows, tmp_path, pieces())
    assert found.word_of == [-1, 0, 1, 1, 2, -1]
    assert found.arcs == [(1, 2, "case"), (2, 0, "nmod")]


def test_a_token_belongs_to_the_word_with_most_letters_of_it(tmp_path: Path) -> None:
    """dd##a##b over the words "dda" and "b"; "ab" over "a" and "b", as many letters each, is the
    first one's.
    """
    joined = ["1-2 ddab _ _", "1 dda 2 det", "2 b 0 root"]
    assert [PIECES[n] for n in pieces()("ddab")["input_ids"]] == ["<s>", "dd", "##ab", "</s>"]
    assert aligned(joined, tmp_path, pieces()) is None, "##ab is dda's, and nothing is left for b"
    assert aligned(["1-2 abcd _ _", "1 abc 2 det", "2 d 0 root"], tmp_path, pieces()) is None
    assert aligned(["1-2 abb _ _", "1 ab 2 det", "2 b 0 root"], tmp_path, pieces()).word_of == [
        -1,
        0,
        1,
        -1,
    ]


def test_byte_level_tokens_with_the_space_before_their_word(tmp_path: Path) -> None:
    _, tokenizer = multihead.load_builtin()
    rows = ["1 Say 0 root", "2 你好 1 obj", "3 now 1 advmod SpaceAfter=No", "4 . 1 punct"]
    found = aligned(rows, tmp_path, tokenizer)
    assert sorted(set(found.word_of)) == [-1, 0, 1, 2, 3]
    assert found.word_of.count(1) > 2, "letters of several bytes, several tokens each"
    assert found.word_of[0] == -1 and found.word_of[-1] == 3
    words = [word for word in found.word_of if word >= 0]
    assert words == sorted(words)
