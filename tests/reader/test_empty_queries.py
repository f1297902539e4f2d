"""Queries that may read nothing: which ones count, and which positions are padding."""

from __future__ import annotations

from typing import Any

import torch

from multihead.models.site import find_sites
from multihead.ops.call import AttentionCall, CallContext
from multihead.reader.empty_queries import EmptyQueries
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
