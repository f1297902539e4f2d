"""What a module was called with, as an `AttentionCall` has it: masks of other
libraries, and which keys are tokens and not padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..ops.call import AttentionCall
from ..ops.convert import from_dense
from ..ops.masks import IntervalMask
from .names import is_masking

Mask = IntervalMask | Tensor | None


def settled(mask: Mask, bias: Tensor | None, q: Tensor, k: Tensor) -> tuple[Mask, Tensor | None]:
    """A mask and a bias as an `AttentionCall` is lowered from: numbers that only say "may not read" are a mask,
    intervals where they can be.
    """
    full = (-1, -1, q.shape[2], k.shape[2])
    if bias is not None:
        bias = bias[(None,) * (4 - bias.ndim)]
        if bool(is_masking(bias).any()):
            bias = bias.expand(full)
            if mask is not None:
                may = mask.dense(*full[2:], q.device) if isinstance(mask, IntervalMask) else mask
                bias = bias.masked_fill(~may, -torch.inf)
            low = is_masking(bias)
            mask = ~torch.where(
                low.all(-1, keepdim=True), bias == -torch.inf, low
            )  # a row of low numbers alone reads by them
            bias = bias.masked_fill(~mask, 0)
        bias = bias if bool(bias.any()) else None
    if isinstance(mask, Tensor):
        mask = from_dense(mask[(None,) * (4 - mask.ndim)].expand(full))
    return mask, bias


def readable_keys(call: AttentionCall) -> Tensor:
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
    number = torch.arange(keys, device=call.q.device)
    return ((number >= first) & (number < last)).expand(batch, -1)


def valid_keys(call: AttentionCall) -> Tensor | None:
    """Which keys are tokens and not padding, bool `[B, S]`, where the mask differs by batch element
    and so tells; else None.
    """
    limits = call.start if call.mask is None else call.mask
    if limits is None or call.q.shape[0] == 1 or limits.shape[0] == 1:
        return None
    return readable_keys(call)


def apart(query: Tensor, key: Tensor) -> bool:
    """Whether the keys are another sequence than the queries."""
    return key is not query and (key.shape != query.shape or not torch.equal(key, query))


def flat(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a module, those inside of a dict of features too: so sentence-transformers'
    modules take them.
    """
    inside = [
        value
        for value in given.values()
        if isinstance(value, Mapping) and not hasattr(value, "to_tuple")
    ]
    return {**given, **{key: value for features in inside for key, value in features.items()}}


def text_of(padding: Tensor) -> Tensor:
    """Which positions are text, bool, from a padding mask of torch's kind: True, or a number that
    forbids, at padding.
    """
    return ~padding if padding.dtype == torch.bool else ~is_masking(padding)


def target(given: Mapping[str, Any]) -> Tensor | None:
    """Which rows `[B, L]` of a decoder are text, where its arguments say it in torch's words."""
    padding = given.get("tgt_key_padding_mask")
    return text_of(padding) if isinstance(padding, Tensor) and padding.ndim == 2 else None
