"""`EmptyQueries`: queries that may read nothing, as left padding in a `[B, 1, L, S]` mask has them.

They count nowhere, and what a model gives for them depends on its attention implementation, so they
aren't compared either. Where no query reads their keys, their positions are padding.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..models.labels import stack_of
from ..models.model_masks import padding_of_empty
from ..models.site import Site
from ..ops.call import AttentionCall

PADDING = -3  # in place of the id of a cached position that is padding


class EmptyQueries:
    """Those of the pass under way.

    Attributes:
        at: by site, bool `[B, L]`, of its last call; sites without any are left out.
    """

    def __init__(self) -> None:
        self.at: dict[str, Tensor] = {}
        self._padding: dict[str, Tensor] = {}  # by stack, [B, L]

    def clear(self) -> None:
        """A pass begins."""
        self.at.clear()
        self._padding.clear()

    def leave_out(
        self, site: Site, call: AttentionCall, past: int | None, real: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The queries that count, bool `[B, L]`, and the mask of tokens, bool `[B, past + L]`, of
        one call, without such queries and without padding.

        `past`: positions before the queries; None in cross-attention.
        """
        batch, length, keys = call.q.shape[0], call.q.shape[2], call.k.shape[2]
        stack = stack_of(site.name)
        self.at.pop(site.name, None)
        if call.context.empty is not None:
            self.at[site.name] = empty = call.context.empty.all(1).expand(batch, -1)
            real = real & ~empty
            if past is not None and keys >= past + length:
                self._padding[stack] = padding = padding_of_empty(call, past)
                known = real.new_ones(batch, past + length) if mask is None else mask
                mask = known & ~torch.nn.functional.pad(padding, (past, 0))
        elsewhere = self._padding.get(stack)
        if elsewhere is not None and elsewhere.shape == real.shape:
            real = real & ~elsewhere
        return real, mask

    def mark_padding(self, ids: Tensor, sites: Iterable[Site]) -> Tensor:
        """Ids `[B, past + L]` of the positions in the cache of these sites, with PADDING for those
        of this pass that are padding: calls that continue the cache can't tell by their own masks.
        """
        stacks = {stack_of(site.name) for site in sites if site.kind != "cross"}
        for padding in (self._padding[stack] for stack in stacks if stack in self._padding):
            batch, length = padding.shape
            if batch == ids.shape[0] and length <= ids.shape[1]:
                past = ids.shape[1] - length
                marked = torch.nn.functional.pad(padding, (past, 0)).to(ids.device)
                ids = ids.masked_fill(marked, PADDING)
        return ids
