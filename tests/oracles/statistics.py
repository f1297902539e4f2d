"""Every statistic of a head from the stored probabilities, in float64, row by row as DESIGN.md
words it.

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
MEANS = (
    "entropy",
    "entropy_ratio",
    "confidence",
    "distance",
    "norm",
    "share",
    "cancellation",
    "reach",
)
NAMES = (
    *MEANS,
    *(f"{prefix}{mass}" for prefix in ("", "contribution:", "even:") for mass in MASSES),
)
RECEIVED = ("received", "received_at")
CLASS = "class:some"
OWN = (
    CLASS,
    f"contribution:{CLASS}",
    f"even:{CLASS}",
    "number",
    "squares",
)  # those of `some`, `number` and `squares`


@dataclass(frozen=True)
class Call:
    """One call of one attention module: B texts, H heads, L query rows, S keys, G value heads of
    width Ev.
    """

    weights: (
        Floats  # [B, H, L, S], the probabilities as the model's own eager attention stored them
    )
    values: Floats  # [B, G, S, Ev]
    allowed: Flags  # [B, L, S], True where the mask lets the row read the key
    projection: Floats  # [H*Ev, D], W_O without its bias
    real_queries: Flags  # [B, L], False at padding
    real_keys: Flags  # [B, S]
    ids: Ints | None = (
        None  # [B, S], the tokens of the keys; None in images and sound, and in cross-attention
    )
    special: frozenset[int] | None = None
    cross: bool = False  # keys from another sequence: a query then has no place among the keys
    some: Flags | None = None  # [B, S], a class of keys


@dataclass(frozen=True)
class Statistics:
    """One number a head for each statistic, None where no row has it, and the rows each number
    rests on.
    """

    values: dict[str, Floats | None]
    counts: dict[str, Ints]


def statistics(calls: list[Call], readers: int = 64) -> Statistics:
    """The statistics of one attention module over all its calls. `readers` are needed for a key to
    count in `received`.
    """
    heads = calls[0].weights.shape[1]
    above: dict[str, Floats] = defaultdict(lambda: np.zeros(heads))
    below: dict[str, Floats] = defaultdict(lambda: np.zeros(heads))
    counts: dict[str, Ints] = defaultdict(lambda: np.zeros(heads, dtype=np.int64))

    def mean(name: str, amount: Floats) -> None:
        """One more row, with an amount for each head (NaN: the row doesn't exist for the head)."""
        exists = ~np.isnan(amount)
        above[name] += np.where(exists, amount, 0)
        below[name] += exists
        counts[name] += exists

    def pooled(name: str, part: Floats, whole: Floats) -> None:
        above[name] += part
        below[name] += whole

    for call in calls:
        updates, sizes = head_updates(call), value_sizes(call)
        keys = np.arange(call.weights.shape[3])
        for text in range(len(call.weights)):
            reads = call.allowed[text] & call.real_queries[text][:, None]  # [L, S]
            fit = np.flatnonzero((reads.sum(axis=0) >= readers) & call.real_keys[text])
            if len(fit):
                got = (call.weights[text] * reads).sum(axis=1)[:, fit] / reads.sum(axis=0)[
                    fit
                ]  # [H, fit]
                at = fit[got.argmax(axis=1)] - np.flatnonzero(call.real_keys[text])[0]
                for name, amount in (("received", got.max(axis=1)), ("received_at", at)):
                    above[name] += amount
                    below[name] += 1
                    counts[name] += len(fit)
        for text, row in np.argwhere(call.real_queries):
            may = call.allowed[text, row]  # [S]
            if not may.any():
                continue
            here = place(call, row)
            a, size = call.weights[text, :, row], sizes[text]  # [H, S]
            u = updates[text, :, row]  # [H, D]
            c = a * size
            even = may / may.sum() * size
            entropy = -(a * np.log(np.where(a > 0, a, 1))).sum(axis=1)
            mean("entropy", entropy)
            if may.sum() >= 2:
                mean("entropy_ratio", entropy / np.log(may.sum()))
            mean("confidence", a.max(axis=1))
            if not call.cross:
                mean("distance", (a * abs(keys - here)).sum(axis=1))
            norm, everything = np.linalg.norm(u, axis=1), c.sum(axis=1)
            mean("norm", norm)
            mean("share", u @ u.sum(axis=0) / (u.sum(axis=0) @ u.sum(axis=0)))
            mean(
                "cancellation",
                np.divide(norm, everything, out=np.full(heads, np.nan), where=everything > 0),
            )
            mean("number", a @ number(text, keys))
            mean("squares", a**2 @ np.cos(keys) if row % 3 else np.full(heads, np.nan))
            counts["reach"] += 1
            pooled("reach", everything, even.sum(axis=1))
            for name, members in classes(call, text, here):
                members = members & may
                if not members.any():
                    continue
                mean(name, a[:, members].sum(axis=1))
                pooled(f"contribution:{name}", c[:, members].sum(axis=1), everything)
                pooled(f"even:{name}", even[:, members].sum(axis=1), even.sum(axis=1))

    every = (*NAMES, *RECEIVED, *OWN)
    values = {name: above[name] / below[name] if below[name].all() else None for name in every}
    return Statistics(
        values,
        {name: counts[name] for name in every if not name.startswith(("contribution:", "even:"))},
    )


def number(text: int, keys: Ints) -> Floats:
    """Some number for each key of a text, to be averaged with the weights."""
    return np.cos(keys + 3.0 * text)


def place(call: Call, row: int) -> int:
    """The query's place among the keys of self-attention: its rows are the last of them (all,
    without a cache).
    """
    return row + call.weights.shape[3] - call.weights.shape[2]


def classes(call: Call, text: int, here: int) -> Iterator[tuple[str, Flags]]:
    """The keys that belong to each class for the query at one place, before the mask."""
    keys = np.arange(call.weights.shape[3])
    real = call.real_keys[text]
    yield "first", keys == np.flatnonzero(real)[0]
    if call.some is not None:
        yield CLASS, call.some[text]
    if call.cross:
        return
    yield "previous", keys == here - 1
    yield "self", keys == here
    yield "next", keys == here + 1
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
    updates = [
        call.weights[:, head] @ call.values[:, group] @ out
        for head, group, out in head_slices(call)
    ]
    return np.stack(updates, axis=1)


def value_sizes(call: Call) -> Floats:
    """||v_j W_O^(h)||: [B, H, S]."""
    sizes = [
        np.linalg.norm(call.values[:, group] @ out, axis=-1) for _, group, out in head_slices(call)
    ]
    return np.stack(sizes, axis=1)
