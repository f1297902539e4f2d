"""Name the zero pattern of weights: causal, strictly causal, off by k, a window, blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pattern:
    """The keys that queries read.

    Attributes:
        name: "all keys", "causal", "strictly causal", "ahead", "window", "shifted window",
            "blocks", "all but itself" or "unknown".
        description: as a part of a sentence.
        ahead: how many later tokens are read, at most; below 0 where the token itself isn't read
            and the last token that is lies so far before it.
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
    for pattern, expected in _patterns(reads):
        if torch.equal(reads, expected):
            return pattern
    nearest, i, j = find_deviation(reads)
    what = "reads" if reads[i, j] else "doesn't read"
    return Pattern(
        "unknown",
        f"keys in a pattern that has no name here: nearest is {nearest.description}, but query {i}"
        f" {what} key {j}",
    )


def find_deviation(reads: Tensor) -> tuple[Pattern, int, int]:
    """The nearest pattern, and the first query and key in which `reads [L, S]` differ from it."""
    options = list(_patterns(reads))
    pattern, expected = min(options, key=lambda o: int((o[1] != reads).sum()))
    wrong = (expected != reads).nonzero()
    i, j = wrong[0].tolist() if len(wrong) else (0, 0)
    return pattern, i, j


def _patterns(reads: Tensor) -> Iterator[tuple[Pattern, Tensor]]:
    """Patterns and what they read, the simplest first."""
    length = len(reads)
    at = torch.arange(length)
    distance = at[:, None] - at
    yield Pattern("all keys", "all keys"), torch.ones_like(reads)
    yield Pattern("causal", "earlier tokens and the token itself"), distance >= 0
    for by in range(1, length - 1):  # rows without a key to read may read anything
        expected = torch.where(at[:, None] < by, reads, distance >= by)
        first = "all keys" if reads[0].all() else f"{int(reads[0].sum())} keys"
        first = first if reads[0].any() else "nothing"
        words = "without the token itself" if by == 1 else f"at least {by} before the token"
        description = f"earlier tokens, {words}; row 0 reads {first}"
        yield Pattern("strictly causal", description, -by), expected
    yield Pattern("all but itself", "all tokens but the token itself"), distance != 0
    for ahead in range(1, length - 1):
        later = "the next one" if ahead == 1 else f"{ahead} later ones"
        description = f"earlier tokens, the token itself and {later}"
        yield Pattern("ahead", description, ahead), distance >= -ahead
    for high in range(length - 1):
        for low in range(-high if high else 0, high + 1):
            description = f"a window from token i - {high} to i {-low:+d}"
            yield Pattern("window", description, -low), (distance >= low) & (distance <= high)
    for width in range(2, length):
        for left in {width - 1, width // 2, (width - 1) // 2}:
            start = (at - left).clamp(0, length - width)
            if left == width - 1:
                start = (at - left).clamp_min(0)
            inside = (at >= start[:, None]) & (at < start[:, None] + width)
            description = f"a window of {width} tokens counted from its left edge, which is at 0"
            yield (
                Pattern("shifted window", f"{description} for the first ones", width - 1)
                if left == width - 1
                else Pattern("window", f"a window of {width} tokens, shifted at the edges", width),
                inside,
            )
    for width in range(2, length):
        block = at[:, None] // width == at // width
        yield Pattern("blocks", f"blocks of {width} tokens", width - 1), block
        description = f"blocks of {width} tokens, causal within each"
        yield Pattern("blocks", description), block & (distance >= 0)
