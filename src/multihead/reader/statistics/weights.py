"""The shape of a query's attention weights, each by its definition in plain tensors.

The kernels compute the same numbers while the weights pass through them (`reader/row_stats.py`);
these definitions are what they are tested against.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base import Statistic, why_no_key

if TYPE_CHECKING:
    from torch import Tensor

    from ..context import QueryBlock
    from .base import SiteState


class Entropy(Statistic):
    name, formula, meaning = "entropy", "-sum_j A_ij log A_ij", "how spread the weights are"
    unit, range = "nats", (0.0, None)

    def rows(self, block: QueryBlock) -> Tensor:
        return -block.weights.xlogy(block.weights).sum(-1)


class EntropyRatio(Statistic):
    name, formula = "entropy_ratio", "entropy / log(allowed keys)"
    meaning = "entropy relative to uniform weights"
    range, queries = (0.0, 1.0), "queries that may read two keys or more"

    def why_absent(self, site: SiteState) -> str:
        return why_no_key(site, "no query may read two keys or more")

    def rows(self, block: QueryBlock) -> Tensor:
        weights = block.weights
        if block.allowed is None:
            count = weights.new_full((1,), weights.shape[-1])
        else:
            count = block.allowed.expand(weights.shape).sum(-1).to(weights.dtype)
        entropy = -weights.xlogy(weights).sum(-1)
        return (entropy / count.clamp(min=2).log()).where(count > 1, float("nan"))


class Confidence(Statistic):
    name, formula, meaning = "confidence", "max_j A_ij", "the largest weight of a query"
    range, source = (0.0, 1.0), "Voita et al. 2019"

    def rows(self, block: QueryBlock) -> Tensor:
        return block.weights.amax(-1)


class Distance(Statistic):
    name, formula, meaning = "distance", "sum_j A_ij |i - j|", "distance of the keys read"
    unit, range = "tokens", (0.0, None)
    needs_one_sequence = True

    def rows(self, block: QueryBlock) -> Tensor:
        weights, offset = block.weights, block.context.offset
        if offset is None:
            return weights.sum(-1) * float("nan")
        positions = weights.new_ones(block.keys.stop).cumsum(0) - 1
        keys = positions[block.keys.start :]
        queries = weights.new_ones(block.rows.stop).cumsum(0)[block.rows.start :] - 1 + offset
        return (weights * (queries[:, None] - keys).abs()).sum(-1)
