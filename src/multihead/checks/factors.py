"""Take the weights out of the derivative of what W_O takes by the values, `[S, C, L, H * Ev]`.

In plain attention it is A_hij for each feature of head h. A gate or a norm of the heads' outputs
multiplies it by a factor of query i, the same for all keys j: `G_i A_hij`. A function of the values
multiplies it by a factor of key j. Both leave A up to a factor of each row or column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

# Share of the derivative that may lie where the definition has zeros.
STRAY = 1e-4
TOLERANCE = 1e-6
STEP = 1e-5  # for derivatives where something isn't linear

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda t: t,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "tanh": torch.tanh,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu, tanh": lambda t: F.gelu(t, approximate="tanh"),
    "softplus": F.softplus,
    "elu": F.elu,
    "exp": torch.exp,
    "2 sigmoid": lambda t: 2 * torch.sigmoid(t),
    "1 +": lambda t: 1 + t,
    "1 + elu": lambda t: 1 + F.elu(t),
}


class CannotRead(Exception):
    """The weights can't be read out; the message is the reason.

    >>> str(CannotRead("its values can't be found"))
    "its values can't be found"
    """


@dataclass(frozen=True)
class Heads:
    """Weights of a derivative.

    Attributes:
        weights: A, `[H, L, S]`.
        kv_heads: the value head that each head reads.
        spread: how much the features of one head differ in their weights, relative to them.
        factor: of each row and feature, `[H, L, C]`, where rows were scaled to sum to one; None
            where they are as they are.
    """

    weights: Tensor
    kv_heads: tuple[int, ...]
    spread: float
    factor: Tensor | None = None


def to_heads(changes: Tensor, channels: Sequence[int], v_dim: int) -> Heads:
    """Weights of plain attention; `channels` are those whose values were changed.

    Raises:
        CannotRead: features influence others than those of their place in a head.
    """
    used, weights, kv_heads, spread = 0.0, [], [], 0.0
    for h in range(changes.shape[-1] // v_dim):
        by_group = dict(_own_features(changes, channels, v_dim, h))
        g = max(by_group, key=lambda g: float(by_group[g].square().sum()))
        a = by_group[g].mean(0)
        used += float(by_group[g].square().sum())
        spread = max(spread, float((by_group[g] - a).norm() / by_group[g].norm().clamp_min(1e-30)))
        weights.append(a)
        kv_heads.append(g)
    stray = max(0.0, 1 - used / float(changes.square().sum())) ** 0.5
    if stray > STRAY:
        raise CannotRead(
            f"features of the values reach others than their own, by {stray:.2g} of the derivative"
        )
    return Heads(torch.stack(weights), tuple(kv_heads), spread)


def _own_features(
    changes: Tensor, channels: Sequence[int], v_dim: int, h: int
) -> Iterator[tuple[int, Tensor]]:
    """The derivative of head h by each feature of its place in each value head, `[C, L, S]`."""
    for g in sorted({c // v_dim for c in channels}):
        places = [n for n, c in enumerate(channels) if c // v_dim == g]
        own = [changes[:, n, :, h * v_dim + channels[n] % v_dim].mT for n in places]
        yield g, torch.stack(own)


def factor_rows(changes: Tensor, channels: Sequence[int], v_dim: int) -> Heads:
    """Weights up to a factor of each row, scaled to sum to one.

    Raises:
        CannotRead: the derivative of a row isn't a factor times weights.
    """
    num_heads = changes.shape[-1] // v_dim
    groups = torch.tensor([c // v_dim for c in channels])
    by_group = changes.unflatten(-1, (num_heads, v_dim))  # [S, C, L, H, Ev]
    weights, kv_heads, factors = [], [], []
    for h in range(num_heads):
        energy = torch.stack([by_group[:, groups == g, :, h].norm() for g in groups.unique()])
        g = int(groups.unique()[energy.argmax()])
        part = by_group[:, groups == g, :, h : h + 1]
        if (energy / energy.norm()).max() < 1 - STRAY:
            # A norm over all heads: what one value head gives goes to all.
            if num_heads != len(energy):
                raise CannotRead("features of the values reach several heads")
            g, part = h, by_group[:, groups == h]
        rows = part.permute(2, 0, 1, 3, 4).flatten(2)  # [L, S, ...]
        left, size, _ = torch.linalg.svd(rows, full_matrices=False)
        rest = size[:, 1:].norm(dim=1) / size[:, 0].clamp_min(1e-30)
        if not rest.max() <= STRAY:
            raise CannotRead(
                "the values don't reach W_O by one weight for each query and key: the features of a"
                " head have different weights, not up to a factor of the query either"
            )
        a, sums = left[..., 0], left[..., 0].sum(-1, keepdim=True)
        if not sums.abs().min() > 1e-6:
            raise CannotRead("weights with a factor of each query sum to zero")
        weights.append(a / sums)
        kv_heads.append(g)
        own = dict(_own_features(changes, channels, v_dim, h))[g]
        factors.append(own.sum(-1).mT)  # [L, C]
    width = min(factor.shape[-1] for factor in factors)
    if width < max(factor.shape[-1] for factor in factors):
        raise CannotRead("too few features of the values were changed to find a factor of each row")
    return Heads(torch.stack(weights), tuple(kv_heads), 0.0, torch.stack(factors))


def undo_function(
    changes: Tensor, channels: Sequence[int], values: Tensor, v_dim: int
) -> tuple[str, Heads]:
    """The function that values pass on their way to the weights, by its derivative, and the weights
    without it; `changes` is the derivative at `values [S, W]`.

    Raises:
        CannotRead: it is none of the known ones.
    """
    some = values[:, list(channels)]
    for name, function in FUNCTIONS.items():
        slope = (function(some + STEP) - function(some - STEP)) / (2 * STEP)
        if not name or slope.abs().min() < 1e-6:
            continue
        try:
            heads = to_heads(changes / slope[:, :, None, None], channels, v_dim)
        except CannotRead:
            continue
        if heads.spread < STRAY:
            return name, heads
    raise CannotRead("the output isn't linear in the values, and no known function explains it")


def name_gate(
    factor: Tensor,
    channels: Sequence[int],
    kv_heads: Sequence[int],
    seen: dict[str, Tensor],
    v_dim: int,
) -> str | None:
    """The name of the gate that a factor `[H, L, C]` is: what a module returned, or a parameter,
    `[L, n]`, or a function of it.
    """
    num_heads, length = factor.shape[:2]
    for name, t in seen.items():
        if t.shape[-1] not in (num_heads * v_dim, num_heads, v_dim, 1) or len(t) not in (1, length):
            continue
        t = t.expand(length, -1)
        width = t.shape[-1]
        by_head = (
            t.unflatten(-1, (num_heads, -1)) if width > v_dim or width == num_heads else t[:, None]
        )
        by_head = by_head.expand(length, num_heads, v_dim)
        chosen = torch.stack(
            [
                by_head[:, h, [c % v_dim for c in channels if c // v_dim == g]]
                for h, g in enumerate(kv_heads)
            ]
        )
        for words, function in FUNCTIONS.items():
            if (function(chosen) - factor).abs().max() <= TOLERANCE * factor.abs().max():
                return f"{words} of {name}" if words else name
    return None
