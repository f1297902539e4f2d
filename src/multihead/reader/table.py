"""`Table`: the values of every head, printed, as rows, and saved so that they load again."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import MissingDependency, MultiheadError
from ..io import read_regular_file, write_text
from ..terminal import print_parts
from .baseline import is_baseline
from .console import STYLES, html_table, table_parts, text_table
from .head_pairs import Pairs
from .moments import TERMS
from .roles import assign_roles, is_resting
from .statistics import columns, is_relation
from .statistics.columns import is_description
from .sums import Head, HeadSums

if TYPE_CHECKING:
    from rich.console import Console

FORMAT, VERSION = "multihead-table", 1
# Column names that a file may hold.
COLUMN = re.compile(r"(contribution:|even:)?((class|relation|probe):)?\^?[\w.:-]{1,80}")
# Number of layers, and of heads in a layer, that a file may claim: the page draws that many.
MOST = 100_000


class Table(HeadSums):
    """Statistics of every head of a model. Printed, it shows the strongest heads of each role.

    `value(column)`, `count(column)` and `error(column)` are arrays over `heads`; `rows()` has one
    dict for each head. The numbers are sums, so tables of one model add up: `a + b` is the table of
    both texts.

    >>> from multihead.reader.sums import Head
    >>> from multihead import Table
    >>> table = Table([Head("L0.H0", "attn", 0, 0, 0, "self")])
    >>> table.add("self", 0, x=[1.5], y=[3.0], rows=[3])
    >>> (table + table).value("self").tolist(), (table + table).count("self").tolist()
    ([0.5], [6])
    """

    def rows(self, *, errors: bool = False) -> list[dict[str, Any]]:
        """One dict for each head: label and place, `roles`, `resting`, and every column (None where
        it is empty).

        With `errors` also `error:COLUMN`, the standard error over documents, where there is one.
        """
        values = {c: self.value(c) for c in columns(self.sums)}
        if errors:
            measured = {c: self.error(c) for c in self.columns}
            values |= {f"error:{c}": e for c, e in measured.items() if np.isfinite(e).any()}
        roles, resting = assign_roles(self), is_resting(self)
        return [
            asdict(head)
            | {"roles": roles[n], "resting": bool(resting[n])}
            | {c: None if np.isnan(v[n]) else float(v[n]) for c, v in values.items()}
            for n, head in enumerate(self.heads)
        ]

    def to_pandas(self, *, errors: bool = False) -> Any:
        """The rows as a data frame, indexed by the heads' labels; `errors` as in `rows`.

        Raises:
            MissingDependency: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise MissingDependency(
                "to_pandas() needs pandas: pip install 'multihead[pandas]'; rows() needs nothing"
            ) from error
        frame = pandas.DataFrame(self.rows(errors=errors)).set_index("head")
        # As floats, an empty entry is NaN, as in value().
        return frame.astype(dict.fromkeys(columns(self.sums), float))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `.json` (the sums, which `load_table` reads back exactly) or `.csv` (the values),
        complete or not at all.

        Raises:
            MultiheadError: the name ends in neither, or its folder doesn't exist.
        """
        path = Path(path)
        if path.suffix == ".csv":
            text = self._to_csv()
        elif path.suffix == ".json":
            text = self.to_json()
        else:
            raise MultiheadError(
                f"path={str(path)!r}: expected a name that ends in .json (loads again) or .csv"
                " (values)"
            )
        write_text(path, text)

    def to_json(self) -> str:
        """The content of a saved `.json` file: the sums, exactly."""
        data = {
            "format": FORMAT,
            "version": VERSION,
            "meta": self.meta,
            "reasons": self.reasons,
            "heads": [asdict(head) for head in self.heads],
            "sums": {column: sums.tolist() for column, sums in self.sums.items()},
        }
        if self.pairs is not None:
            data["pairs"] = self.pairs.to_json()
        return json.dumps(data, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Table:
        """The table that `to_json` wrote.

        Raises:
            ValueError, KeyError, TypeError: anything else, with what is wrong with it.
        """
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise KeyError(f"format {data['format']!r}")
        if data["version"] != VERSION:
            raise MultiheadError(
                f"version {data['version']}, where this multihead reads version {VERSION}"
            )
        return _from_untrusted(data)

    def _to_csv(self) -> str:
        rows = self.rows(errors=True)
        out = io.StringIO()
        writer = csv.DictWriter(out, list(rows[0]) if rows else ["head"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(row | {"roles": " ".join(row["roles"])} for row in rows)
        return out.getvalue()

    def __str__(self) -> str:
        return text_table(self)

    def __repr__(self) -> str:
        tokens = f"{self.meta.get('tokens', 0):,}"
        return f"<Table of {len(self.heads)} heads, {len(self.columns)} columns, {tokens} tokens>"

    def _repr_html_(self) -> str:
        return html_table(self)


def load_table(path: str | os.PathLike[str]) -> Table:
    """Load a table that `Table.save` or `multihead read --json` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        MultiheadError: it is not a table, is damaged, or is of a newer version.

    >>> import tempfile
    >>> import multihead
    >>> model, tokenizer = multihead.load_builtin()
    >>> table = multihead.read(model, "the cat and the cat", tokenizer=tokenizer)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     table.save(f"{folder}/heads.json")
    ...     multihead.load_table(f"{folder}/heads.json")
    <Table of 32 heads, ... columns, 8 tokens>
    """
    if not Path(path).exists():
        raise FileNotFoundError(
            f"path={str(path)!r}: there is no such file; expected the JSON that"
            " table.save('x.json') or 'multihead read --json' writes"
        )
    try:
        return Table.from_json(read_regular_file(path, f"path={str(path)!r}").decode("utf-8"))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else error
        raise MultiheadError(
            f"path={str(path)!r} isn't a table of heads ({what}); expected the JSON that"
            " table.save('x.json') or 'multihead read --json' writes"
        ) from error


def print_table(
    table: Table,
    console: Console | None = None,
    *,
    top: int = 5,
    all_heads: bool = False,
    reasons: bool = False,
) -> None:
    """Print a `Table`: in colour and within the terminal's width, or into a pipe as plain text with
    every column.

    `top`, `all_heads` and `reasons` choose the rows as in `text_table`: a row for each head up to
    32 heads or with `all_heads`, else the `top` heads of each role; `reasons` adds why columns are
    empty. Without a `console` it prints to standard output.

    Raises:
        TypeError: `table` is not a table.

    >>> import multihead
    >>> model, tokenizer = multihead.load_builtin()
    >>> table = multihead.read(model, "the cat and the cat", tokenizer=tokenizer)
    >>> multihead.reader.print_table(table)  # doctest: +ELLIPSIS
    model  ...
    """
    if not isinstance(table, Table):
        raise TypeError(f"table is a {type(table).__name__}: expected a multihead.Table")
    from rich.console import Console

    console = console or Console()
    width = console.width if console.is_terminal else None
    parts = table_parts(table, width, top, all_heads, reasons)
    print_parts(parts, console, width=width, styles=STYLES)


META = {
    "documents": int,
    "tokens": int,
    "notes": list,
    "model": str,
    "text": str,
    "relations": dict,
    "fingerprint": str,
    "classes": dict,
    "statistics": dict,
}


def _from_untrusted(data: Any) -> Table:
    """A table from parsed JSON, with the type of each part checked: the file can come from
    anywhere.
    """

    def expect(good: bool, what: str, value: Any) -> None:
        if not good:
            raise MultiheadError(f"{what} is {str(value)[:60]!r}")

    def are_strings(values: Any) -> bool:
        return all(isinstance(value, str) for value in values)

    meta, reasons = data["meta"], data["reasons"]
    expect(isinstance(meta, dict), "meta", meta)
    for key, kind in META.items():
        expect(key not in meta or isinstance(meta[key], kind), f"meta {key}", meta.get(key))
    notes, classes = meta.get("notes", []), meta.get("classes", {})
    expect(are_strings(notes), "meta notes", notes)
    expect(are_strings(classes.values()), "meta classes", classes)
    declared = meta.get("statistics", {})
    expect(all(map(is_description, declared.values())), "meta statistics", declared)
    for column, value in meta.get("relations", {}).items():
        expect(is_relation(column) and is_baseline(value), f"meta relations {column}", value)
    is_text = isinstance(reasons, dict) and are_strings(reasons.values())
    expect(is_text, "reasons", reasons)
    heads = [Head(**head) for head in data["heads"]]
    for head in heads:
        expect(are_strings((head.head, head.site, head.kind)), "a head", head)
        numbers = (head.index, head.group, head.layer or 0)
        in_range = all(isinstance(n, int) and 0 <= n < MOST for n in numbers)
        expect(in_range, "a number of a head", numbers)
    sums = {column: np.array(rows, np.float64) for column, rows in data["sums"].items()}
    for column, values in sums.items():
        expect(COLUMN.fullmatch(column) is not None, "a column", column)
        is_complete = values.shape == (len(heads), TERMS + 1)
        expect(is_complete and bool(np.isfinite(values).all()), f"sums {column}", values.shape)
    pairs = Pairs.from_json(data["pairs"], len(heads)) if "pairs" in data else None
    return Table(heads, sums, reasons, meta, pairs)
