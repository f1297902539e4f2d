"""Which rows are text: a padding mask and ids speak of the rows that they were given for, and of no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention

import multihead
from multihead.operator.masks import IntervalMask, causal
from multihead.reader.check import ReadingError, compare
from multihead.reader.rows import readable
from small import IDS, llama

PADDED = (torch.arange(12) >= torch.tensor([[0], [3]])).long()  # the second text begins three later


class Beside(nn.Module):
    """A text model, and beside it an attention over rows of its own, fewer than the words or of another batch."""

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


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("length", [5, 15])
def test_other_rows_have_no_part_in_the_texts_padding(batch: int, length: int) -> None:
    model = Beside(torch.randn(batch, length, 24, generator=torch.Generator().manual_seed(0))).eval()
    with multihead.reading(model) as reading, torch.no_grad():
        model(IDS, attention_mask=PADDED)
    table = reading.table()
    rows = dict(zip([row["head"] for row in table.rows()], table.count("entropy"), strict=True))
    counted = {row["site"]: table.count("entropy")[n] for n, row in enumerate(table.rows())}
    assert counted["text.layers.0.self_attn"] == 21, rows
    assert counted["pooled"] == batch * length, "every row of its own"
    assert next(row for row in table.rows() if row["site"] == "pooled")["duplicate"] is None, "the words aren't its own"


class Remasked(nn.Module):
    """Hands its text model a mask of its own making, as Grounding DINO does."""

    def __init__(self) -> None:
        super().__init__()
        self.text = llama().model
        self.config = self.text.config

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        may = torch.ones(12, 12, dtype=torch.bool).tril() & attention_mask[:, None, None].bool()
        return self.text(input_ids, attention_mask=may | torch.eye(12, dtype=torch.bool)).last_hidden_state


def test_a_mask_of_the_wholes_making_leaves_padding_padding() -> None:
    model = Remasked().eval()
    with multihead.reading(model) as reading, torch.no_grad():
        model(IDS, attention_mask=PADDED)
    table = reading.table()
    assert set(table.count("entropy")) == {21} and table.rows()[0]["duplicate"] is not None


@pytest.mark.parametrize(("mask", "want"), [
    (None, [[1, 1, 1, 1, 1]] * 2),
    (causal(), [[1, 1, 1, 0, 0]] * 2),
    (torch.tensor([[[[0, 0, 1, 1, 0]]], [[[1, 0, 1, 0, 0]]]]).bool(), [[0, 0, 1, 1, 0], [1, 0, 1, 0, 0]]),
])
def test_keys_that_no_row_may_read_are_padding(mask: IntervalMask | Tensor | None, want: list[list[int]]) -> None:
    from multihead.models.interface import Call

    q, k = torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 5, 4)
    assert readable(Call(q, k, k, mask, None, 1.0, None, None, 0.0)).int().tolist() == want


def test_a_score_that_says_never_is_equal_to_itself() -> None:
    a = torch.tensor([1.0, -torch.inf, 2.0])
    compare(a, a.clone(), "equal")
    for other in ([1.0, 3.0, 2.0], [1.0, torch.inf, 2.0], [1.0, -torch.inf, 2.1], [1.0, torch.nan, 2.0]):
        with pytest.raises(ReadingError):
            compare(a, torch.tensor(other), "another")
