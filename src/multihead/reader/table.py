"""A table of heads: every number is a sum, so tables of two batches, documents or machines add up.

Each column keeps, for each head, seven float64 sums over documents d, of a numerator x_d and a
    denominator y_d: the value
is sum(x) / sum(y). For a mean over rows y_d is the number of rows; for a pooled contribution it is
the contribution of all keys. The second moments give the standard error of such a ratio over
documents.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import MultiheadError
from .baseline import is_baseline, pooled
from .head_pairs import Pairs
from .statistics import columns, describe, is_relation

FORMAT, VERSION = "multihead-table", 1
NAME = re.compile(
    r"(contribution:|even:)?((class|relation|probe):)?\^?[\w.:-]{1,80}"
)  # of a column, from wherever
MOST = 100_000  # layers, and heads of a site, that a file may claim: a page draws that many
X, Y, ROWS, XX, XY, YY, TERMS = range(7)  # sums over documents of x, y, rows, x*x, x*y, y*y, 1
Sums = NDArray[np.float64]  # [heads, 7]


@dataclass(frozen=True)
class Head:
    """One head of one site. `head` is its label and never changes, whatever is filtered, sorted or
    pruned away.
    """

    head: str  # "L12.H3", "decoder.L0.cross.H2"
    site: str  # module path of the attention module
    layer: int | None
    index: int  # number of the head in its site
    group: int  # the key/value head that it reads
    kind: str  # "self" or "cross"


def terms(x: Any, y: Any, rows: Any) -> Sums:
    """One document's seven terms from its numerators, denominators and rows, of any one shape:
    `[..., 7]`.
    """
    return np.stack([x, y, rows, x * x, x * y, y * y, np.ones_like(x)], axis=-1)


@dataclass(eq=False)
class Table:
    """What each head did, as sums that add up (`a + b`, over the same heads).

    >>> from multihead.reader.table import Head, Table
    >>> table = Table([Head("L0.H0", "attn", 0, 0, 0, "self")])
    >>> table.add("self", 0, x=[1.5], y=[3.0], rows=[3])
    >>> table.value("self").tolist(), table.count("self").tolist()
    ([0.5], [3])
    """

    heads: list[Head]
    sums: dict[str, Sums] = field(default_factory=dict)
    reasons: dict[str, str] = field(
        default_factory=dict
    )  # column, or "site column" -> why it is empty
    meta: dict[str, Any] = field(default_factory=dict)  # model, text, tokens, documents, versions
    pairs: Pairs | None = None  # how far every two heads are apart, where that was read

    def add(self, column: str, first: int, *, x: Any, y: Any, rows: Any) -> None:
        """Add one document's numerators, denominators and rows `[heads]`, for the heads from number
        `first` on.

        Several documents at once are `[documents, heads]`.
        """
        x, y, rows = (np.atleast_2d(np.asarray(a, np.float64)) for a in (x, y, rows))
        sums = self.sums.setdefault(column, self._zeros())
        sums[first : first + x.shape[1]] += terms(x, y, rows).sum(0)

    def add_sums(self, column: str, sums: Sums) -> None:
        """Add what `terms` gave, summed over documents, for every head: `[heads, 7]`."""
        self.sums[column] = self.sums.get(column, 0) + sums

    def value(self, column: str) -> Sums:
        """The column's value for each head, NaN where it is empty; `KeyError` with the nearest name
        for a typo.
        """
        sums = self._column(column)
        y = sums[:, Y]
        return np.divide(sums[:, X], y, out=np.full(len(y), np.nan), where=y != 0)

    def count(self, column: str) -> NDArray[np.int64]:
        """The number of rows that each head's value rests on."""
        return self._column(column)[:, ROWS].astype(np.int64)

    def error(self, column: str) -> Sums:
        """Standard error of each head's value over documents (ratio estimator; NaN for fewer than
        two).

        A document is one text, also where it is read in windows or in pieces with a cache; of
        ready-made inputs, one row.
        """
        s, value = self._column(column), self.value(column)
        number = np.where(s[:, TERMS] > 1, s[:, TERMS], np.nan)
        residual = s[:, XX] - 2 * value * s[:, XY] + value**2 * s[:, YY]
        variance = np.maximum(residual, 0) * number / (number - 1)
        return np.sqrt(variance) / np.abs(np.where(s[:, Y] == 0, np.nan, s[:, Y]))

    def _zeros(self) -> Sums:
        return np.zeros((len(self.heads), TERMS + 1))

    def _column(self, column: str) -> Sums:
        if column in self.sums:
            return self.sums[column]
        if column == "nearest" and self.pairs is not None:
            return self.pairs.nearest()
        known = columns(self.sums)
        if column in known or is_relation(column):
            return self._zeros()
        import difflib

        kind, _, name = column.partition(":")
        if kind in ("contribution", "even") and name in known:
            raise KeyError(
                f"no statistic named {column!r}: {name} isn't a mass on a class of keys, so it is"
                f" given once, as {name!r}"
            )
        near = difflib.get_close_matches(column, known, 1)
        hint = (
            f"did you mean {near[0]!r}?"
            if near
            else "multihead.reader.list_statistics() lists them"
        )
        raise KeyError(f"no statistic named {column!r}; {hint}")

    @property
    def columns(self) -> list[str]:
        """The columns that hold a value for at least one head, in the order of the list of
        statistics.
        """
        held = {*self.sums, *(["nearest"] if self.pairs is not None else [])}
        return [c for c in columns(held) if c in held and (self._column(c)[:, Y] != 0).any()]

    def rows(self, *, errors: bool = False) -> list[dict[str, Any]]:
        """One dict a head: its label and place, `roles`, `resting`, and every column (None where
        empty).

        With `errors` also `error:COLUMN`, the standard error over documents, of every column that
        has one.
        """
        from .roles import resting, roles

        values = {c: self.value(c) for c in columns(self.sums)}
        if errors:
            values |= {
                f"error:{c}": e for c in self.columns if np.isfinite(e := self.error(c)).any()
            }
        held, rest = roles(self), resting(self)
        return [
            asdict(head)
            | {"roles": held[n], "resting": bool(rest[n])}
            | {c: None if np.isnan(v[n]) else float(v[n]) for c, v in values.items()}
            for n, head in enumerate(self.heads)
        ]

    def __radd__(self, other: object) -> Table:
        return self if other == 0 else NotImplemented  # so that sum([a, b]) works

    def __add__(self, other: Table) -> Table:
        if not isinstance(other, Table):
            return NotImplemented
        mine, theirs = ([(h.head, h.site) for h in table.heads] for table in (self, other))
        if mine != theirs:
            odd = sorted({head for head, _ in set(mine) ^ set(theirs)})[:3]
            raise MultiheadError(
                f"tables of {len(mine)} and {len(theirs)} heads that aren't the same "
                f"({', '.join(odd) or 'their order differs'}); add tables of one model only"
            )
        models = [m["fingerprint"] for m in (self.meta, other.meta) if "fingerprint" in m]
        if len(set(models)) > 1:
            raise MultiheadError(
                "tables of two models, or of one in two dtypes (fingerprints"
                f" {' and '.join(models)}), though their heads have the same names; add tables of"
                " one model only"
            )
        classes = [m.get("classes", {}) for m in (self.meta, other.meta)]
        for name in self.two_classes(other):
            raise MultiheadError(
                f"class {name} is two classes: {' and '.join(repr(c[name]) for c in classes)}; read"
                " one of them again under another name, for their sum would be of neither"
            )
        names = self.sums.keys() | other.sums.keys()
        sums = {}
        for column in (c for c in columns(names) if c in names):
            a, b = self.sums.get(column, self._zeros()), other.sums.get(column, self._zeros())
            # the probe, and what weights alone say, is the same every time: saying it twice is no
            # more evidence
            alike = (
                column == "copying" or describe(column).name.startswith("probe:")
            ) and np.array_equal(a, b)
            sums[column] = a.copy() if alike else a + b
        meta = self.meta | other.meta
        for key in ("documents", "tokens"):
            meta[key] = self.meta.get(key, 0) + other.meta.get(key, 0)
        if any(classes):
            meta["classes"] = classes[0] | classes[1]
        if "relations" in meta:
            meta["relations"] = pooled(
                self.meta.get("relations", {}), other.meta.get("relations", {})
            )
        meta["notes"] = list(
            dict.fromkeys([*self.meta.get("notes", []), *other.meta.get("notes", [])])
        )
        pairs = [table.pairs for table in (self, other) if table.pairs is not None]
        found = Table(
            self.heads,
            sums,
            {},
            meta,
            pairs[0] + pairs[1] if len(pairs) == 2 else next(iter(pairs), None),
        )
        found.reasons = {
            key: why for key, why in (self.reasons | other.reasons).items() if not found._has(key)
        }
        return found

    def same_numbers(self, other: Table) -> bool:
        """Whether both hold the very same sums, as no two texts give."""
        return (
            self.sums.keys() == other.sums.keys()
            and bool(self.meta.get("documents"))
            and all(np.array_equal(x, other.sums[column]) for column, x in self.sums.items())
        )

    def two_classes(self, other: Table) -> list[str]:
        """Names of classes of tokens that stand for one pattern in this table and for another in
        the other.
        """
        mine, theirs = (table.meta.get("classes", {}) for table in (self, other))
        return [name for name in mine if theirs.get(name, mine[name]) != mine[name]]

    def _has(self, reason: str) -> bool:
        """Whether what a reason says to be empty ("column", or "site column") holds a value."""
        site, _, column = reason.rpartition(" ")
        if column == "nearest":
            return self.pairs is not None
        if column not in self.sums:
            return False
        here = np.array([not site or head.site == site for head in self.heads])
        return bool((self.sums[column][here, Y] != 0).any())

    def to_pandas(self, *, errors: bool = False) -> Any:
        """The rows as a data frame with the labels as its index (needs pandas); `errors` as in
        `rows`.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError(
                "to_pandas() needs pandas: pip install 'multihead[pandas]'; rows() needs nothing"
            ) from error
        frame = pandas.DataFrame(self.rows(errors=errors)).set_index("head")
        return frame.astype(
            dict.fromkeys(columns(self.sums), float)
        )  # an empty number is NaN, as in value()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `.json` (the sums: `load_table` reads them back exactly) or `.csv` (the values),
        whole or not at all.
        """
        path = Path(path)
        if path.suffix == ".csv":
            text = self._csv()
        elif path.suffix == ".json":
            text = self.to_json()
        else:
            raise MultiheadError(
                f"path={str(path)!r}: expected a name that ends in .json (loads again) or .csv"
                " (values)"
            )
        write_atomically(path, text)

    def to_json(self) -> str:
        """What `save` writes as `.json`: the sums, exactly."""
        return json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "meta": self.meta,
                "reasons": self.reasons,
                "heads": [asdict(h) for h in self.heads],
                "sums": {c: s.tolist() for c, s in self.sums.items()},
            }
            | ({} if self.pairs is None else {"pairs": self.pairs.to_json()}),
            allow_nan=False,
        )

    def _csv(self) -> str:
        rows = self.rows(errors=True)
        out = io.StringIO()
        writer = csv.DictWriter(out, list(rows[0]) if rows else ["head"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(row | {"roles": " ".join(row["roles"])} for row in rows)
        return out.getvalue()

    def __str__(self) -> str:
        from .console import text_table

        return text_table(self)

    def __repr__(self) -> str:
        return (
            f"<Table of {len(self.heads)} heads, {len(self.columns)} columns,"
            f" {self.meta.get('tokens', 0):,} tokens>"
        )

    def _repr_html_(self) -> str:
        from .console import html_table

        return html_table(self)


def load_table(path: str | os.PathLike[str]) -> Table:
    """Read a table that `save` wrote as JSON. `ValueError` says what is wrong with any other
    file.
    """
    if not Path(path).exists():
        raise FileNotFoundError(
            f"path={str(path)!r}: there is no such file; expected the JSON that"
            " table.save('x.json') or 'multihead read --json' writes"
        )
    try:
        return from_json(Path(path).read_text(encoding="utf-8"))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else error
        raise MultiheadError(
            f"path={str(path)!r} isn't a table of heads ({what}); "
            "expected the JSON that table.save('x.json') or 'multihead read --json' writes"
        ) from error


def from_json(text: str) -> Table:
    """The table that `Table.to_json` wrote; of anything else `ValueError`, `KeyError` or
    `TypeError` say what is wrong.
    """
    data = json.loads(text)
    if data["format"] != FORMAT:
        raise KeyError(f"format {data['format']!r}")
    if data["version"] != VERSION:
        raise MultiheadError(
            f"version {data['version']}, where this multihead reads version {VERSION}"
        )
    return _table(data)


def _table(data: Any) -> Table:
    """What a file says, each part checked for its type: a file may come from anywhere."""

    def expect(good: bool, what: str, value: Any) -> None:
        if not good:
            raise MultiheadError(f"{what} is {str(value)[:60]!r}")

    meta, reasons = data["meta"], data["reasons"]
    expect(isinstance(meta, dict), "meta", meta)
    for key, kind in (
        ("documents", int),
        ("tokens", int),
        ("notes", list),
        ("model", str),
        ("text", str),
        ("relations", dict),
        ("fingerprint", str),
        ("classes", dict),
    ):
        expect(key not in meta or isinstance(meta[key], kind), f"meta {key}", meta.get(key))
    expect(all(isinstance(n, str) for n in meta.get("notes", [])), "meta notes", meta.get("notes"))
    for column, found in meta.get("relations", {}).items():
        expect(is_relation(column) and is_baseline(found), f"meta relations {column}", found)
    expect(
        all(isinstance(x, str) for x in meta.get("classes", {}).values()),
        "meta classes",
        meta.get("classes"),
    )
    expect(
        isinstance(reasons, dict) and all(isinstance(why, str) for why in reasons.values()),
        "reasons",
        reasons,
    )
    heads = [Head(**head) for head in data["heads"]]
    for head in heads:
        expect(
            isinstance(head.head, str)
            and isinstance(head.site, str)
            and isinstance(head.kind, str),
            "a head",
            head,
        )
        numbers = (head.index, head.group, head.layer or 0)
        expect(
            all(isinstance(n, int) and 0 <= n < MOST for n in numbers),
            "a number of a head",
            numbers,
        )
    sums = {column: np.array(rows, np.float64) for column, rows in data["sums"].items()}
    for column, values in sums.items():
        expect(NAME.fullmatch(column) is not None, "a column", column)
        expect(
            values.shape == (len(heads), TERMS + 1) and bool(np.isfinite(values).all()),
            f"sums {column}",
            values.shape,
        )
    return Table(
        heads,
        sums,
        reasons,
        meta,
        Pairs.from_json(data["pairs"], len(heads)) if "pairs" in data else None,
    )


def write_atomically(path: Path, text: str) -> None:
    """Write beside the target, then rename: the target is the old file or the whole new one, never
    half of it.
    """
    if not path.parent.is_dir():
        raise MultiheadError(
            f"path={str(path)!r}: the folder {str(path.parent)!r} doesn't exist; make it first, "
            "or give a path in one that does"
        )
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    except OSError as error:
        raise OSError(
            error.errno, error.strerror, str(path)
        ) from error  # not the name of a file nobody gave
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~_umask()
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
