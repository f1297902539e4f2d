"""Two tables of one model side by side: before and after a training, or on two texts."""

from __future__ import annotations

import csv
import io
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import MultiheadError
from .digest import MIXED, Cell, Section, clean, number
from .roles import resting, roles
from .statistics import columns, describe
from .table import Table, write_atomically

NAMES = ("head", "column", "a", "b", "difference", "error", "z")
MOST = 20  # heads that a printed list names


@dataclass(frozen=True)
class Comparison:
    """What changed from table `a` to table `b`, over the heads that are in both."""

    names: tuple[str, str]  # the models, or what else the tables are called
    heads: list[str]  # labels of the heads in both
    only: tuple[list[str], list[str]]  # those in `a` alone, those in `b` alone
    roles: list[
        dict[str, Any]
    ]  # heads whose roles or rest changed: head, a, b, each a list of words
    changes: list[dict[str, Any]]

    def rows(self) -> list[dict[str, Any]]:
        """One dict a head and column, the largest difference of a column first: `head`, `column`,
        `a`, `b`, `difference` (b - a), its standard `error` over documents and `z`, their quotient;
        None where there is none.

        The error is that of independent texts. Of two models on the same texts it is too large
        rather than too small.
        """
        return [dict(row) for row in self.changes]

    def to_pandas(self) -> Any:
        """The rows as a data frame (needs pandas)."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError(
                "to_pandas() needs pandas: pip install 'multihead[pandas]'; rows() needs nothing"
            ) from error
        frame = pandas.DataFrame(self.changes, columns=list(NAMES))
        return frame.astype(dict.fromkeys(NAMES[2:], float))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `.json` (everything) or `.csv` (the rows), whole or not at all."""
        path = Path(path)
        if path.suffix == ".csv":
            out = io.StringIO()
            writer = csv.DictWriter(out, NAMES, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.changes)
            text = out.getvalue()
        elif path.suffix == ".json":
            text = json.dumps(
                {
                    "format": "multihead-comparison",
                    "version": 1,
                    "a": self.names[0],
                    "b": self.names[1],
                    "heads": self.heads,
                    "only_a": self.only[0],
                    "only_b": self.only[1],
                    "roles": self.roles,
                    "rows": self.changes,
                },
                allow_nan=False,
            )
        else:
            raise MultiheadError(f"path={str(path)!r}: expected a name that ends in .json or .csv")
        write_atomically(path, text)

    def sections(self) -> list[Section]:
        """The heads whose roles changed, and of each column the head that changed most."""
        words = [
            [Cell(row["head"]), *(Cell(", ".join(row[side]) or MIXED) for side in ("a", "b"))]
            for row in self.roles[:MOST]
        ]
        title = f"roles changed: {len(self.roles):,} of {len(self.heads):,} heads"
        title += f", of which {MOST} are shown" if len(self.roles) > MOST else ""
        most: dict[str, list[Cell]] = {}
        for row in self.changes:
            if (
                row["difference"] is not None
                and not row["column"].startswith("even:")
                and row["column"] not in most
            ):
                figures = [np.nan if row[name] is None else row[name] for name in NAMES[2:]]
                shown = [
                    number(value, style)
                    for value, style in zip(figures, ("#.3g", "#.3g", "+#.3g", "#.2g", "+.1f"))
                ]
                most[row["column"]] = [Cell(row["column"]), Cell(row["head"]), *map(Cell, shown)]
        return [
            Section(title, "title", ["head", "roles in a", "roles in b"], words),
            Section(
                "the largest difference of each column",
                "title",
                ["column", "head", "a", "b", "b - a", "error", "z"],
                list(most.values()),
            ),
        ]

    def __str__(self) -> str:
        from .console import grid_text

        lines = [f"{side}  {clean(name)}" for side, name in zip("ab", self.names)]
        lines.append(f"heads  {len(self.heads):,} in both")
        for side, labels in zip("ab", self.only):
            if labels:
                more = f" and {len(labels) - MOST:,} more" if len(labels) > MOST else ""
                lines.append(f"only in {side}  {clean(', '.join(labels[:MOST]))}{more}")
        parts = [part for part in self.sections() if part.rows or part.title.startswith("roles")]
        return "\n".join(
            lines
            + [f"\n{part.title}" + ("\n" + grid_text(part) if part.rows else "") for part in parts]
        )


def compare(a: Table, b: Table) -> Comparison:
    """What changed from one table to another: before and after a training, or from one text to
    another.

    Heads are matched by their labels. Saved tables come back with `load_table`.

    Raises:
        TypeError: not two tables.
        ValueError: no head is in both.

    >>> import multihead
    >>> model, tokenizer = multihead.load_builtin()
    >>> a, b = (multihead.read(model, text, tokenizer=tokenizer) for text in ("a cat and a cat", "the dog sat on the mat"))
    >>> multihead.compare(a, b).rows()[0]["column"]
    'entropy'
    """
    for name, table in (("a", a), ("b", b)):
        if not isinstance(table, Table):
            raise TypeError(
                f"{name} is a {type(table).__name__}: expected a table, as multihead.read or"
                " load_table gives"
            )
    at = [{head.head: n for n, head in enumerate(table.heads)} for table in (a, b)]
    both = [label for label in at[0] if label in at[1]]
    if not both:
        raise MultiheadError(
            f"a and b have no head in common (a: {', '.join(list(at[0])[:3])}; b:"
            f" {', '.join(list(at[1])[:3])}): compare tables of models of one architecture"
        )
    rows_a, rows_b = ([at[side][label] for label in both] for side in (0, 1))
    changes = []
    apart = a.two_classes(b)
    held = {*a.columns, *b.columns}  # classes, relations and statistics of one's own among them
    for column in (c for c in columns(held) if c in held):
        (x, error_x), (y, error_y) = (
            (
                (t.value(column)[rows], t.error(column)[rows])
                if column in t.columns
                else (np.full(len(rows), np.nan),) * 2
            )
            for t, rows in ((a, rows_a), (b, rows_b))
        )
        error, change = np.hypot(error_x, error_y), y - x
        if describe(column).name.removeprefix("class:") in apart:  # two patterns under one name
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
    held_a, held_b = (
        [held + ["resting"] * bool(rests) for held, rests in zip(roles(table), resting(table))]
        for table in (a, b)
    )
    changed = [
        {"head": label, "a": held_a[m], "b": held_b[n]}
        for label, m, n in zip(both, rows_a, rows_b)
        if set(held_a[m]) != set(held_b[n])
    ]
    only = (
        [label for label in at[0] if label not in at[1]],
        [label for label in at[1] if label not in at[0]],
    )
    names = (_name(a), _name(b))
    return Comparison(names, both, only, changed, changes)


def _name(table: Table) -> str:
    model, text = table.meta.get("model", ""), table.meta.get("text", "")
    return f"{model or 'a model'}, {text or 'a text'} ({table.meta.get('tokens', 0):,} tokens)"
