"""What a module was called with, in the words of a `Call`: masks of any make, which keys are text,
the weights on request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..ops.convert import from_dense
from ..ops.functional import attention
from ..ops.masks import IntervalMask
from .transformers import Call

Mask = IntervalMask | Tensor | None
LOW = -1e4  # numbers from here down that are added to scores mean "may not read"


def settled(mask: Mask, bias: Tensor | None, q: Tensor, k: Tensor) -> tuple[Mask, Tensor | None]:
    """A mask and a bias as a `Call` has them: numbers that only say "may not read" are a mask,
    intervals where they can be.
    """
    full = (-1, -1, q.shape[2], k.shape[2])
    if bias is not None:
        bias = bias[(None,) * (4 - bias.ndim)]
        if bool((bias <= LOW).any()):
            bias = bias.expand(full)
            if mask is not None:
                may = mask.dense(*full[2:], q.device) if isinstance(mask, IntervalMask) else mask
                bias = bias.masked_fill(~may, -torch.inf)
            low = bias <= LOW
            mask = ~torch.where(
                low.all(-1, keepdim=True), bias == -torch.inf, low
            )  # a row of low numbers alone reads by them
            bias = bias.masked_fill(~mask, 0)
        bias = bias if bool(bias.any()) else None
    if isinstance(mask, Tensor):
        mask = from_dense(mask[(None,) * (4 - mask.ndim)].expand(full))
    return mask, bias


def readable(mask: Mask, q: Tensor, k: Tensor) -> Tensor:
    """Keys that some row of a text may read: bool `[B, S]`."""
    batch, length, keys = q.shape[0], q.shape[2], k.shape[2]
    if isinstance(mask, Tensor):
        return mask[(None,) * (4 - mask.ndim)].expand(batch, -1, length, keys).flatten(1, 2).any(1)
    start, stop = (IntervalMask(()) if mask is None else mask).bounds(length, keys, q.device)
    some = stop > start
    first = torch.where(some, start, keys).amin(-1, keepdim=True)
    last = torch.where(some, stop, 0).amax(-1, keepdim=True)
    number = torch.arange(keys, device=q.device)
    return ((number >= first) & (number < last)).expand(batch, -1)


def text_keys(mask: Mask, q: Tensor, k: Tensor) -> Tensor | None:
    """Which keys are text, where the mask differs by text and so tells; else None."""
    batch = q.shape[0]
    if mask is None or batch == 1:
        return None
    one = (
        mask.shape[0]
        if isinstance(mask, Tensor)
        else mask.bounds(q.shape[2], k.shape[2], q.device)[0].shape[0]
    )
    return readable(mask, q, k) if one == batch else None


def weights_of(call: Call) -> Tensor:
    """The weights `[B, H, L, S]` for a module that was asked to return them; those before
    dropout.
    """
    found = attention(
        call.q,
        call.k,
        call.v,
        call.mask,
        bias=call.bias,
        scale=call.scale,
        softcap=call.softcap,
        sinks=call.sinks,
        return_weights=True,
    )
    return found[1]


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
    return ~padding if padding.dtype == torch.bool else padding > LOW


def target(given: Mapping[str, Any]) -> Tensor | None:
    """Which rows `[B, L]` of a decoder are text, where its arguments say it in torch's words."""
    padding = given.get("tgt_key_padding_mask")
    return text_of(padding) if isinstance(padding, Tensor) and padding.ndim == 2 else None
