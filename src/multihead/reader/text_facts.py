"""`TextFacts`: facts about the tokens that a site was given, which explain an empty column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from .context import TokenContext


@dataclass
class TextFacts:
    """Facts about the texts so far at one site.

    >>> TextFacts().longest
    0
    """

    any_query: bool = False  # a query that counts and may read a key
    longest: int = 0  # the most tokens of a sequence, those in a cache included
    most_queries: int = 0  # of a sequence in one pass
    special: bool = False  # a special token
    copied: bool = False  # a token that is in a sequence twice
    repeated: bool = False  # a token that is in a sequence twice, with one in between

    def add(self, context: TokenContext, allowed: Tensor) -> None:
        """Add the texts of one attention call. `allowed` `[B, 1 or H, L]` is the number of keys
        that each query may read.
        """
        if not self.any_query:
            self.any_query = bool((context.query_valid[:, None] & (allowed > 0)).any())
        self.longest = max(self.longest, int(context.key_valid.sum(-1).max()))
        self.most_queries = max(self.most_queries, int(context.query_valid.sum(-1).max()))
        if not self.special and context.special is not None:
            self.special = bool((context.special & context.key_valid).any())
        if not self.repeated and context.key_ids is not None:
            ids, place = context.key_ids.sort(dim=-1, stable=True)
            same = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)
            thrice = (ids[:, 2:] == ids[:, :-2]) & (ids[:, 2:] >= 0)
            self.copied = self.copied or bool(same.any())
            self.repeated = bool((same & (place.diff(dim=-1) > 1)).any()) or bool(thrice.any())
