"""Any amount of text: windows against one document at a time, streams, and where a reading can be
stopped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import multihead
from multihead.data.windows import cut_windows
from multihead.reader.table import Table

TEXT = " ".join(["the cat and the dog and the hat of a man"] * 9)
SHORT = ["It is a truth universally acknowledged.", "The cat and the cat.", "a b c d a b c d"]


@pytest.fixture(scope="module")
def builtin() -> Any:
    return multihead.load_builtin()


def sums_of(model: Any, ids: list[int], first: int = 0) -> Table:
    """The rows of a text from number `first` on, of a causal model: those of all less those of the
    beginning.
    """
    whole = multihead.read(
        model, [{"input_ids": torch.tensor([ids])}], probe=False, special_ids={0, 1}
    )
    if first:
        head = multihead.read(
            model, [{"input_ids": torch.tensor([ids[:first]])}], probe=False, special_ids={0, 1}
        )
        for column, sums in head.sums.items():
            whole.sums[column] = whole.sums[column] - sums
    return whole


@pytest.mark.parametrize(("stride", "batch_size"), [(None, 4), (11, 4), (11, 1), (6, 3)])
def test_windows_are_what_reading_each_by_itself_gives(
    builtin: Any, stride: int | None, batch_size: int
) -> None:
    """Rows, values, and errors over documents, however windows fall into batches."""
    model, tokenizer = builtin
    texts = [TEXT, *SHORT, TEXT[:150]]
    table = multihead.read(
        model,
        texts,
        tokenizer=tokenizer,
        context=24,
        stride=stride,
        batch_size=batch_size,
        probe=False,
    )
    documents = []
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        rows = cut_windows(ids, 1, 0, 24, stride or 23)
        documents.append([sums_of(model, row, first) for row, first, *_ in rows])
        assert sum(t.count("norm")[0] for t in documents[-1]) == len(ids)
    assert len(documents[0]) > 4 and table.meta["documents"] == len(texts)
    assert table.meta["tokens"] == sum(len(tokenizer(text)["input_ids"]) for text in texts)
    assert any("read in windows" in note for note in table.meta["notes"])
    want = Table(table.heads)
    for column in (
        c for c in table.columns if c != "logit"
    ):  # of which the last row of what came before has none
        for parts in documents:
            x, y, rows = sum(part._column(column) for part in parts)[:, :3].T
            want.add(column, 0, x=x, y=y, rows=rows)
        assert table.count(column).tolist() == want.count(column).tolist(), column
        assert table.value(column) == pytest.approx(
            want.value(column), rel=2e-4, abs=2e-5, nan_ok=True
        ), column
        assert table.error(column) == pytest.approx(
            want.error(column), rel=2e-2, abs=1e-4, nan_ok=True
        ), column


def test_encoders_have_their_special_tokens_around_each_window(minilm_dir: Any) -> None:
    import transformers as tf

    model, tokenizer = (
        tf.AutoModel.from_pretrained(minilm_dir),
        tf.AutoTokenizer.from_pretrained(minilm_dir),
    )
    table = multihead.read(model, [TEXT], tokenizer=tokenizer, context=32, stride=10)
    length = len(tokenizer(TEXT, verbose=False)["input_ids"])
    assert (
        table.meta["tokens"] == length
        and set(table.count("norm")) == {length}
        and set(table.count("special")) == {length}
    )


def test_a_generator_is_read_as_its_list_is(builtin: Any) -> None:
    model, tokenizer = builtin
    want = multihead.read(model, SHORT, tokenizer=tokenizer, batch_size=2)
    got = multihead.read(model, (text for text in SHORT), tokenizer=tokenizer, batch_size=2)
    assert got.meta == want.meta and all((got.sums[c] == want.sums[c]).all() for c in want.sums)


def test_texts_are_taken_as_they_are_needed(builtin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multihead.data.batching.CHUNK", 2)
    model, tokenizer = builtin
    taken = 0

    def endless() -> Iterator[str]:
        nonlocal taken
        while True:
            taken += 1
            yield "the cat and the dog"

    table = multihead.read(
        model, endless(), tokenizer=tokenizer, batch_size=3, stop=lambda: taken > 20
    )
    assert taken == 24 and table.meta["documents"] == 18 and "stopped" in table.meta["partial"]
    assert table.count("probe:induction").all()


def test_stopped_within_a_long_text_keeps_what_was_read_of_it(builtin: Any) -> None:
    model, tokenizer = builtin
    asked = iter([False, False, False, True])
    table = multihead.read(
        model, TEXT, tokenizer=tokenizer, context=24, batch_size=1, stop=lambda: next(asked)
    )
    assert (
        table.meta["tokens"] == 24 + 23 + 23
        and table.meta["documents"] == 1
        and "partial" in table.meta
    )
    assert np.isnan(table.error("entropy")).all()
    nothing = multihead.read(model, TEXT, tokenizer=tokenizer, stop=lambda: True)
    assert nothing.meta["documents"] == 0 and str(nothing)


def test_windows_of_texts_on_both_sides() -> None:
    import transformers as tf

    from data.test_tokenizing import small_tokenizer
    from families import FAMILIES, model_of

    model = model_of(next(f for f in FAMILIES if f.name == "t5"))
    table = multihead.read(
        model, ["a b c " * 5], tokenizer=small_tokenizer(pad_token="c"), context=8, stride=3
    )
    assert isinstance(model, tf.PreTrainedModel)
    assert table.count("norm").tolist() == [17] * len(table.heads) and table.meta["documents"] == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context": 1000}, "context=1,000: the model has 512 positions"),
        ({"stride": 5}, "stride=5"),
        ({"generate": 4, "context": 30}, "context=30, stride=None with generate"),
    ],
)
def test_words(builtin: Any, options: dict[str, Any], words: str) -> None:
    model, tokenizer = builtin
    with pytest.raises(ValueError) as caught:
        multihead.read(model, SHORT, tokenizer=tokenizer, **options)
    assert words in str(caught.value)
    with pytest.raises(ValueError, match=r"is for texts; ready-made inputs are read as they are"):
        multihead.read(model, [{"input_ids": torch.tensor([[5, 6]])}], **options)
