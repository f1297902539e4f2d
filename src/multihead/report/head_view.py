"""`view_calls`: the weights of a check, head by head, as a page shows them: A as read out, A of the
definition, their difference, and the first place where they differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checks.patterns import name_pattern
from ..checks.report import CallWeights
from .colours import level

# Differences up to this count as none.
TOLERANCE = 1e-6
ZERO = 1e-9  # weights up to this count as none
MOST = 24  # queries and keys of a table
READ, EXPECTED, DIFFERENCE = "A as read out", "A of the definition", "difference"

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class TableCell:
    """One entry: its text, and the classes of its colour."""

    text: str
    style: str


@dataclass(frozen=True)
class MatrixView:
    """One of the three tables of a head: its rows, or why there are none."""

    name: str
    rows: list[list[TableCell]]
    reason: str = ""


@dataclass(frozen=True)
class HeadView:
    """One head of one call, batch element 0.

    Attributes:
        call, head: their numbers.
        weights, expected: A, `[L, S]`; None where there is none.
        why_no_weights, why_no_expected: the reason then.
        first: the first query and key at which they differ; None if they don't, or can't be
            compared.
        largest: the largest difference, NaN where one of the two is NaN alone; None if they can't
            be compared.
        others: numbers of other batch elements in which they differ.
        pattern, expected_pattern: which keys the queries read, as a part of a sentence.
    """

    call: int
    head: int
    weights: Matrix | None
    expected: Matrix | None
    why_no_weights: str
    why_no_expected: str
    first: tuple[int, int] | None
    largest: float | None
    others: tuple[int, ...]
    pattern: str
    expected_pattern: str

    @property
    def id(self) -> str:
        return f"call{self.call}-head{self.head}"

    @property
    def differs(self) -> bool:
        """Whether the weights of any batch element differ from the definition's."""
        return self.first is not None or bool(self.others)

    @property
    def why_not_read(self) -> str:
        """Why there is no A as read out, in a sentence."""
        return f"Not read out: {self.why_no_weights or 'the check gives no reason'}."

    @property
    def why_not_expected(self) -> str:
        """Why there is no A of the definition, in a sentence."""
        return f"There is none: {self.why_no_expected or 'the check gives no reason'}."

    @property
    def queries(self) -> range:
        """The queries that are shown, the first at which they differ among them."""
        return self._window(0)

    @property
    def keys(self) -> range:
        return self._window(1)

    @property
    def size(self) -> tuple[int, int]:
        shown = self.weights if self.weights is not None else self.expected
        return (0, 0) if shown is None else (shown.shape[0], shown.shape[1])

    @property
    def num_cells(self) -> int:
        """Cells of all tables together."""
        given = sum(m is not None for m in (self.weights, self.expected))
        return (given + (self.largest is not None)) * len(self.queries) * len(self.keys)

    def _window(self, axis: int) -> range:
        size = self.size[axis]
        first = 0 if self.first is None else self.first[axis]
        start = 0 if first < MOST else min(first - MOST // 2, size - MOST)
        return range(start, min(size, start + MOST))

    def cut(self, matrix: Matrix) -> Matrix:
        """The rows and columns that are shown."""
        return matrix[np.ix_(list(self.queries), list(self.keys))]

    @property
    def verdict(self) -> str:
        """How the two compare, in a sentence; empty where there is only A as read out."""
        if self.weights is None:
            return self.why_not_read
        if self.expected is None:
            return ""
        if self.largest is None:
            shapes = (list(m.shape) for m in (self.weights, self.expected))
            return "They can't be compared: {} was read out, the definition has {}.".format(*shapes)
        if self.first is None:
            others = _list(self.others)
            also = f" in batch element 0, but not in {others}" if self.others else ""
            return f"Both are equal{also} (to {self.largest:.1g})."
        i, j = self.first
        read, expected = self.weights[i, j], self.expected[i, j]
        text = (
            f"They differ first at query {i}, key {j}: {_number(read)} was read out,"
            f" {_number(expected)} is the definition's."
        )
        if np.isnan(self.largest):
            return text
        i, j = divmod(int(np.abs(_subtract(self.weights, self.expected)).argmax()), self.size[1])
        place = "" if (i, j) == self.first else f", at query {i}, key {j}"
        return f"{text} The largest difference is {_number(self.largest)}{place}."

    def tables(self, scale: float, difference: float) -> list[MatrixView]:
        """The three tables, coloured from 0 to `scale`, and to `difference` either way."""
        views = [
            self._table(READ, self.weights, self.why_not_read, scale),
            self._table(EXPECTED, self.expected, self.why_not_expected, scale),
        ]
        if self.weights is not None and self.expected is not None and self.largest is not None:
            gap = _subtract(self.weights, self.expected)
            rows = [
                [TableCell(_short(v, sign=True), _difference_style(v, difference)) for v in row]
                for row in self.cut(gap).tolist()
            ]
            return [*views, MatrixView(DIFFERENCE, self._mark(rows))]
        missing = [
            name
            for name, matrix in {READ: self.weights, EXPECTED: self.expected}.items()
            if matrix is None
        ]
        why = f"There is no {' and no '.join(missing)} to compare." if missing else self.verdict
        return [*views, MatrixView(DIFFERENCE, [], why)]

    def _table(self, name: str, matrix: Matrix | None, why: str, scale: float) -> MatrixView:
        if matrix is None:
            return MatrixView(name, [], why)
        rows = [
            [TableCell(_short(v), _weight_style(v, scale)) for v in row]
            for row in self.cut(matrix).tolist()
        ]
        return MatrixView(name, self._mark(rows))

    def _mark(self, rows: list[list[TableCell]]) -> list[list[TableCell]]:
        if self.first is not None:
            i, j = self.first[0] - self.queries.start, self.first[1] - self.keys.start
            rows[i][j] = TableCell(rows[i][j].text, f"{rows[i][j].style} first")
        return rows

    def to_json(self) -> dict[str, Any]:
        """The numbers that are shown, for what is pointed at."""
        return {
            "queries": self.queries.start,
            "keys": self.keys.start,
            "read": _rounded(None if self.weights is None else self.cut(self.weights)),
            "expected": _rounded(None if self.expected is None else self.cut(self.expected)),
        }


@dataclass(frozen=True)
class CallView:
    """One call: how it was called, its heads, and the scales of their colours."""

    number: int
    call: str
    heads: list[HeadView]
    scale: float
    difference: float
    batch: int
    note: str

    @property
    def why_nothing(self) -> str:
        """Why it has neither A, in a sentence; empty if it has one."""
        first = self.heads[0]
        if first.weights is not None or first.expected is not None:
            return ""
        if first.why_no_expected in ("", first.why_no_weights):
            return first.why_not_read
        return f"{first.why_not_read} A of the definition: {first.why_no_expected}."


def view_calls(calls: Sequence[CallWeights]) -> list[CallView]:
    """The views of all calls; one without any weights has one head, with the reasons.

    >>> import torch
    >>> a = torch.eye(2, dtype=torch.float64)[None, None]
    >>> [call] = view_calls([CallWeights("alone", a, a.flip(-1))])
    >>> call.heads[0].first, call.heads[0].largest
    ((0, 0), 1.0)
    """
    views = []
    for number, call in enumerate(calls):
        heads = list(_heads(number, call))
        finite = [
            np.abs(m[np.isfinite(m)]).max(initial=0.0)
            for head in heads
            for m in (head.weights, head.expected)
            if m is not None
        ]
        gaps = [h.largest for h in heads if h.largest is not None and np.isfinite(h.largest)]
        difference = max(gaps, default=0.0)
        batches = [len(t) for t in (call.weights, call.expected) if t is not None]
        views.append(
            CallView(
                number,
                call.call,
                heads,
                float(max(finite, default=0.0)) or 1.0,
                difference if difference > TOLERANCE else 0.0,
                max(batches, default=1),
                call.note,
            )
        )
    return views


def _heads(number: int, call: CallWeights) -> Iterator[HeadView]:
    a, b = (None if t is None else t.double().numpy() for t in (call.weights, call.expected))
    counts = [0 if t is None else t.shape[1] for t in (a, b)]
    for head in range(max(*counts, 1)):
        whys = [call.why_no_weights, call.why_no_expected]
        of_head: list[Matrix | None] = []  # [B, L, S]
        for n, t in enumerate((a, b)):
            of_head.append(None if t is None or head >= counts[n] else t[:, head])
            if t is not None and head >= counts[n]:
                who, of = ("the definition", "read out") if n else ("the code", "expected")
                whys[n] = f"{who} has {counts[n]} heads, and {counts[1 - n]} were {of}"
        weights, expected = of_head
        weights = _without_noise(weights, expected)
        first, largest, others = _compare(weights, expected)
        yield HeadView(
            number,
            head,
            None if weights is None else weights[0],
            None if expected is None else expected[0],
            whys[0],
            whys[1],
            first,
            largest,
            others,
            _pattern(weights),
            _pattern(expected),
        )


def _without_noise(weights: Matrix | None, expected: Matrix | None) -> Matrix | None:
    """Weights that are 0 by the definition, and were read out as 0 up to rounding in float32."""
    if weights is None or expected is None or weights.shape != expected.shape:
        return weights
    return np.where((expected == 0) & (np.abs(weights) <= TOLERANCE), 0.0, weights)


def _compare(
    a: Matrix | None, b: Matrix | None
) -> tuple[tuple[int, int] | None, float | None, tuple[int, ...]]:
    """First place and largest difference in batch element 0, and other elements that differ."""
    if a is None or b is None or a.shape != b.shape:
        return None, None, ()
    gap = np.abs(_subtract(a, b))
    parts = ~(gap <= TOLERANCE)
    places = np.argwhere(parts[0])
    first = None if not len(places) else (int(places[0][0]), int(places[0][1]))
    others = tuple(n for n in range(1, len(a)) if parts[n].any())
    return first, float(gap[0].max(initial=0.0)), others


def _subtract(a: Matrix, b: Matrix) -> Matrix:
    """a - b, 0 where both are NaN or the same infinity."""
    with np.errstate(invalid="ignore"):
        return np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, a - b)


