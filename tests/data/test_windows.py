"""Windows in which each token counts once, and truncation at the model's positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoTokenizer

from data.test_tokenizing import small_tokenizer
from multihead.data.tokenizing import max_positions
from multihead.data.windows import Window, Windower, cut_texts, cut_windows
from small import llama


@given(st.integers(1, 40), st.integers(0, 2), st.integers(0, 2), st.integers(1, 12), st.data())
def test_every_token_counts_once_and_in_the_first_window_that_holds_it(
    words: int, before: int, after: int, room: int, data: st.DataObject
) -> None:
    context = before + after + room
    stride = data.draw(st.integers(1, room))
    ids = list(range(before + words + after))
    found = cut_windows(ids, before, after, context, stride)
    counted = [row[i] for row, first, last, *_ in found for i in range(first, last)]
    assert counted == ids
    for number, (row, *_) in enumerate(found):
        assert len(row) <= context
        body = row[before : len(row) - after]
        assert row[:before] == ids[:before] and row[len(row) - after :] == ids[len(ids) - after :]
        assert body[0] == before + number * stride or len(found) == 1
        assert body == list(range(body[0], body[0] + len(body)))
    assert all(len(row) == context for row, *_ in found[:-1])


def windower(**options: Any) -> Windower:
    return Windower(small_tokenizer(pad_token="c"), **options)


def test_a_long_text_is_truncated_with_a_note() -> None:
    made = windower(limit=4)
    assert made.cut("c " * 1232) == [Window([0, 4, 4, 1], 0, 4)]
    assert made.cut("a b c") == [Window([0, 2, 3, 1], 0, 4)]
    assert made.cut("a b") == [Window([0, 2, 3, 1], 0, 4)]
    assert made.notes() == [
        "text 1: 1,234 tokens, the model has 4 positions; read the first 4",
        "text 2: 5 tokens, the model has 4 positions; read the first 4",
        "given a context (--context) long texts are read whole, in windows",
    ]


def test_notes_name_three_texts_and_windows() -> None:
    made = windower(limit=4)
    for _ in range(5):
        made.cut("a a a a a")
    made.cut("a")
    assert made.notes() == [
        *(f"text {n}: 7 tokens, the model has 4 positions; read the first 4" for n in (1, 2, 3)),
        "2 more texts were read to their first 4 tokens",
        "given a context (--context) long texts are read whole, in windows",
    ]
    windowed = windower(limit=9, context=5, stride=2)
    assert [len(windowed.cut(text)) for text in ("a a a a a", "a")] == [2, 1]
    assert windowed.notes() == [
        "1 of 2 texts were longer than 5 tokens and read in windows, 2 tokens apart: heads see no "
        "further back than a window"
    ]
    again = windower(limit=9, context=5, stride=2)
    again.texts, again.state = 2, windowed.state
    assert again.notes() == windowed.notes()


def test_real_tokenizer(minilm_dir: Path) -> None:
    # Its file asks for padding to 128 tokens and for truncation there; neither may happen unasked.
    tokenizer = AutoTokenizer.from_pretrained(minilm_dir)
    config = AutoConfig.from_pretrained(minilm_dir)
    made = Windower(tokenizer, limit=max_positions(config, tokenizer))
    assert [len(window.ids) for window in made.cut("the head")] == [4]
    (long,) = made.cut("head " * 700)
    assert len(long.ids) == 512
    assert [long.ids[0], long.ids[-1]] == [tokenizer.cls_token_id, tokenizer.sep_token_id]
    assert "text 2: 702 tokens, the model has 512 positions; read the first 512" in made.notes()


def test_documents_of_their_own() -> None:
    model, tokenizer = llama(), small_tokenizer(pad_token="c")
    text = " ".join("abc"[n * n % 5 % 3] for n in range(100))
    windows = cut_texts(model, [text, "a b"], tokenizer, context=12)
    assert [len(window.ids) for window in windows] == [12] * 10 + [4]
    assert all(window[1:3] == (0, len(window.ids)) for window in windows)
    assert cut_texts(model, text, tokenizer, context=12, tokens=25) == windows[:3]
    # the model has 64 positions
    assert [len(w.ids) for w in cut_texts(model, text, tokenizer)] == [64, 40]
    assert [len(w.ids) for w in cut_texts(model, text, tokenizer, longest=52)] == [52, 52]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"context": 2},
            "context=2 leaves no room for text: this tokenizer adds 2 special tokens; give at least"
            " 3",
        ),
        ({"limit": 2}, "limit=2 leaves no room for text"),
        (
            {"context": 9, "limit": 8},
            "context=9: the model has 8 positions; give at most that many",
        ),
        ({"stride": 3}, "stride=3 is the step between windows of context tokens; give context too"),
        ({"context": 6, "stride": 0}, "stride=0: expected 1 to 4 tokens"),
        ({"context": 6, "stride": 5}, "stride=5: expected 1 to 4 tokens"),
    ],
)
def test_settings_out_of_range(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        windower(**options)
    assert words in str(caught.value)
