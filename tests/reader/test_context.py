"""What a statistic is shown of a pass: which tokens queries and keys are, and blocks of weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import multihead
from multihead.reader import QueryBlock, TokenContext


class Recorder(multihead.Statistic):
    """Keeps what it was shown; its own numbers don't matter."""

    name, formula, meaning = "recorder", "1", "is shown everything"

    def __init__(self) -> None:
        self.blocks: list[QueryBlock] = []

    def rows(self, block: QueryBlock) -> Tensor:
        self.blocks.append(block._replace(weights=block.weights.clone()))
        return block.weights.sum(-1)


@pytest.fixture(scope="module", params=["right", "left"])
def seen(request: pytest.FixtureRequest) -> tuple[dict[str, Any], list[QueryBlock]]:
    """The inputs of two sequences padded on one side, and the blocks of the first site."""
    model, tokenizer = multihead.load_builtin()
    tokenizer.padding_side = request.param
    inputs = dict(tokenizer(["the cat sat on the mat", "a dog"], padding=True, return_tensors="pt"))
    recorder = Recorder()
    multihead.read(model, [inputs], statistics=recorder, probe=False)
    return inputs, recorder.blocks[
        : len(recorder.blocks) // len(multihead.models.find_sites(model))
    ]


def test_token_ids_of_queries_and_keys(seen: tuple[dict[str, Any], list[QueryBlock]]) -> None:
    inputs, blocks = seen
    context: TokenContext = blocks[0].context
    valid, ids = inputs["attention_mask"].bool(), inputs["input_ids"]
    assert context.offset == 0
    assert not context.continues
    assert context.query_ids is not None
    assert context.key_ids is not None
    assert context.previous_ids is not None
    torch.testing.assert_close(context.query_valid, valid, msg="queries that count")
    torch.testing.assert_close(context.key_valid, valid, msg="keys that are tokens")
    torch.testing.assert_close(context.key_ids, ids.masked_fill(~valid, -1), msg="ids of keys")
    assert bool((context.query_ids[~valid] < 0).all()), "padding has an id"
    torch.testing.assert_close(context.query_ids[valid], ids[valid], msg="ids of queries")
    before = torch.nn.functional.pad(context.key_ids, (1, 0), value=-1)[:, :-1]
    torch.testing.assert_close(
        context.previous_ids[valid], before[valid], msg="ids of the tokens before"
    )
    torch.testing.assert_close(context.first_key, valid.int().argmax(-1), msg="first keys")


def test_blocks_hold_the_weights_of_all_queries_in_order(
    seen: tuple[dict[str, Any], list[QueryBlock]],
) -> None:
    inputs, blocks = seen
    length = inputs["input_ids"].shape[1]
    assert [block.rows.start for block in blocks] == [0, *(b.rows.stop for b in blocks[:-1])]
    assert blocks[-1].rows.stop == length
    valid = inputs["attention_mask"].bool()
    for block in blocks:
        sums = block.weights.sum(-1)[valid[:, None, block.rows].expand(*block.weights.shape[:3])]
        torch.testing.assert_close(sums, torch.ones_like(sums), msg="weights of a query sum to 1")
        if block.allowed is not None:
            forbidden = block.weights.masked_select(~block.allowed)
            torch.testing.assert_close(forbidden, torch.zeros_like(forbidden), msg="forbidden keys")
