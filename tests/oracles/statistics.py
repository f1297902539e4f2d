"""Every statistic of a head from the stored probabilities, in float64, row by row as DESIGN.md words it.

Nothing here is shared with the library: where the two disagree, one of them is wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

OFFSETS = ("previous", "self", "next")
TOKENS = ("special", "duplicate", "induction")
MASSES = (*OFFSETS, "first", *TOKENS)
MEANS = ("entropy", "entropy_ratio", "confidence", "distance", "norm", "share", "cancellation")
NAMES = (*MEANS, *(f"{prefix}{mass}" for prefix in ("", "contribution:", "even:") for mass in MASSES))


@dataclass(frozen=True)
class Call:
    """One call of one attention module: B texts, H heads, L query rows, S keys, G value heads of width Ev."""

    weights: Floats  # [B, H, L, S], the probabilities as the model's own eager attention stored them
    values: Floats  # [B, G, S, Ev]
    allowed: Flags  # [B, H or 1, L, S], True where the mask lets the row read the key
    projection: Floats  # [H*Ev, D], W_O without its bias
    real_queries: Flags  # [B, L], False at padding
    real_keys: Flags  # [B, S]
    ids: Ints | None = None  # [B, S], the tokens of the keys; None in images and sound, and in cross-attention
    special: frozenset[int] | None = None
    cross: bool = False  # keys from another sequence: a query then has no place among the keys


@dataclass(frozen=True)
class Statistics:
    """One number a head for each statistic, None where no row has it, and the rows each number rests on."""

    values: dict[str, Floats | None]
    counts: dict[str, Ints]


def statistics(calls: list[Call]) -> Statistics:
    """The statistics of one attention module over all its calls."""
    heads = calls[0].weights.shape[1]
    sums: dict[str, Floats] = defaultdict(lambda: np.zeros(heads))
    counts: dict[str, Ints] = defaultdict(lambda: np.zeros(heads, dtype=np.int64))

    def add(name: str, head: int, amount: float) -> None:
        sums[name][head] += amount
        counts[name][head] += 1

    for call in calls:
        updates, sizes = head_updates(call), value_sizes(call)
        texts, _, rows, keys = call.weights.shape
        for text, head, row in np.ndindex(texts, heads, rows):
            may = call.allowed[text, head if call.allowed.shape[1] > 1 else 0, row]
            if not call.real_queries[text, row] or not may.any():
                continue
            a, size, u = call.weights[text, head, row], sizes[text, head], updates[text, head, row]
            c = a * size
            even = may / may.sum()
            entropy = -sum(p * np.log(p) for p in a if p > 0)
            add("entropy", head, entropy)
            if may.sum() >= 2:
                add("entropy_ratio", head, entropy / np.log(may.sum()))
            add("confidence", head, a.max())
            if not call.cross:
                here = row + keys - rows  # queries are the last rows of the keys (all of them without a cache)
                add("distance", head, float((a * abs(np.arange(keys) - here)).sum()))
            add("norm", head, np.linalg.norm(u))
            site = updates[text, :, row].sum(axis=0)
            add("share", head, u @ site / (site @ site))
            if c.sum() > 0:
                add("cancellation", head, np.linalg.norm(u) / c.sum())
            for name, members in classes(call, text, row):
                members = members & may
                if not members.any():
                    continue
                add(name, head, a[members].sum())
                sums[f"contribution:{name}"][head] += c[members].sum()
                sums[f"contribution:{name}:all"][head] += c.sum()
                sums[f"even:{name}"][head] += (even * size)[members].sum()
                sums[f"even:{name}:all"][head] += (even * size).sum()

    values: dict[str, Floats | None] = {}
    for name in NAMES:
        kind, _, mass = name.rpartition(":")
        below = sums[f"{name}:all"] if kind else counts[name].astype(float)
        values[name] = sums[name] / below if below.all() else None
        counts[name] = counts[mass]
    return Statistics(values, dict(counts))


def classes(call: Call, text: int, row: int) -> Iterator[tuple[str, Flags]]:
    """The keys that belong to each class for one query row, before the mask."""
    keys = np.arange(call.weights.shape[3])
    here = row + call.weights.shape[3] - call.weights.shape[2]
    real = call.real_keys[text]
    yield "first", keys == np.flatnonzero(real)[0]
    if call.cross:
        return
    for name, key in zip(OFFSETS, (here - 1, here, here + 1), strict=True):
        yield name, keys == key
    if call.ids is None:
        return
    ids = call.ids[text]
    if call.special is not None:
        yield "special", np.isin(ids, list(call.special))
    yield "duplicate", (keys < here) & (ids == ids[here])
    follows = np.zeros(len(keys), dtype=bool)  # the key before it is real and is the query's token
    follows[1:] = real[:-1] & (ids[:-1] == ids[here])
    yield "induction", (keys < here) & follows


def head_slices(call: Call) -> Iterator[tuple[int, int, Floats]]:
    """Each head with its value head and its rows of W_O."""
    heads, groups, width = call.weights.shape[1], call.values.shape[1], call.values.shape[3]
    for head in range(heads):
        yield head, head // (heads // groups), call.projection[head * width : (head + 1) * width]


def head_updates(call: Call) -> Floats:
    """u_h,i = O_h,i W_O^(h): [B, H, L, D], the output bias left out."""
    updates = [call.weights[:, head] @ call.values[:, group] @ out for head, group, out in head_slices(call)]
    return np.stack(updates, axis=1)


def value_sizes(call: Call) -> Floats:
    """||v_j W_O^(h)||: [B, H, S]."""
    sizes = [np.linalg.norm(call.values[:, group] @ out, axis=-1) for _, group, out in head_slices(call)]
    return np.stack(sizes, axis=1)
