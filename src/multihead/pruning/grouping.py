"""Groups of key/value heads that share: neighbours, or those with the most similar keys and values
on a calibration text.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations
from math import comb, inf, prod

import torch
from torch import Tensor

from ..ops.call import AttentionCall
from .basis import KeyBasis

__all__ = ["CHOICES", "Groups", "group_heads"]

CHOICES = ("similar", "neighbours")
MAX_TRIED = 20_000  # partitions of the heads, up to which all are tried
Groups = tuple[tuple[int, ...], ...]


def group_heads(calls: Sequence[AttentionCall], basis: KeyBasis, n: int, choice: str) -> Groups:
    """Partition the key/value heads of a site into `n` groups of one size.

    With "similar", the distance of two heads is what the best single key and value for both lose of
    their keys and values: the share of the variance not in the first principal components. A group
    costs the sum over its pairs. If there are few partitions, all are tried; else groups are grown
    from the nearest heads, and heads are exchanged between groups while that lowers the cost.
    """
    heads = calls[0].k.shape[1]
    size = heads // n
    if choice == "neighbours" or n in (1, heads):
        return tuple(tuple(range(i * size, (i + 1) * size)) for i in range(n))
    distance = head_distances(calls, basis)
    partitions = prod(comb(i * size - 1, size - 1) for i in range(1, n + 1))
    if partitions <= MAX_TRIED:
        return _best_partition(distance, size)
    return _grown_partition(distance, size)


def head_distances(calls: Sequence[AttentionCall], basis: KeyBasis) -> Tensor:
    """Distances `[G, G]` between the keys and values of each two heads: 0 if one is a change of
    basis of the other.
    """
    sums: list[Tensor] = []
    for call in calls:
        k = call.k - call.k.mean(-2, keepdim=True)
        parts = [k[..., None, :]] if basis.is_fixed else basis.to_blocks(k)
        # [blocks, rows, G*e]
        stacked = [
            x.permute(3, 0, 2, 1, 4).flatten(1, 2).flatten(2)
            for x in (*parts, call.v[..., None, :])
        ]
        new = [(x.mH @ x).to(torch.promote_types(x.dtype, torch.float64)) for x in stacked]
        sums = [x + y for x, y in zip(sums, new, strict=True)] if sums else new
    heads = calls[0].k.shape[1]
    distances = torch.zeros(heads, heads, dtype=torch.float64, device="cpu")
    for moment in sums:
        e = moment.shape[-1] // heads
        blocks = moment.unflatten(-1, (heads, e)).unflatten(-3, (heads, e))  # [blocks, G, e, G, e]
        size = blocks.diagonal(dim1=1, dim2=3).diagonal(dim1=1, dim2=2).real.sum(-1)  # [blocks, G]
        size = size.sum(0).clamp(min=1e-30).rsqrt()  # heads count alike, whatever their length
        blocks = blocks * size[:, None, None, None] * size[:, None]
        for a, b in combinations(range(heads), 2):
            pair = blocks[:, [b, a]][:, :, :, [b, a]].flatten(3).flatten(1, 2)
            rest = torch.linalg.eigvalsh(pair)[..., :e].clamp(min=0).sum()
            distances[a, b] = distances[b, a] = distances[a, b] + float(rest)
    return distances


def _cost(distance: list[list[float]], group: Sequence[int]) -> float:
    return sum(distance[a][b] for i, a in enumerate(group) for b in group[:i])


def _best_partition(distances: Tensor, size: int) -> Groups:
    """The cheapest of all partitions."""
    distance = distances.tolist()

    @cache
    def best_of(heads: frozenset[int]) -> tuple[float, Groups]:
        if not heads:
            return 0.0, ()
        first = min(heads)
        best: tuple[float, Groups] = (inf, ())
        for others in combinations(sorted(heads - {first}), size - 1):
            group = (first, *others)
            cost, groups = best_of(heads - set(group))
            best = min(best, (_cost(distance, group) + cost, (group, *groups)), key=lambda x: x[0])
        return best

    return best_of(frozenset(range(len(distance))))[1]


def _grown_partition(distances: Tensor, size: int) -> Groups:
    """Each group grown by the nearest head, then improved by exchanges between two groups."""
    distance = distances.tolist()
    left = list(range(len(distance)))
    groups: list[list[int]] = []
    while left:
        group = [left.pop(0)]
        while len(group) < size:
            nearest = min(left, key=lambda h: sum(distance[h][g] for g in group))
            left.remove(nearest)
            group.append(nearest)
        groups.append(group)
    improved = True
    while improved:
        improved = False
        for i, a in enumerate(groups):
            for b in groups[:i]:
                for x in range(size):
                    for y in range(size):
                        before = _cost(distance, a) + _cost(distance, b)
                        a[x], b[y] = b[y], a[x]
                        if _cost(distance, a) + _cost(distance, b) < before - 1e-12:
                            improved = True
                        else:
                            a[x], b[y] = b[y], a[x]
    return tuple(sorted(tuple(sorted(group)) for group in groups))
