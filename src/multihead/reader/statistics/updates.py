"""Updates of the heads: norms and shares of their updates, and the weight that each key
receives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import ELEMENTWISE, NO_CONTRIBUTION, Defined, Statistic, Totals

if TYPE_CHECKING:
    from torch import Tensor

    from ...models.site import Site
    from .base import HeadUpdates, SiteState

READERS = 64  # queries that may read a key, for it to count in `received`
MANY_READERS = f"keys that {READERS} queries or more may read, in one pass"


class UpdateNorm(Statistic):
    name, formula, meaning = "norm", "||u_i||", "norm of the head's update"
    range, source = (0.0, None), "Kobayashi et al. 2020"

    def update(self, site: Site, heads: HeadUpdates) -> Defined:
        return Defined(heads.norms, heads.counts)


class UpdateShare(Statistic):
    name, formula = "share", "<u_i, sum_g u_g,i> / ||sum_g u_g,i||^2"
    meaning = "part of its site's update; the shares of a site add up to 1"
    queries = "queries whose site update isn't 0"

    def why_absent(self, site: SiteState) -> str:
        return "the updates of the site are 0"

    def update(self, site: Site, heads: HeadUpdates) -> Defined:
        from ...models.head_updates import update_shares  # not at the top: it loads torch

        return Defined(*update_shares(heads.outputs, heads.site_update, heads.weight))


class Cancellation(Statistic):
    name, formula = "cancellation", "||u_i|| / sum_j c_ij"
    meaning = "low where the contributions of the keys cancel out"
    range: tuple[float | None, float | None] = (0.0, 1.0)
    queries = "queries in which a contribution isn't 0"

    def update(self, site: Site, heads: HeadUpdates) -> Defined | None:
        if heads.elementwise:
            return None
        read = heads.contributions
        return Defined(heads.norms / read.where(read > 0, 1), (read > 0) & heads.own)

    def why_missing(self, site: SiteState) -> str:
        return ELEMENTWISE if site.elementwise else NO_CONTRIBUTION


class Reach(Cancellation):
    name, formula = "reach", "sum_ij c_ij / the same for uniform weights"
    meaning = "below 1: it reads values of smaller norm than the average"
    range, queries = (0.0, None), Statistic.queries

    def update(self, site: Site, heads: HeadUpdates) -> Totals | None:  # type: ignore[override]
        if heads.elementwise:
            return None
        counts = heads.counts & heads.own
        x, y = (
            values.where(counts, 0).double().sum(-1)
            for values in (heads.contributions, heads.uniform)
        )
        return Totals(x, y, counts.sum(-1).double())


class Received(Statistic):
    """The largest attention sink of a text (Gu et al. 2024, arXiv:2410.10781)."""

    name, formula = "received", "max_j sum_i A_ij / (queries that may read j)"
    meaning = "the largest average weight that one key receives"
    range: tuple[float | None, float | None] = (0.0, 1.0)
    queries, source = MANY_READERS, "Gu et al. 2024"

    def why_absent(self, site: SiteState) -> str:
        if site.text.most_queries < self.readers:
            return (
                f"no key has {self.readers} queries in one pass: the texts, or the windows they"
                " are read in, are too short"
            )
        return f"the mask lets fewer than {self.readers} queries read any one key"

    def __init__(self, readers: int = READERS) -> None:
        self.readers = readers

    def update(self, site: Site, heads: HeadUpdates) -> Totals:
        readers = heads.readers.expand_as(heads.received)
        counts = (readers >= self.readers) & heads.context.key_valid[:, None]
        part, key = (heads.received / readers.clamp(min=1)).where(counts, -1.0).max(-1)
        exists = counts.any(-1).double()
        return Totals(
            self.value(heads, part, key).double() * exists, exists, counts.sum(-1).double()
        )

    def value(self, heads: HeadUpdates, part: Tensor, key: Tensor) -> Tensor:
        return part


class ReceivedAt(Received):
    name, formula, meaning = "received_at", "the key with that maximum", "position of that key"
    unit, range = "tokens", (0.0, None)

    def value(self, heads: HeadUpdates, part: Tensor, key: Tensor) -> Tensor:
        return key - heads.context.first_key.clamp(min=0)[:, None]


class Logit(Statistic):
    """Direct logit attribution (Elhage et al. 2021); `reader/stream.py` computes it."""

    name, formula = "logit", "<u_i, W_U[token_(i+1)]>, final norm frozen"
    meaning = "what it adds to the logit of the next token"
    queries, source = "queries that a token follows", "Elhage et al. 2021"
    needs_one_sequence = True

    def why_missing(self, site: SiteState) -> str:
        return super().why_missing(site) or site.logit_reason or self._why_no_next(site)

    def _why_no_next(self, site: SiteState) -> str:
        if site.ids_reason:
            return site.ids_reason
        return "each text is one token long" if site.text.longest < 2 else ""
