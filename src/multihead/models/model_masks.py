"""Masks as models pass them, lowered for `AttentionCall`: booleans, numbers that forbid, biases.

Which numbers mean "may not read" is decided in models/names.py alone. What a query may read and
what is added to its scores come apart here, so that the same mask gives the same table whatever its
axes are.

**Queries that may read nothing**, as left padding in a `[B, 1, L, S]` mask has them. A number that
forbids every key forbids none: added to all scores of a query it changes no weight, or leaves them
uniform where it is so low that scores are lost in rounding. Such a query is no query, so it counts
in no statistic, but it has an output, which other queries may read in later layers. So its call
reads nothing, and `fill_empty` puts the output of the model in its place.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.call import AttentionCall
from ..ops.convert import from_dense
from ..ops.functional import compute
from ..ops.masks import IntervalMask
from .names import is_masking

Mask = IntervalMask | Tensor | None


class ModelMask(NamedTuple):
    """A mask and a bias for `AttentionCall.lower`, and the queries without a key."""

    mask: Mask = None
    bias: Tensor | None = None
    # bool [B or 1, 1 or H, L]: queries that may read nothing; None where there are none, or where
    # the mask is intervals, which the model derived from padding that is known
    empty: Tensor | None = None
    # [B or 1, 1 or H, L, S]: what is added to the scores of those, where they have a number; None
    # where all is forbidden by -inf or a boolean, so that their output is 0
    added: Tensor | None = None


def split_mask(mask: Mask, bias: Tensor | None, length: int, keys: int) -> ModelMask:
    """Split a mask and what is added to the scores, both broadcasting to `[B, H, L, S]`, into what
    may be read and what is a bias.

    >>> low = torch.full((3, 3), -1e9).triu(1)
    >>> for given in (low, low.expand(1, 4, 3, 3)):
    ...     split = split_mask(None, given, 3, 3)
    ...     type(split.mask).__name__, split.bias
    ('IntervalMask', None)
    ('IntervalMask', None)
    """
    if isinstance(mask, Tensor):
        mask = mask[(None,) * (4 - mask.ndim)]
    low = None
    if bias is not None:
        bias = bias[(None,) * (4 - bias.ndim)]
        low = is_masking(bias)
        if not bool(low.any()):
            low = None
    if bias is None or low is None:
        bias = bias if bias is not None and bool(bias.any()) else None
        if not isinstance(mask, Tensor):
            return ModelMask(mask, bias)
        may = _share_heads(mask)
        empty = _find_empty(may, length)
        return ModelMask(_to_intervals(may, length, keys), bias, empty)
    may, given = ~low, bias
    if mask is not None:
        allowed = mask if isinstance(mask, Tensor) else mask.dense(length, keys, bias.device)
        may, given = may & allowed, given.masked_fill(~allowed, -torch.inf)
    bias = bias.masked_fill(low, 0)
    may = _share_heads(may)
    empty, added = _find_empty(may, length), None
    if empty is not None:
        some = (given > -torch.inf).any(-1).expand(-1, -1, length)
        added = given if bool((some & empty).any()) else None
    return ModelMask(
        _to_intervals(may, length, keys), bias if bool(bias.any()) else None, empty, added
    )


def fill_empty(out: Tensor, call: AttentionCall, split: ModelMask) -> Tensor:
    """The output `[B, H, L, Ev]` of a call, with what the model computes for queries that may read
    nothing in their place.
    """
    if split.empty is None or split.added is None:
        return out
    rows = split.empty.flatten(0, 1).any(0).nonzero()[:, 0]
    added = split.added
    may, dtype = added > -torch.inf, torch.promote_types(call.q.dtype, torch.float32)
    # finite, but so low that scores are lost in rounding, as they are in finfo.min
    added = added.masked_fill(~may, 0).to(dtype).clamp(min=torch.finfo(dtype).min / 8)
    whole = call._replace(start=None, stop=None, low=None, high=None, mask=may, bias=added)
    filled = compute(whole.slice(query=rows))
    empty = split.empty[..., rows, None]
    return out.index_copy(2, rows, torch.where(empty, filled.to(out.dtype), out[:, :, rows]))


def padding_of_empty(call: AttentionCall, past: int) -> Tensor:
    """Positions that are padding, bool `[B, L]`, of a call whose queries' own keys come after
    `past` others: their query may read nothing, and no query may read their key.
    """
    batch, length = call.q.shape[0], call.q.shape[2]
    empty = call.context.empty
    if empty is None:
        return torch.zeros(batch, length, dtype=torch.bool, device=call.q.device)
    return empty.all(1).expand(batch, -1) & ~find_readable_keys(call)[:, past : past + length]


def find_readable_keys(call: AttentionCall) -> Tensor:
    """Keys that some query of a batch element may attend to: bool `[B, S]`."""
    batch, length, keys = call.q.shape[0], call.q.shape[2], call.k.shape[2]
    if call.mask is not None:
        return call.mask.expand(batch, -1, length, keys).flatten(1, 2).any(1)
    bounds = call.bounds()
    if bounds is None:
        return call.q.new_full((batch, keys), length > 0, dtype=torch.bool)
    start, stop = bounds
    some = stop > start
    first = torch.where(some, start, keys).amin(-1, keepdim=True)
    last = torch.where(some, stop, 0).amax(-1, keepdim=True)
    index = torch.arange(keys, device=call.q.device)
    return ((index >= first) & (index < last)).expand(batch, -1)


def find_read_rows(mask: Tensor) -> Tensor | None:
    """Queries that may read something, bool `[B or 1, L]`, of a mask `[B or 1, 1 or H, L, S]` that
    a model was given; None where all may.
    """
    if mask.ndim != 4 or mask.shape[-2] < 2:
        return None
    may = mask if mask.dtype == torch.bool else ~is_masking(mask)
    rows = may.any(-1).any(1)
    return None if bool(rows.all()) else rows


def _share_heads(may: Tensor) -> Tensor:
    """The mask of one head where all heads have the same."""
    first = may[:, :1]
    shared = may.shape[1] > 1 and (may.stride(1) == 0 or torch.equal(first.expand_as(may), may))
    return first if shared else may


def _find_empty(may: Tensor, length: int) -> Tensor | None:
    empty = ~may.any(-1)
    return empty.expand(-1, -1, length) if bool(empty.any()) else None


def _to_intervals(may: Tensor, length: int, keys: int) -> Mask:
    return from_dense(may.expand(-1, -1, length, keys)) if may.shape[1] == 1 else may
