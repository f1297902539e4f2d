"""Texts in units: whole documents of like length, bounded memory, the same after a skip."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from data.test_tokenizing import small_tokenizer
from families import FAMILIES, model_of
from multihead.data.batching import (
    ReadyBatches,
    TextBatches,
    first_batch,
    plan_batches,
    window_batches,
)
from multihead.data.windows import Windower
from small import llama


def plan(texts: Any, context: int | None = None, **options: Any) -> TextBatches:
    return TextBatches(texts, Windower(small_tokenizer(pad_token="c"), context=context), **options)


def test_units_hold_whole_documents_of_like_length() -> None:
    lengths = [1, 9, 2, 30, 3, 1, 8, 2, 2, 1]
    made = plan(("a " * n for n in lengths), context=7, batch_size=2, chunk=4)  # 5 words a window
    chunks = list(made.chunks())
    assert [sum(unit.documents for unit in chunk) for chunk in chunks] == [
        4,
        6,
    ]  # 1 + 2 + 1 + 6 rows: four batches
    assert made.taken == len(lengths) and made.windower.windowed == 3 and made.ended
    two, long, _ = chunks[0]
    assert long.documents == 1 and [len(one.document) for one in long.batches] == [2, 2, 2]
    assert [one.document.tolist() for one in two.batches] == [[0, 0]]
    assert [sum(len(one.document) for one in unit.batches) for unit in chunks[0]] == [2, 6, 2]
    for chunk in chunks:
        sizes = [unit.batches[0].inputs["input_ids"].shape[1] for unit in chunk]
        assert sizes == sorted(sizes, reverse=True)
    counted = sum(one.tokens for chunk in chunks for unit in chunk for one in unit.batches)
    assert counted == sum(lengths) + 2 * len(lengths)


def test_no_more_than_a_chunk_is_taken_ahead() -> None:
    taken = []
    chunks = plan((taken.append(n) or "a" for n in range(10**9)), batch_size=3, chunk=2).chunks()
    for so_far in (6, 12, 18):
        next(chunks)
        assert len(taken) == so_far


def test_the_same_from_wherever_it_begins() -> None:
    texts = ["a " * n for n in (3, 1, 2, 5, 2, 2, 7)]
    whole, later = plan(texts, batch_size=2, chunk=2), plan(texts, batch_size=2, chunk=2)
    _, *want = whole.chunks()
    later.skip(4)
    got = list(later.chunks())
    for a, b in zip(want, got, strict=True):
        for one, other in zip(a, b, strict=True):
            assert torch.equal(
                one.batches[0].inputs["input_ids"], other.batches[0].inputs["input_ids"]
            )
    assert (later.taken, later.digest) == (whole.taken, whole.digest) and whole.digest != plan(
        texts
    ).digest


def test_padding_on_the_left() -> None:
    ((unit,),) = plan(["a b", "b"], left=True).chunks()
    assert unit.batches[0].inputs["input_ids"].tolist() == [[0, 2, 3, 1], [4, 0, 3, 1]]
    assert unit.batches[0].inputs["attention_mask"].tolist() == [[1, 1, 1, 1], [0, 1, 1, 1]]


def test_texts_of_one_length_go_together_on_request() -> None:
    (chunk,) = plan(["a", "a b", "b", "b a", "c", "a b c"], same_length=True, batch_size=2).chunks()
    assert [unit.batches[0].inputs["input_ids"].shape for unit in chunk] == [
        (1, 5),
        (2, 4),
        (2, 3),
        (1, 3),
    ]
    assert all(unit.batches[0].inputs["attention_mask"].all() for unit in chunk)


def test_an_empty_text_on_the_way_is_named() -> None:
    with pytest.raises(ValueError, match=r"texts\[1\]=' ' is empty"):
        list(plan(iter(["a", " "])).chunks())
    with pytest.raises(TypeError, match=r"texts\[1\] is a int: expected a text"):
        list(plan(iter(["a", 5])).chunks())


def test_a_skipped_text_has_its_number() -> None:
    later = plan(iter(["a", "b", " "]))
    later.skip(2)
    with pytest.raises(ValueError, match=r"texts\[2\]=' ' is empty"):
        list(later.chunks())
    with pytest.raises(ValueError, match="batch_size=0: expected at least 1"):
        plan(["a"], batch_size=0)


def test_ready_made_batches_are_units_of_their_own() -> None:
    batches = [{"input_ids": torch.ones(2, 3)}, {"input_ids": torch.ones(1, 3)}]
    made = plan_batches(llama(), batches, None)
    assert isinstance(made, ReadyBatches) and made.ended
    ((one, two),) = made.chunks()
    assert one.batches[0].inputs == batches[0] and two.batches[0].document is None
    made = plan_batches(llama(), iter(batches), None)
    assert not made.ended and [len(chunk) for chunk in made.chunks()] == [1, 1]
    with pytest.raises(TypeError, match=r"texts\[1\] is a str: expected a list of strings"):
        list(plan_batches(llama(), [batches[0], "a"], None).chunks())
    with pytest.raises(ValueError, match="context=4 is for texts; ready-made inputs are read"):
        plan_batches(llama(), batches, None, context=4)


def test_texts_to_be_continued_are_padded_on_the_left_and_leave_room() -> None:
    made = plan_batches(llama(), ["a " * 70, "b"], small_tokenizer(pad_token="c"), new_tokens=10)
    ((unit,),) = made.chunks()
    assert unit.batches[0].inputs["attention_mask"].sum(1).tolist() == [54, 3]
    assert not unit.batches[0].inputs["attention_mask"][1, :51].any()
    with pytest.raises(ValueError, match="max_new_tokens=63 leaves no room for a text"):
        plan_batches(llama(), ["a"], small_tokenizer(), new_tokens=63)


@pytest.mark.parametrize(
    ("texts", "tokenizer", "error", "words"),
    [
        ([], "small", ValueError, r"texts=\[\] is empty"),
        (3, "small", TypeError, "texts is a int: expected a string"),
        (["a"], None, ValueError, "texts are strings but tokenizer is None"),
        (["a"], "gpt2", TypeError, "tokenizer='gpt2' is a str: expected a tokenizer"),
    ],
)
def test_texts_that_cannot_be_read(texts: Any, tokenizer: Any, error: Any, words: str) -> None:
    tokenizer = small_tokenizer() if tokenizer == "small" else tokenizer
    with pytest.raises(error, match=words):
        plan_batches(llama(), texts, tokenizer)


def test_the_first_batch_is_what_the_model_is_called_with() -> None:
    tokenizer = small_tokenizer(pad_token="c")
    inputs, number = first_batch(llama(), ["a b", "c"], tokenizer)
    assert number == 2
    assert {name: x.tolist() for name, x in inputs.items()} == {
        "input_ids": [[0, 2, 3, 1]],
        "attention_mask": [[1, 1, 1, 1]],
    }
    t5 = model_of(next(family for family in FAMILIES if family.name == "t5"))
    inputs, _ = first_batch(t5, "a b", tokenizer)
    assert inputs["decoder_input_ids"][0, 1:].tolist() == [0, 2, 3]
    ready = {"input_ids": torch.ones(1, 2)}
    assert first_batch(t5, ready) == (ready, 1)


def test_windows_one_by_one() -> None:
    made = window_batches(llama(), ["a " * 9, "b"], small_tokenizer(), context=8)
    assert [batch.tokens for batch in made] == [8, 5, 3]
    ready = {"input_ids": torch.ones(1, 2)}
    assert [batch.inputs for batch in window_batches(llama(), [ready], None, context=8)] == [ready]
