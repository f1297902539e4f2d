"""Padding masks and token ids apply to the stack that they were given to, and to no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention

import multihead
from families import FAMILIES, model_of
from multihead.models.foreign import find_readable_keys
from multihead.ops.call import AttentionCall
from multihead.ops.masks import IntervalMask, causal
from multihead.reader.session import Reading
from multihead.reader.tokens import StackInputs
from small import IDS, llama

PADDED = (torch.arange(12) >= torch.tensor([[0], [3]])).long()  # the second text begins three later


class Beside(nn.Module):
    """A text model, and beside it an attention over rows of its own, fewer than the words or of
    another batch.
    """

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.text = llama().model
        self.config = self.text.config
        self.pooled = LlamaAttention(self.config, 0)
        self.rows = rows

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        read = self.text(input_ids, attention_mask=attention_mask).last_hidden_state
        places = self.text.rotary_emb(self.rows, torch.arange(self.rows.shape[1])[None])
        return read, self.pooled(self.rows, places, None)[0]


@pytest.mark.parametrize(("batch", "length"), [(1, 5), (2, 5), (5, 5), (2, 15), (1, 12), (5, 12)])
def test_other_queries_are_not_padded_by_the_texts_mask(batch: int, length: int) -> None:
    model = Beside(
        torch.randn(batch, length, 24, generator=torch.Generator().manual_seed(0))
    ).eval()
    with multihead.reading(model) as reading, torch.no_grad():
        model(IDS, attention_mask=PADDED)
    table = reading.table()
    rows = dict(zip([row["head"] for row in table.rows()], table.count("entropy"), strict=True))
    counted = {row["site"]: table.count("entropy")[n] for n, row in enumerate(table.rows())}
    assert counted["text.layers.0.self_attn"] == 21, rows
    assert counted["pooled"] == batch * length, "every row of its own"
    assert next(row for row in table.rows() if row["site"] == "pooled")["duplicate"] is None, (
        "the words aren't its own"
    )


class Remasked(nn.Module):
    """Hands its text model a mask of its own making, as Grounding DINO does."""

    def __init__(self) -> None:
        super().__init__()
        self.text = llama().model
        self.config = self.text.config

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        may = torch.ones(12, 12, dtype=torch.bool).tril() & attention_mask[:, None, None].bool()
        return self.text(
            input_ids, attention_mask=may | torch.eye(12, dtype=torch.bool)
        ).last_hidden_state


def test_a_mask_made_by_the_whole_model_keeps_padding() -> None:
    model = Remasked().eval()
    with multihead.reading(model) as reading, torch.no_grad():
        model(IDS, attention_mask=PADDED)
    table = reading.table()
    assert set(table.count("entropy")) == {21} and table.rows()[0]["duplicate"] is not None


@pytest.mark.parametrize(
    ("mask", "want"),
    [
        (None, [[1, 1, 1, 1, 1]] * 2),
        (causal(), [[1, 1, 1, 0, 0]] * 2),
        (
            torch.tensor([[[[0, 0, 1, 1, 0]]], [[[1, 0, 1, 0, 0]]]]).bool(),
            [[0, 0, 1, 1, 0], [1, 0, 1, 0, 0]],
        ),
    ],
)
def test_keys_that_no_query_may_read_are_padding(
    mask: IntervalMask | Tensor | None, want: list[list[int]]
) -> None:

    q, k = torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 5, 4)
    assert find_readable_keys(AttentionCall.lower(q, k, k, mask)).int().tolist() == want


@pytest.mark.filterwarnings(
    "ignore:.past_key_values. is deprecated"
)  # the name that older transformers know
@pytest.mark.parametrize("padded", [False, True])
def test_an_encoder_that_runs_at_every_step_is_not_in_the_decoders_cache(padded: bool) -> None:
    model = model_of(next(family for family in FAMILIES if family.name == "t5"))
    words = torch.randint(6, 12, (2, 7), generator=torch.Generator().manual_seed(1))
    padding = torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1]]) if padded else None
    tables = []
    for steps in ([slice(0, 5)], [slice(0, 3), slice(3, 4), slice(4, 5)]):
        cache = tf.EncoderDecoderCache(tf.DynamicCache(), tf.DynamicCache())
        with multihead.reading(model, special_ids={6}) as reading, torch.no_grad():
            for step in steps:
                model(
                    input_ids=words,
                    attention_mask=padding,
                    decoder_input_ids=words[:, step],
                    past_key_values=cache,
                    use_cache=True,
                )
        tables.append(reading.table())
    once, again = tables
    for n, row in enumerate(once.rows()):
        for column in (
            "entropy",
            "first",
            "special",
            "duplicate",
            "induction",
            "contribution:first",
        ):
            if row["kind"] == "self":
                assert again.rows()[n][column] == pytest.approx(row[column], abs=1e-5), (
                    row["head"],
                    column,
                )
                assert again.count(column)[n] == once.count(column)[n] * (
                    3 if "encoder." in row["head"] else 1
                )


def test_ids_of_several_channels_are_no_tokens() -> None:
    """Dia's decoder has nine tokens at each position, and goes on from a cache."""
    inputs = StackInputs(torch.zeros(2, 1, 9, dtype=torch.long), past=4)
    found, reason = Reading(llama()).tokens._key_ids(inputs)
    assert found is None and reason == "its token ids aren't one a position"
