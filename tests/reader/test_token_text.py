"""Labels of tokens: text, ids, numbers and padding, for any tokenizer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from multihead.data.token_text import TokenGroup
from multihead.reader.token_text import group_tokens, label_tokens
from tiny_tokenizers import every_kind

IDS, REAL = torch.tensor([4, 7, 0, 0]), torch.tensor([True, True, False, False])


class Strict:
    """Takes ids of its vocabulary alone, as slow and sentencepiece tokenizers do."""

    pad_token, eos_token = "[PAD]", "</s>"

    def decode(self, ids: list[int], **options: Any) -> str:
        if not 0 <= ids[0] < 8:
            raise IndexError("piece id is out of range")
        return f"t{ids[0]}"


def test_padding_is_labelled_as_padding() -> None:
    assert label_tokens(IDS, REAL, range(4), Strict()) == ["t4", "t7", "[PAD]", "[PAD]"]
    assert label_tokens(IDS, REAL, range(4), None) == ["4", "7", "<pad>", "<pad>"]
    assert label_tokens(IDS, REAL.flip(0), [3, 0], None) == ["0", "<pad>"]


@pytest.mark.parametrize("other", ["eos_token", "bos_token", "unk_token", "sep_token"])
def test_a_padding_token_with_another_meaning_is_not_shown_as_that(other: str) -> None:
    tokenizer = Strict()
    setattr(tokenizer, other, "[PAD]")
    assert label_tokens(IDS, REAL, [2], tokenizer) == ["<pad>"]
    assert label_tokens(IDS, REAL, [2], SimpleNamespace(pad_token=None)) == ["<pad>"]


def test_without_ids_positions_are_numbered() -> None:
    assert label_tokens(None, None, [5, 9], Strict()) == ["5", "9"]
    assert label_tokens(None, REAL, [1, 2], Strict()) == ["1", "[PAD]"]
    assert label_tokens(IDS, None, [3, 4], Strict()) == ["t0", "4"]  # of a key beyond the ids


@pytest.mark.parametrize("token", [-200, 8, 10**7])
def test_an_id_that_the_tokenizer_lacks_is_shown_as_a_number(token: int) -> None:
    assert label_tokens(torch.tensor([token]), None, [0], Strict()) == [str(token)]


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "bytes"])
def test_pieces_of_a_character_are_labelled_by_it(kind: str) -> None:
    tokenizer = every_kind()[kind]
    ids = torch.tensor(tokenizer("a😀")["input_ids"])
    labels = label_tokens(ids, None, range(len(ids)), tokenizer)
    assert [label for label in labels if label[0] == "😀"] == [
        "😀 1/4",
        "😀 2/4",
        "😀 3/4",
        "😀 4/4",
    ]
    assert label_tokens(ids, None, [len(ids) - 1], tokenizer) == labels[-1:]


def test_rows_that_the_model_added_are_no_ids() -> None:
    assert label_tokens(torch.tensor([-1, 4]), None, range(2), Strict()) == ["<virtual>", "t4"]
    assert label_tokens(torch.tensor([-1, 4]), None, range(2), None) == ["<virtual>", "4"]


def test_positions_without_ids_or_tokenizer_are_words_by_themselves() -> None:
    for ids, tokenizer, words in (
        (None, Strict(), ["0", "1", "[PAD]"]),
        (torch.tensor([4, 7, 0]), None, ["4", "7", "<pad>"]),
    ):
        groups = group_tokens(ids, torch.tensor([True, True, False]), 3, tokenizer)
        assert groups == [TokenGroup(n, n + 1, text) for n, text in enumerate(words)]
