"""Documents as passes: windows in which each token counts once, whole documents in a unit, and
words for what can't be.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.test_texts import small_tokenizer
from multihead.data import windows as module
from multihead.data.windows import Plan, windows


@given(st.integers(1, 40), st.integers(0, 2), st.integers(0, 2), st.integers(1, 12), st.data())
def test_every_token_counts_once_and_in_the_first_window_that_holds_it(
    words: int, before: int, after: int, room: int, data: st.DataObject
) -> None:
    context = before + after + room
    stride = data.draw(st.integers(1, room))
    ids = list(range(before + words + after))
    found = windows(ids, before, after, context, stride)
    counted = [row[i] for row, first, last in found for i in range(first, last)]
    assert counted == ids
    for number, (row, _, _) in enumerate(found):
        assert len(row) <= context
        body = row[before : len(row) - after]
        assert row[:before] == ids[:before] and row[len(row) - after :] == ids[len(ids) - after :]
        assert body[0] == before + number * stride or len(found) == 1
        assert body == list(range(body[0], body[0] + len(body)))
    assert all(len(row) == context for row, *_ in found[:-1])


def plan(texts: Any, **options: Any) -> Plan:
    return Plan(texts, small_tokenizer(pad_token="c"), **options)


def test_units_hold_whole_documents_of_like_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 4)  # rows of four batches
    lengths = [1, 9, 2, 30, 3, 1, 8, 2, 2, 1]
    made = plan(("a " * n for n in lengths), context=7, batch_size=2)  # 5 words a window
    chunks = list(made.chunks())
    assert [sum(unit.documents for unit in chunk) for chunk in chunks] == [
        4,
        6,
    ]  # 1 + 2 + 1 + 6 rows: four batches
    assert made.taken == len(lengths) and made.windowed == 3 and made.ended
    two, long, _ = chunks[0]
    assert long.documents == 1 and [len(one.document_of or ()) for one in long.passes] == [2, 2, 2]
    assert [one.document_of for one in two.passes] == [[0, 0]]
    assert [sum(len(one.document_of or ()) for one in unit.passes) for unit in chunks[0]] == [
        2,
        6,
        2,
    ]
    for chunk in chunks:
        sizes = [unit.passes[0].inputs["input_ids"].shape[1] for unit in chunk]
        assert sizes == sorted(sizes, reverse=True)
    counted = sum(
        int((one.inputs["attention_mask"].bool() if one.counts is None else one.counts).sum())
        for chunk in chunks
        for unit in chunk
        for one in unit.passes
    )
    assert counted == sum(lengths) + 2 * len(lengths)


def test_no_more_than_a_chunk_is_taken_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 2)
    taken = []
    chunks = plan((taken.append(n) or "a" for n in range(10**9)), batch_size=3).chunks()
    for so_far in (6, 12, 18):
        next(chunks)
        assert len(taken) == so_far


def test_the_same_from_wherever_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 2)
    texts = ["a " * n for n in (3, 1, 2, 5, 2, 2, 7)]
    whole, later = plan(texts, batch_size=2), plan(texts, batch_size=2)
    _, *want = whole.chunks()
    later.skip(4)
    got = list(later.chunks())
    for a, b in zip(want, got, strict=True):
        for one, other in zip(a, b, strict=True):
            assert torch.equal(
                one.passes[0].inputs["input_ids"], other.passes[0].inputs["input_ids"]
            )
    assert (later.taken, later.digest) == (whole.taken, whole.digest) and whole.digest != plan(
        texts
    ).digest


def test_padding_on_the_left() -> None:
    ((unit,),) = plan(["a b", "b"], left=True).chunks()
    assert unit.passes[0].inputs["input_ids"].tolist() == [[0, 2, 3, 1], [4, 0, 3, 1]]
    assert unit.passes[0].inputs["attention_mask"].tolist() == [[1, 1, 1, 1], [0, 1, 1, 1]]


def test_texts_of_one_length_go_together_on_request() -> None:
    (chunk,) = plan(["a", "a b", "b", "b a", "c", "a b c"], alike=True, batch_size=2).chunks()
    assert [unit.passes[0].inputs["input_ids"].shape for unit in chunk] == [
        (1, 5),
        (2, 4),
        (2, 3),
        (1, 3),
    ]
    assert all(unit.passes[0].inputs["attention_mask"].all() for unit in chunk)


def test_what_was_cut_is_told_shortly() -> None:
    made = plan(["a a a a a"] * 5 + ["a"], limit=4)
    list(made.chunks())
    assert made.notes() == [
        *(f"text {n}: 7 tokens, the model has 4 positions; read the first 4" for n in (1, 2, 3)),
        "2 more texts were read to their first 4 tokens",
        "given a context (--context) long texts are read whole, in windows",
    ]
    windowed = plan(["a a a a a", "a"], limit=9, context=5, stride=2)
    list(windowed.chunks())
    assert windowed.notes() == [
        "1 of 2 texts were longer than 5 tokens and read in windows, 2 tokens apart: heads see no "
        "further back than a window"
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"context": 2},
            (
                "context=2 leaves no room for text: this tokenizer adds 2 special tokens; give at"
                " least 3"
            ),
        ),
        (
            {"context": 9, "limit": 8},
            "context=9: the model has 8 positions; give at most that many",
        ),
        (
            {"stride": 3},
            "stride=3: is the step between windows of context tokens; give context too",
        ),
        ({"context": 6, "stride": 0}, "stride=0: expected 1 to 4 tokens"),
        ({"context": 6, "stride": 5}, "stride=5: expected 1 to 4 tokens"),
        ({"batch_size": 0}, "batch_size=0: expected at least 1"),
    ],
)
def test_words(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        plan(["a"], **options)
    assert words in str(caught.value)


def test_an_empty_text_on_the_way_is_named() -> None:
    with pytest.raises(ValueError, match=r"texts\[1\]=' ' is empty"):
        list(plan(iter(["a", " "])).chunks())
    with pytest.raises(TypeError, match=r"texts\[1\] is a int: expected a text"):
        list(plan(iter(["a", 5])).chunks())
