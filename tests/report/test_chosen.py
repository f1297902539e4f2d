"""The maps that a page holds: of every head for a short text, of the first heads for a longer one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import multihead
from families import FAMILIES, WORDS, model_of
from multihead.report import chosen
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


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "bert"])
def test_maps_of_the_first_tokens_are_those_of_the_whole_text(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(next(f for f in FAMILIES if f.name == family))
    monkeypatch.setattr(chosen, "EVERY_HEAD", 8)
    monkeypatch.setattr(chosen, "WINDOW", 12)
    ids = torch.randint(3, WORDS, (1, 30), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    lengths: list[int] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        lengths.append(kwargs["input_ids"].shape[1])

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    table = multihead.read(model, inputs, probe=False)
    lengths.clear()
    maps, _ = chosen_maps(model, inputs, table)
    hook.remove()
    # a bidirectional model's first tokens read later ones
    assert max(lengths) == (30 if family == "bert" else 12)
    labels = [one.head for one in maps]
    for one, whole in zip(maps, multihead.read_maps(model, inputs, labels), strict=True):
        assert one.weights.shape == (12, 12)
        np.testing.assert_allclose(one.weights, whole.weights[:12, :12], atol=1e-5)
        assert one.contributions is not None and whole.contributions is not None
        np.testing.assert_allclose(
            one.contributions, whole.contributions[:12, :12], rtol=1e-3, atol=1e-4
        )


def test_angles_that_depend_on_the_length() -> None:
    model = model_of(next(f for f in FAMILIES if f.name == "llama"))
    before = model.config.rope_parameters
    assert not chosen._angles_vary(model)
    model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0}
    assert chosen._angles_vary(model)
    model.config.rope_parameters = before
