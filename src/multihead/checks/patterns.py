"""Name the zero pattern of weights: causal, strictly causal, off by k, a window, blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pattern:
    """Which keys queries read.

    Attributes:
        name: "all keys", "causal", "strictly causal", "ahead", "window", "blocks", "all but
            itself" or "unknown".
        description: as a part of a sentence.
        ahead: how many later tokens are read, of "ahead".
    """

    name: str
    description: str
    ahead: int = 0


def name_pattern(reads: Tensor) -> Pattern:
    """The pattern of `reads`, bool `[L, S]` with L = S; rows that differ at the start are named.

    >>> name_pattern(torch.ones(5, 5).tril().bool()).name
    'causal'
    >>> name_pattern(torch.ones(5, 5).tril(-1).bool()).description
    'earlier tokens, without the token itself; row 0 reads nothing'
    """
    length = len(reads)
    at = torch.arange(length)
    distance = at[:, None] - at
    if reads.all():
        return Pattern("all keys", "all keys")
    if torch.equal(reads, distance >= 0):
        return Pattern("causal", "earlier tokens and the token itself")
    if torch.equal(reads[1:], (distance >= 1)[1:]):
        first = "all keys" if reads[0].all() else f"{int(reads[0].sum())} keys"
        first = first if reads[0].any() else "nothing"
        return Pattern(
            "strictly causal", f"earlier tokens, without the token itself; row 0 reads {first}"
        )
    if torch.equal(reads, distance != 0):
        return Pattern("all but itself", "all tokens but the token itself")
    for ahead in range(1, length - 1):
        if torch.equal(reads, distance >= -ahead):
            return Pattern("ahead", f"earlier tokens and {ahead} later ones", ahead)
    if reads.any():
        low, high = int(distance[reads].min()), int(distance[reads].max())
        if torch.equal(reads, (distance >= low) & (distance <= high)):
            return Pattern("window", f"a window from token i - {high} to i {-low:+d}")
    for width in range(2, length):
        block = at[:, None] // width == at // width
        for is_causal in (False, True):
            if torch.equal(reads, block & (distance >= 0) if is_causal else block):
                order = ", causal within each" if is_causal else ""
                return Pattern("blocks", f"blocks of {width} tokens{order}")
    return Pattern("unknown", "keys in a pattern that has no name here")
