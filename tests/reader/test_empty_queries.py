"""Queries that may read nothing: which ones count, and which positions are padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as tf

import multihead
from multihead.models.site import find_sites
from multihead.ops.call import AttentionCall, CallContext
from multihead.reader.empty_queries import PADDING, EmptyQueries
from small import llama


def call_of(may: torch.Tensor) -> Any:
    q = torch.randn(1, 3, may.shape[-2], 8)
    k = torch.randn(1, 3, may.shape[-1], 8)
    empty = ~may.any(-1)
    return AttentionCall.lower(q, k, k, may)._replace(
        context=CallContext(empty=empty[None, None] if bool(empty.any()) else None)
    )


def test_padding_counts_nowhere_and_what_is_read_is_a_token() -> None:
    site, other = find_sites(llama())
    found = EmptyQueries()
    may = torch.ones(5, 5, dtype=torch.bool).tril()
    real = torch.ones(1, 5, dtype=torch.bool)
    assert found.leave_out(site, call_of(may), 0, real, None) == (real, None)
    may[:2] = False
    counts, mask = found.leave_out(site, call_of(may), 0, real, None)
    assert counts.tolist() == [[False, False, True, True, True]] == (~found.at[site.name]).tolist()
    assert mask is not None and bool(mask.all())  # later queries read both
    may[:, 0] = False
    _, mask = found.leave_out(site, call_of(may), 0, real, None)
    assert mask is not None and mask.tolist() == [[False, True, True, True, True]]
    # where they read another sequence, padding is no query either
    across = call_of(torch.ones(5, 7, dtype=torch.bool))
    counts, mask = found.leave_out(other, across, None, real, None)
    assert counts.tolist() == [[False, True, True, True, True]] and mask is None
    assert other.name not in found.at
    found.clear()
    assert not found.at and found.leave_out(other, across, None, real, None) == (real, None)


@pytest.mark.parametrize("pieces", [(6,), (3, 3), (1, 5), (2, 4), (4, 1, 1), (1,) * 6], ids=str)
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_padding_stays_padding_in_the_pieces_that_follow(
    pieces: tuple[int, ...], heads: int, static: bool
) -> None:
    """The masks of later pieces don't show which of the earlier keys were padding."""
    model, low = llama(), torch.finfo(torch.float32).min
    ids = torch.tensor([[1, 5, 9, 7, 5, 9], [9, 5, 7, 9, 5, 1]])
    real = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    places = (real.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad(), multihead.reading(model) as whole:
        model(ids, attention_mask=real, position_ids=places)
    may = torch.ones(6, 6, dtype=torch.bool).tril() & real[:, None].bool() & real[..., None].bool()
    mask = torch.zeros(2, 6, 10).masked_fill(~F.pad(may, (0, 4)), low)[:, None]
    cache = tf.DynamicCache(config=model.config)
    if static:
        cache = tf.StaticCache(config=model.config, max_cache_len=10)
    start = 0
    with torch.no_grad(), multihead.reading(model) as reading:
        for length in pieces:
            rows = slice(start, start := start + length)
            keys = 10 if static else start
            model(
                ids[:, rows],
                attention_mask=mask[:, :, rows, :keys].expand(-1, heads, -1, -1),
                position_ids=places[:, rows],
                past_key_values=cache,
            )
    got, want = reading.table(), whole.table()
    for column in want.columns:
        np.testing.assert_array_equal(got.count(column), want.count(column), err_msg=column)
        np.testing.assert_allclose(
            got.value(column), want.value(column), rtol=1e-4, atol=1e-5, err_msg=column
        )


def test_padding_is_marked_in_the_ids_of_its_own_stack() -> None:
    site, other = find_sites(llama())
    found, ids = EmptyQueries(), torch.arange(7)[None]
    assert found.mark_padding(ids, [site, other]) is ids
    may = torch.ones(5, 5, dtype=torch.bool).tril()
    may[:2] = may[:, :2] = False
    found.leave_out(site, call_of(may), 0, torch.ones(1, 5, dtype=torch.bool), None)
    assert found.mark_padding(ids, [site]).tolist() == [[0, 1, PADDING, PADDING, 4, 5, 6]]
    assert found.mark_padding(ids, []) is ids and found.mark_padding(ids[:, :3], [site])[0, 0] == 0
