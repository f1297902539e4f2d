"""`nearest`: Jensen-Shannon divergences between the weights of heads (Clark et al. 2019).

JS(p, q) = H((p + q) / 2) - (H(p) + H(q)) / 2, in nats: 0 for two heads that read the same, log 2 =
0.69 for two that read disjoint keys. It is a mean over up to 32 queries of each document (batch
element of a pass), evenly spaced, the same ones for every head. With an attention sink the weights
of a query don't sum to 1: the rest is one more outcome, "nothing", so that two heads with most of
their weight on their sinks are near to each other. Heads are compared where they read the same
keys: within the self-attention of one stack. Of a site that runs several times a pass, the first
run counts.

It costs one logarithm for each pair of heads, query and key: 1.2e9 for 270 heads and 32 queries of
1,024 keys, half as many under a causal mask. Within a pass the weights of these queries are kept:
64 MiB a document at most, with fewer queries where they need more.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ...models.site import Site
from ...ops.call import AttentionCall
from ..context import TokenContext, Watch
from ..head_pairs import Pairs
from ..row_stats import Sample
from .base import Run

MOST = 1 << 24  # weights of a document that are kept until the end of a pass
PART = 1 << 17
TINY = 1e-37  # in place of 0: its logarithm is finite, and times 1e-37 negligible


@dataclass
class _Group:
    """Sites with the same queries and keys, during one pass."""

    document: Tensor  # [N]: batch element of each sampled query
    row: Tensor  # [N]: the query
    # by the number of the site's first head: [N, H, S + 1], the last outcome is "nothing"
    weights: dict[int, Tensor] = field(default_factory=dict)
    with_sinks: set[int] = field(default_factory=set)


class HeadDivergences:
    """Watches the sites of a reading, compares their heads at the end of each pass, and adds that
    to `run.pairs`.
    """

    def __init__(self, run: Run, rows: int, seed: int) -> None:
        self.run, self.rows, self.seed = run, rows, seed
        self.first: dict[str, int] = {}  # site -> number of its first head in the table
        for site in run.sites:
            self.first[site.name] = sum(s.num_heads for s in run.sites[: len(self.first)])
        self.heads = sum(site.num_heads for site in run.sites)
        self.groups: dict[tuple[str, int, int, int], _Group] = {}

    def begin_pass(self) -> None:
        self.groups.clear()  # a pass may have ended in an error

    def at(self, site: Site, call: AttentionCall, context: TokenContext) -> Watch | None:
        """A call of a site begins: keep the weights of the sampled queries."""
        run, settings = self.run, self.run.settings
        if not run.inside or settings.prefix or not settings.counting or site.kind != "self":
            return None
        (batch, heads, length), keys = call.q.shape[:3], call.k.shape[2]
        same_keys = run.tokens.innermost_stack(site), batch, length, keys
        group = self.groups.get(same_keys)
        if group is None:
            most = max(1, min(self.rows, MOST // (self.heads * keys)))
            group = self.groups[same_keys] = _Group(*sample(context.query_valid, most, self.seed).T)
        first = self.first[site.name]
        if first in group.weights:
            return None
        dtype = torch.promote_types(call.q.dtype, torch.float32)
        group.weights[first] = call.q.new_zeros(len(group.row), heads, keys + 1, dtype=dtype)
        if call.sinks is not None:
            group.with_sinks.add(first)
        return Sample(group.document, group.row, group.weights[first][..., :-1])

    def end_pass(self) -> None:
        """Compare the heads of each group, document by document."""
        if self.run.pairs is None:
            self.run.pairs = Pairs.empty(self.heads)
        pairs = self.run.pairs
        for group in self.groups.values():
            for first, weights in group.weights.items():
                read = weights[..., :-1].sum(-1)
                nothing = (1 - read).clamp(min=0) if first in group.with_sinks else read == 0
                weights[..., -1] = nothing
            ordered = [(first, group.weights[first]) for first in sorted(group.weights)]
            heads = np.concatenate([first + np.arange(w.shape[1]) for first, w in ordered])
            square = np.ix_(heads, heads)
            for document in group.document.unique().tolist():
                here = (group.document == document).nonzero()[:, 0]
                p = torch.cat([weights[here] for _, weights in ordered], 1).transpose(0, 1)
                pairs.sum[square] += divergences(p).cpu().numpy()
                pairs.rows[square] += np.triu(np.full((len(heads),) * 2, len(here)), 1)
        self.groups.clear()


def sample(real: Tensor, most: int, seed: int) -> Tensor:
    """Up to `most` of the real queries (bool `[B, L]`) of each document, evenly spaced: `[N, 2]`,
    document and query.

    The first is drawn from the seed and the number of queries, so that it is the same for a text
    in any batch.
    """
    chosen = []
    for document, row in enumerate(real.cpu()):
        queries = row.nonzero()[:, 0]
        count = len(queries)
        if count > most:
            start = random.Random(f"{seed} {count}").random()
            queries = queries[[int((n + start) * count / most) for n in range(most)]]
        chosen.append(torch.stack([torch.full_like(queries, document), queries], 1))
    return torch.cat(chosen).to(real.device)


def divergences(p: Tensor, *, part: int = PART) -> Tensor:
    """Divergences of heads i < j summed over queries, `[heads, heads]`, from probabilities
    `[heads, queries, outcomes]`.

    With s = p + q one is the sum of (p log p + q log q - s log s + s log 2) / 2, which needs one
    logarithm a pair. `part` sums of two heads' probabilities are computed at once, so that they
    stay in the cache.
    """
    heads = p.shape[0]
    # outcomes without probability in any head (half of them under a causal mask) add nothing
    flat = p[:, (p > 0).any(0)].clamp(min=TINY)
    own = (flat * flat.log()).sum(1, dtype=torch.float64)
    own = own + math.log(2) * flat.sum(1, dtype=torch.float64)
    total = own[:, None] + own
    step = max(16, part // max(1, heads))
    for start in range(0, flat.shape[1], step):
        block = flat[:, start : start + step]
        for i in range(heads - 1):
            s = block[i + 1 :] + block[i]
            total[i, i + 1 :] -= s.mul_(s.log()).sum(1)
    return (total / 2).clamp(min=0).triu(1)
