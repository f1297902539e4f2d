"""Which head reads most like which: the Jensen-Shannon divergence between two heads' weights (Clark
et al. 2019).

JS(p, q) = H((p + q) / 2) - (H(p) + H(q)) / 2, in nats: 0 for two heads that read the same, log 2 =
0.69 for two that read nothing in common. It is a mean over query rows: up to 32 real rows of each
text (row of a pass), evenly spread, the same ones for every head. Where a head has a sink, its rows
don't add up to 1: what is missing is one more outcome, called "nothing", so that two heads that
both rest on their sinks are near to one another. Heads are compared where they read the same keys:
the self-attention of one stack. Of a site that runs several times a pass, the first run counts.

It costs one logarithm for each pair of heads, row and key: for 270 heads and 32 rows of 1,024 keys
    1.2e9 of them, half as
many under a causal mask. Within a pass the rows are kept: 64 MiB a document at most, with fewer
rows where they need more.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...models.site import Site
from ...ops.call import AttentionCall
from ..context import Text, Watch
from ..head_pairs import Pairs
from ..row_stats import Sample

MOST = 1 << 24  # weights of a document that are kept until the end of a pass
PART = 1 << 17  # sums of two heads' weights at once, so that they stay in the cache
TINY = 1e-37  # stands for 0: its logarithm is a number, and 1e-37 of that is nothing


@dataclass
class _Group:
    """Sites whose rows and keys are the same ones, during one pass."""

    document: Tensor  # [N]: batch row of each sampled row
    row: Tensor  # [N]
    weights: dict[int, Tensor] = field(
        default_factory=dict
    )  # number of a site's first head -> [N, H, S + 1], last: nothing
    sunk: set[int] = field(default_factory=set)  # which of them have sinks


class HeadDivergences:
    """Watches the sites of a reading, compares their heads at the end of each pass, and adds that
    to `session.pairs`.
    """

    def __init__(self, session: Any, rows: int, seed: int) -> None:
        self.session, self.rows, self.seed = session, rows, seed
        self.first: dict[str, int] = {}  # site -> number of its first head in the table
        for site in session.sites:
            self.first[site.name] = sum(s.num_heads for s in session.sites[: len(self.first)])
        self.heads = sum(site.num_heads for site in session.sites)
        self.groups: dict[tuple[str, int, int, int], _Group] = {}

    def begin_pass(self) -> None:
        self.groups.clear()  # of a pass that ended in an error

    def at(self, site: Site, call: AttentionCall, text: Text) -> Watch | None:
        """A site's call begins: keep the weights of the sampled rows."""
        session = self.session
        settings = session.settings
        if not session.inside or settings.prefix or not settings.counting or site.kind != "self":
            return None
        (batch, heads, length), keys = call.q.shape[:3], call.k.shape[2]
        stack = session.tokens.innermost_stack(site)
        group = self.groups.get((stack, batch, length, keys))
        if group is None:
            most = max(1, min(self.rows, MOST // (self.heads * keys)))
            group = self.groups[stack, batch, length, keys] = _Group(
                *sample(text.real, most, self.seed).T
            )
        if self.first[site.name] in group.weights:
            return None
        kept = call.q.new_zeros(
            len(group.row), heads, keys + 1, dtype=torch.promote_types(call.q.dtype, torch.float32)
        )
        group.weights[self.first[site.name]] = kept
        if call.sinks is not None:
            group.sunk.add(self.first[site.name])
        return Sample(group.document, group.row, kept[..., :-1])

    def end_pass(self) -> None:
        """Every site was seen: compare the heads of each group, document by document."""
        if self.session.pairs is None:
            self.session.pairs = Pairs.empty(self.heads)
        pairs = self.session.pairs
        for group in self.groups.values():
            for first, kept in group.weights.items():
                read = kept[..., :-1].sum(-1)
                kept[..., -1] = (1 - read).clamp(min=0) if first in group.sunk else read == 0
            number = np.concatenate(
                [
                    first + np.arange(group.weights[first].shape[1])
                    for first in sorted(group.weights)
                ]
            )
            for document in group.document.unique().tolist():
                here = (group.document == document).nonzero()[:, 0]
                weights = torch.cat(
                    [group.weights[first][here] for first in sorted(group.weights)], 1
                )
                pairs.sum[np.ix_(number, number)] += (
                    divergences(weights.transpose(0, 1)).cpu().numpy()
                )
                pairs.rows[np.ix_(number, number)] += np.triu(
                    np.full((len(number),) * 2, len(here)), 1
                )
        self.groups.clear()


def sample(real: Tensor, most: int, seed: int) -> Tensor:
    """Up to `most` of each document's real rows (`[B, L]`), evenly spread: `[N, 2]`, document and
    row.

    Where the first one stands is drawn from the seed and the number of rows: the same for a text in
        any batch.
    """
    found = []
    for document, rows in enumerate(real.cpu()):
        number = rows.nonzero()[:, 0]
        if len(number) > most:
            start = random.Random(f"{seed} {len(number)}").random()
            number = number[[int((n + start) * len(number) / most) for n in range(most)]]
        found.append(torch.stack([torch.full_like(number, document), number], 1))
    return torch.cat(found).to(real.device)


def divergences(p: Tensor) -> Tensor:
    """p `[heads, rows, outcomes]`, each row adding up to 1 -> the divergence of heads i < j, summed
    over rows, `[heads, heads]`.

    With s = p + q it is the sum of (p log p + q log q - s log s + s log 2) / 2, which needs one
    logarithm a pair.
    """
    heads = p.shape[0]
    flat = p[:, (p > 0).any(0)].clamp(
        min=TINY
    )  # what no head reads, under a causal mask half of it, adds nothing
    own = (flat * flat.log()).sum(1, dtype=torch.float64) + math.log(2) * flat.sum(
        1, dtype=torch.float64
    )
    found = own[:, None] + own
    step = max(16, PART // max(1, heads))
    for start in range(0, flat.shape[1], step):
        part = flat[:, start : start + step]
        for i in range(heads - 1):
            s = part[i + 1 :] + part[i]
            found[i, i + 1 :] -= s.mul_(s.log()).sum(1)
    return (found / 2).clamp(min=0).triu(1)
