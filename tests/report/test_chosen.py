"""The maps that a page holds: of every head for a short text, of the first heads for a longer one."""

from __future__ import annotations

from typing import Any

import pytest

import multihead
from multihead.report.chosen import CHOSEN, EVERY_HEAD, WINDOW, chosen_maps


@pytest.mark.parametrize(("words", "heads", "rows"), [(10, 32, None), (200, 32, WINDOW)])
def test_long_texts_have_a_window(words: int, heads: int, rows: Any) -> None:
    model, tokenizer = multihead.load_builtin()
    text = "the cat and the dog " * (words // 5)
    table = multihead.read(model, text, tokenizer=tokenizer, probe=False)
    maps, notes = chosen_maps(model, text, table, tokenizer)
    assert len(maps) == min(heads, CHOSEN)
    length = len(tokenizer(text)["input_ids"])
    assert (length <= EVERY_HEAD) == (rows is None)
    assert all(one.weights.shape[0] == (rows or length) for one in maps)
    assert (rows is None) == (notes == [])
    if notes:
        assert f"the first {rows} of {length:,} tokens" in notes[0]
