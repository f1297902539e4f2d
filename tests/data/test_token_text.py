"""Labels and words of tokens: whole characters where tokens are bytes, whole words."""

from __future__ import annotations

import itertools
import json

import pytest
from tokenizers import Tokenizer

import multihead
from multihead.data.token_text import TokenGroup, TokenText, group_words
from tiny_tokenizers import byte_fallback, byte_level, every_kind, fast

KINDS = every_kind()
WITH_BYTES = ["byte-level", "byte-fallback", "bytes"]


def test_a_group_unpacks() -> None:
    start, stop, text = TokenGroup(1, 3, "the")
    assert (start, stop, text) == (1, 3, "the")


def encoded(kind: str, text: str) -> list[int]:
    return KINDS[kind](text)["input_ids"]


@pytest.mark.parametrize("kind", WITH_BYTES)
@pytest.mark.parametrize("character", ["😀", "ï", "你", "\u200d"])
def test_tokens_of_one_character_are_labelled_by_it(kind: str, character: str) -> None:
    ids = encoded(kind, f"the {character}cat")
    labels = TokenText(KINDS[kind]).labels(ids)
    number = len(character.encode())
    expected = [f"{character} {n}/{number}" for n in range(1, number + 1)]
    assert [label for label in labels if label[0] == character] == expected
    assert len(labels) == len(ids)


@pytest.mark.parametrize("kind", WITH_BYTES)
def test_characters_in_a_row_are_told_apart(kind: str) -> None:
    groups = TokenText(KINDS[kind]).characters(encoded(kind, "😀😀你"))
    assert [g.text for g in groups if g.stop - g.start > 1] == ["😀", "😀", "你"]


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_bytes_that_are_no_character_stay_alone(kind: str) -> None:
    """As a model may generate them: the beginning of a character, and then another one."""
    smile = encoded(kind, "😀")[-4:]
    ids = [*smile[:2], *smile, smile[3]]
    groups = TokenText(KINDS[kind]).characters(ids)
    assert [(g.start, g.stop) for g in groups] == [(0, 1), (1, 2), (2, 6), (6, 7)]
    assert len(TokenText(KINDS[kind]).labels(ids)) == len(ids)


def test_a_token_may_end_one_character_and_begin_another() -> None:
    tokenizer = fast(byte_level())
    smile = tokenizer.convert_ids_to_tokens(tokenizer("😀", add_special_tokens=False)["input_ids"])
    first, last = smile[0] + smile[1] + smile[2], smile[3] + smile[0]
    changed = json.loads(byte_level().to_str())
    vocabulary, merges = changed["model"]["vocab"], changed["model"]["merges"]
    for a, b in ((smile[0], smile[1]), (smile[0] + smile[1], smile[2]), (smile[3], smile[0])):
        vocabulary.setdefault(a + b, len(vocabulary) + 10)
        merges.append([a, b])
    made = fast(Tokenizer.from_str(json.dumps(changed)))
    ids = [vocabulary[string] for string in (first, last, *smile[1:])]
    assert made.decode(ids) == "😀😀"
    assert TokenText(made).labels(ids) == [f"😀😀 {n}/5" for n in range(1, 6)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_is_in_one_word_in_order(kind: str) -> None:
    text = "Unbelievably, don't playing the 3.14 catdog 😀 naïve 你好\n\n  x!?"
    ids = encoded(kind, text)
    groups = group_words(ids, KINDS[kind])
    assert groups[0].start == 0 and groups[-1].stop == len(ids)
    assert all(a.stop == b.start for a, b in itertools.pairwise(groups))


@pytest.mark.parametrize(
    ("kind", "expected"),
    {
        "byte-level": "<s> Unbelievably , don't playing 3.14 catdog 😀 naïve 你 好 👩\u200d💻 .",
        "byte-fallback": "<s> Unbelievably , don't playing 3.14 catdog 😀 naïve 你 好 👩\u200d💻 .",
        "bytes": "Unbelievably , don't playing 3.14 catdog 😀 naïve 你 好 👩\u200d💻 . </s>",
    }.items(),
)
def test_words_of_unicode(kind: str, expected: str) -> None:
    ids = encoded(kind, "Unbelievably, don't playing 3.14 catdog 😀 naïve 你好👩\u200d💻.")
    words = [g.text for g in group_words(ids, KINDS[kind]) if not g.text.isspace()]
    assert words == expected.split(" ")


def test_pieces_of_bert_and_clip() -> None:
    ids = encoded("word-pieces", "Playing, catdog")
    words = [g.text for g in group_words(ids, KINDS["word-pieces"])]
    assert words == ["[CLS]", "playing", "[UNK]", "catdog", "[SEP]"]
    ids = encoded("ends-of-words", "playing catdog the")
    words = [g.text for g in group_words(ids, KINDS["ends-of-words"])]
    assert words == ["<s>", "playing", "catdog", "the"]


def test_white_space_padding_and_added_tokens_are_alone() -> None:
    tokenizer = fast(byte_level())
    tokenizer.add_tokens(["<image>"])
    ids = tokenizer("the<image>cat\n\nx")["input_ids"] + [-1, -2]
    words = [g.text for g in group_words(ids, tokenizer)]
    assert words == ["<s>", "the", "<image>", "cat", "\n", "\n", "x", "", ""]
    assert TokenText(tokenizer).labels([-1, 10**6]) == ["-1", "1000000"]


def test_the_space_before_a_word_is_the_word_s() -> None:
    tokenizer = fast(byte_fallback())
    ids = tokenizer("the 你 x")["input_ids"]
    assert [g.text for g in group_words(ids, tokenizer)] == ["<s>", "the", "你", "x"]


def test_no_token_and_ids_beyond_the_vocabulary() -> None:
    _, tokenizer = multihead.load_builtin()
    assert group_words([], tokenizer) == []
    assert [g[:2] for g in group_words([10**6], tokenizer)] == [(0, 1)]
    assert len(TokenText(tokenizer).labels([10**6])) == 1
