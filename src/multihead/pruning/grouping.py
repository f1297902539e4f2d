"""Which key/value heads share: neighbours, or those whose keys and values on a calibration text are
most alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import comb, inf, prod

import torch
from torch import Tensor

from ..ops.call import AttentionCall
from .alignment import Geometry

__all__ = ["CHOICES", "groups_of"]

CHOICES = ("similar", "neighbours")
FEW = 20_000  # ways to part the heads up to which all are tried
Groups = tuple[tuple[int, ...], ...]


def groups_of(calls: Sequence[AttentionCall], shape: Geometry, n: int, choice: str) -> Groups:
    """The key/value heads of a site in `n` sets of one size.

    Under "similar" two heads are as far apart as one key and one value, each the best that there is
    for both, fall short of
    their keys and values: the share of the variance behind the first principal components. A set
        costs the sum over its
    pairs. All ways are tried where they are few; else sets are joined nearest first, and heads
    change places while that helps.
    """
    heads = calls[0].k.shape[1]
    size = heads // n
    if choice == "neighbours" or n in (1, heads):
        return tuple(tuple(range(i * size, (i + 1) * size)) for i in range(n))
    apart = distances(calls, shape)
    ways = prod(comb(i * size - 1, size - 1) for i in range(1, n + 1))
    return _best(apart, size) if ways <= FEW else _swapped(apart, size)


def distances(calls: Sequence[AttentionCall], shape: Geometry) -> Tensor:
    """How far apart the keys and values of each two heads are, `[G, G]`: 0 where one is a change of
    basis of the other.
    """
    sums: list[Tensor] = []
    for call in calls:
        k = call.k - call.k.mean(-2, keepdim=True)
        parts = [*(shape.blocks(k) if not shape.fixed else [k[..., None, :]]), call.v[..., None, :]]
        stacked = [
            x.permute(3, 0, 2, 1, 4).flatten(1, 2).flatten(2) for x in parts
        ]  # [blocks, rows, G*e]
        new = [(x.mH @ x).to(torch.promote_types(x.dtype, torch.float64)) for x in stacked]
        sums = [x + y for x, y in zip(sums, new, strict=True)] if sums else new
    heads = calls[0].k.shape[1]
    found = torch.zeros(heads, heads, dtype=torch.float64)
    for moment in sums:
        e = moment.shape[-1] // heads
        blocks = moment.unflatten(-1, (heads, e)).unflatten(-3, (heads, e))  # [blocks, G, e, G, e]
        size = blocks.diagonal(dim1=1, dim2=3).diagonal(dim1=1, dim2=2).real.sum(-1)  # [blocks, G]
        size = size.sum(0).clamp(min=1e-30).rsqrt()  # heads count alike, whatever their length
        blocks = blocks * size[:, None, None, None] * size[:, None]
        for a in range(heads):
            for b in range(a):
                pair = blocks[:, [a, b]][:, :, :, [a, b]].flatten(3).flatten(1, 2)
                rest = torch.linalg.eigvalsh(pair)[..., :e].clamp(min=0).sum()
                found[a, b] = found[b, a] = found[a, b] + float(rest)
    return found


def _cost(apart: list[list[float]], group: Sequence[int]) -> float:
    return sum(apart[a][b] for i, a in enumerate(group) for b in group[:i])


def _best(distance: Tensor, size: int) -> Groups:
    """Of all ways to part the heads, the cheapest."""
    from itertools import combinations

    apart = distance.tolist()

    @cache
    def rest(left: frozenset[int]) -> tuple[float, Groups]:
        if not left:
            return 0.0, ()
        first = min(left)
        found: tuple[float, Groups] = (inf, ())
        for others in combinations(sorted(left - {first}), size - 1):
            group = (first, *others)
            more, groups = rest(left - set(group))
            found = min(found, (_cost(apart, group) + more, (group, *groups)), key=lambda x: x[0])
        return found

    return rest(frozenset(range(len(apart))))[1]


def _swapped(distance: Tensor, size: int) -> Groups:
    """Each set grown by the nearest head; then two heads change places as long as that makes it
    cheaper.
    """
    apart = distance.tolist()
    left = list(range(len(apart)))
    groups: list[list[int]] = []
    while left:
        group = [left.pop(0)]
        while len(group) < size:
            near = min(left, key=lambda h: sum(apart[h][g] for g in group))
            left.remove(near)
            group.append(near)
        groups.append(group)
    better = True
    while better:
        better = False
        for i, a in enumerate(groups):
            for b in groups[:i]:
                for x in range(size):
                    for y in range(size):
                        before = _cost(apart, a) + _cost(apart, b)
                        a[x], b[y] = b[y], a[x]
                        if _cost(apart, a) + _cost(apart, b) < before - 1e-12:
                            better = True
                        else:
                            a[x], b[y] = b[y], a[x]
    return tuple(sorted(tuple(sorted(group)) for group in groups))
