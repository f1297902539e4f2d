"""`Pairs`: divergences of every two heads, as sums that add up, and the nearest head."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import MultiheadError


@dataclass(eq=False)
class Pairs:
    """Sums for heads i < j, in the order of a table's heads; 0 below the diagonal.

    >>> pairs = Pairs.empty(3)
    >>> pairs.sum[0, 1], pairs.rows[0, 1] = 0.5, 2
    >>> both = pairs + pairs
    >>> both.mean()[1].tolist(), Pairs.from_json(both.to_json(), 3).rows[0, 1].item()
    ([0.25, nan, nan], 4)
    """

    sum: NDArray[np.float64]  # [heads, heads], nats
    # [heads, heads]: queries that it is summed over; 0 where two heads can't be compared
    rows: NDArray[np.int64]

    @staticmethod
    def empty(heads: int) -> Pairs:
        return Pairs(np.zeros((heads, heads)), np.zeros((heads, heads), np.int64))

    def __add__(self, other: Pairs) -> Pairs:
        return Pairs(self.sum + other.sum, self.rows + other.rows)

    def mean(self) -> NDArray[np.float64]:
        """Mean divergence of every two heads, `[heads, heads]`, symmetric; NaN where there is none
        (the diagonal).
        """
        upper = np.divide(
            self.sum, self.rows, out=np.full(self.sum.shape, np.nan), where=self.rows > 0
        )
        return np.where(np.isnan(upper), upper.T, upper)

    def nearest(self) -> NDArray[np.float64]:
        """The smallest divergence of each head, as a table's sums `[heads, 7]`; 0 for a head that
        can't be compared.
        """
        apart, rows = self.mean(), self.rows + self.rows.T
        apart[np.isnan(apart)] = np.inf
        found = np.zeros((len(apart), 7))
        if len(apart):
            at = np.arange(len(apart)), apart.argmin(1)
            some = rows[at] > 0
            found[:, 1] = found[:, 2] = rows[at]
            found[some, 0] = apart[at][some] * rows[at][some]
        return found

    def to_json(self) -> dict[str, Any]:
        """The pairs i < j in row-major order: some 20 bytes a pair (0.7 MB for 270 heads)."""
        upper = np.triu_indices(len(self.sum), 1)
        return {"sum": self.sum[upper].tolist(), "rows": self.rows[upper].tolist()}

    @staticmethod
    def from_json(data: Any, heads: int) -> Pairs:
        """The result of `to_json` for a table of that many heads; `MultiheadError` for anything
        else.
        """
        found, upper = Pairs.empty(heads), np.triu_indices(heads, 1)
        for name, kind, into in (("sum", (int, float), found.sum), ("rows", int, found.rows)):
            values = data[name] if isinstance(data, dict) and name in data else None
            if (
                not isinstance(values, list)
                or len(values) != len(upper[0])
                or not all(isinstance(v, kind) and 0 <= v < 2**53 for v in values)
            ):
                raise MultiheadError(
                    f"pairs {name} is {str(values)[:60]!r}, expected {len(upper[0])} numbers"
                    " that aren't negative"
                )
            into[upper] = values
        return found


class HasPairs(Protocol):
    """A table that was read with pairs of heads."""

    heads: list[Any]
    pairs: Pairs | None


def find_nearest(table: HasPairs) -> list[tuple[str | None, float]]:
    """Find for each head the one with the most similar attention.

    Returns:
        A label and the divergence in nats for each head, in the order of `table.heads`; (None, NaN)
        for a head that can't be compared.

    Raises:
        MultiheadError: the table has no pairs, for it was read without `statistics="nearest"`.

    >>> import multihead
    >>> model, tokenizer = multihead.load_builtin()
    >>> text = "the cat and the dog and the cat"
    >>> table = multihead.read(model, text, tokenizer=tokenizer, statistics="nearest")
    >>> (label, divergence), *_ = multihead.reader.find_nearest(table)
    >>> label in {head.head for head in table.heads}, 0 < divergence < math.log(2)
    (True, True)
    """
    if table.pairs is None:
        raise MultiheadError(
            'the table has no pairs of heads; read with statistics="nearest" (--statistic nearest)'
        )
    apart = table.pairs.mean()
    apart[np.isnan(apart)] = np.inf
    best = apart.argmin(1) if len(apart) else []
    return [
        (table.heads[n].head, float(row[n])) if np.isfinite(row[n]) else (None, math.nan)
        for row, n in zip(apart, best)
    ]
