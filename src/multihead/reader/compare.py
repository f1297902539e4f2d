"""`compare`: the differences of two tables of one model, before and after a training or on two
texts.
"""

from __future__ import annotations

import csv
import io
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import MissingDependency, MultiheadError
from ..io import write_text
from ..outside import clean
from ..terminal import Grid, Paragraph, Part, format_number, to_text
from .digest import MIXED
from .roles import assign_roles, is_resting
from .statistics import columns, describe
from .table import Table

NAMES = ("head", "column", "a", "b", "difference", "error", "z")
FORMATS = ("#.3g", "#.3g", "+#.3g", "#.2g", "+.1f")  # of the numbers among NAMES
MOST = 20  # heads that are printed


@dataclass(frozen=True)
class Comparison:
    """Differences from table `a` to table `b`, over the heads that are in both.

    >>> import multihead
    >>> model, tokenizer = multihead.load_builtin()
    >>> table = multihead.read(model, "a cat and a cat", tokenizer=tokenizer)
    >>> multihead.compare(table, table).roles
    []
    """

    names: tuple[str, str]
    """Model, text and size of `a` and of `b`."""
    heads: list[str]
    """Labels of the heads in both."""
    only: tuple[list[str], list[str]]
    """Labels of the heads in `a` alone and in `b` alone."""
    roles: list[dict[str, Any]]
    """Heads whose roles changed, or that began or ceased to rest: `head`, and lists of words `a`
    and `b`."""
    changes: list[dict[str, Any]]

    def rows(self) -> list[dict[str, Any]]:
        """One dict for each column and head, the largest difference of a column first: `head`,
        `column`, `a`, `b`, `difference` (b - a), its standard `error` over documents and `z`, their
        quotient; None where there is none.

        The error is that of independent texts. For two models on the same texts it is too large
        rather than too small.
        """
        return [dict(row) for row in self.changes]

    def to_pandas(self) -> Any:
        """The rows as a data frame.

        Raises:
            MissingDependency: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise MissingDependency(
                "to_pandas() needs pandas: pip install 'multihead[pandas]'; rows() needs nothing"
            ) from error
        frame = pandas.DataFrame(self.changes, columns=list(NAMES))
        return frame.astype(dict.fromkeys(NAMES[2:], float))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `.json` (everything) or `.csv` (the rows), complete or not at all.

        Raises:
            MultiheadError: the name ends in neither, or its folder doesn't exist.
        """
        path = Path(path)
        if path.suffix == ".csv":
            out = io.StringIO()
            writer = csv.DictWriter(out, NAMES, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.changes)
            text = out.getvalue()
        elif path.suffix == ".json":
            data = {
                "format": "multihead-comparison",
                "version": 1,
                "a": self.names[0],
                "b": self.names[1],
                "heads": self.heads,
                "only_a": self.only[0],
                "only_b": self.only[1],
                "roles": self.roles,
                "rows": self.changes,
            }
            text = json.dumps(data, allow_nan=False)
        else:
            raise MultiheadError(f"path={str(path)!r}: expected a name that ends in .json or .csv")
        write_text(path, text)

    def __str__(self) -> str:
        parts: list[Part] = [Paragraph(clean(n), side) for side, n in zip("ab", self.names)]
        parts.append(Paragraph(f"{len(self.heads):,} in both", "heads"))
        for side, labels in zip("ab", self.only):
            if labels:
                more = f" and {len(labels) - MOST:,} more" if len(labels) > MOST else ""
                listed = clean(", ".join(labels[:MOST]))
                parts.append(Paragraph(f"{listed}{more}", f"only in {side}"))
        return to_text([*parts, "", *self._changed_roles(), *self._largest_differences()])

    def _changed_roles(self) -> list[Part]:
        title = f"roles changed: {len(self.roles):,} of {len(self.heads):,} heads"
        title += f", of which {MOST} are shown" if len(self.roles) > MOST else ""
        rows = [
            [row["head"], *(", ".join(row[side]) or MIXED for side in ("a", "b"))]
            for row in self.roles[:MOST]
        ]
        if not rows:
            return [title]
        return [Grid(["head", "roles in a", "roles in b"], rows, title, left=(0, 1, 2))]

    def _largest_differences(self) -> list[Part]:
        """Of each column the head that changed most."""
        most: dict[str, list[str]] = {}
        for row in self.changes:
            column = row["column"]
            if row["difference"] is None or column.startswith("even:") or column in most:
                continue
            figures = [np.nan if row[name] is None else row[name] for name in NAMES[2:]]
            most[column] = [column, row["head"], *map(format_number, figures, FORMATS)]
        names = ["column", "head", "a", "b", "b - a", "error", "z"]
        title = "the largest difference of each column"
        return ["", Grid(names, list(most.values()), title, left=(0, 1))] if most else []