def _pattern(m: Matrix | None) -> str:
    import torch

    if m is None or m.shape[1] != m.shape[2] or not np.isfinite(m).all():
        return ""
    return name_pattern(torch.from_numpy(np.abs(m).max(0) > ZERO)).description


def _weight_style(value: float, scale: float) -> str:
    if not np.isfinite(value):
        return "nan"
    if abs(value) <= ZERO:
        return "none"
    return f"b{level(-value / scale)}" if value < 0 else f"c{level(value / scale)}"


def _difference_style(value: float, most: float) -> str:
    if not np.isfinite(value):
        return "nan"
    share = abs(value) / most if most and abs(value) > TOLERANCE else 0.0
    return f"{'a' if value > 0 else 'b'}{level(share)}" if share else "none"


def _short(value: float, *, sign: bool = False) -> str:
    """A value in a cell: two decimals, "0" for none."""
    if not np.isfinite(value):
        return "NaN" if np.isnan(value) else "∞" if value > 0 else "−∞"
    if abs(value) <= (TOLERANCE if sign else ZERO):
        return "0"
    text = f"{abs(value):.2f}" if abs(value) < 99.5 else f"{abs(value):.0e}"
    return f"{'−' if value < 0 else '+' if sign else ''}{text}"


def _number(value: float) -> str:
    return "NaN" if np.isnan(value) else f"{value:.4g}"


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")


def _rounded(m: Matrix | None) -> list[list[float | None]] | None:
    if m is None:
        return None
    return [[float(f"{v:.6g}") if np.isfinite(v) else None for v in row] for row in m.tolist()]