def compare(a: Table, b: Table) -> Comparison:
    """Compare two tables of one model: before and after a training, or on two texts.

    Heads are matched by their labels. `load_table` reads saved tables.

    Raises:
        TypeError: `a` or `b` is not a table.
        MultiheadError: no head is in both.

    >>> import multihead
    >>> model, tokenizer = multihead.load_builtin()
    >>> a = multihead.read(model, "a cat and a cat", tokenizer=tokenizer)
    >>> b = multihead.read(model, "the dog sat on the mat", tokenizer=tokenizer)
    >>> multihead.compare(a, b).rows()[0]["column"]
    'entropy'
    """
    for name, table in (("a", a), ("b", b)):
        if not isinstance(table, Table):
            raise TypeError(
                f"{name} is a {type(table).__name__}: expected a table, as multihead.read or"
                " load_table returns"
            )
    index_a, index_b = ({head.head: n for n, head in enumerate(t.heads)} for t in (a, b))
    both = [label for label in index_a if label in index_b]
    if not both:
        raise MultiheadError(
            f"a and b have no head in common (a: {', '.join(list(index_a)[:3])}; b:"
            f" {', '.join(list(index_b)[:3])}): compare tables of models of one architecture"
        )
    rows_a, rows_b = [index_a[label] for label in both], [index_b[label] for label in both]
    changes = []
    conflicting = a.conflicting_classes(b)
    measured = {*a.columns, *b.columns}  # with classes, relations and user-defined statistics
    for column in (c for c in columns(measured) if c in measured):
        (x, error_x), (y, error_y) = _values(a, column, rows_a), _values(b, column, rows_b)
        error, change = np.hypot(error_x, error_y), y - x
        if describe(column).name.removeprefix("class:") in conflicting:
            change = np.full(len(both), np.nan)
        z = np.divide(change, error, out=np.full(len(x), np.nan), where=error > 0)
        order = np.argsort(-np.nan_to_num(np.abs(change), nan=-1.0), kind="stable")
        figures = [
            [None if np.isnan(v) else float(v) for v in values]
            for values in (x, y, change, error, z)
        ]
        changes += [
            dict(zip(NAMES, (both[n], column, *(values[n] for values in figures)))) for n in order
        ]
    words_a, words_b = _roles_and_rest(a), _roles_and_rest(b)
    changed = [
        {"head": label, "a": words_a[m], "b": words_b[n]}
        for label, m, n in zip(both, rows_a, rows_b)
        if set(words_a[m]) != set(words_b[n])
    ]
    only = (
        [label for label in index_a if label not in index_b],
        [label for label in index_b if label not in index_a],
    )
    return Comparison((_name(a), _name(b)), both, only, changed, changes)


def _values(
    table: Table, column: str, rows: list[int]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """A column's values and errors at these heads, NaN where the table lacks it."""
    if column not in table.columns:
        nothing = np.full(len(rows), np.nan)
        return nothing, nothing
    return table.value(column)[rows], table.error(column)[rows]


def _roles_and_rest(table: Table) -> list[list[str]]:
    resting = is_resting(table)
    return [roles + ["resting"] * bool(rests) for roles, rests in zip(assign_roles(table), resting)]


def _name(table: Table) -> str:
    model, text = table.meta.get("model", ""), table.meta.get("text", "")
    return f"{model or 'a model'}, {text or 'a text'} ({table.meta.get('tokens', 0):,} tokens)"
