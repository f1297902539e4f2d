"""`HeadSums`: the numbers of a table of heads, kept as sums so that they add up.

A column keeps seven float64 sums for each head, over documents d, of a numerator x_d and a
denominator y_d. Its value is sum(x) / sum(y): for a mean over queries y_d is the number of queries,
for a pooled contribution it is the contribution of all keys. The second moments give the standard
error of that ratio over documents. Sums of two batches, documents or machines are added.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ..errors import MultiheadError, did_you_mean
from .baseline import pooled
from .head_pairs import Pairs
from .moments import ROWS, TERMS, XX, XY, YY, Sums, X, Y, terms
from .statistics import columns, describe, is_relation


@dataclass(frozen=True)
class Head:
    """One head of one site. Its label `head` stays the same when heads are filtered or pruned.

    >>> Head("L0.H3", "model.layers.0.self_attn", 0, 3, 1, "self").head
    'L0.H3'
    """

    head: str
    """Label: "L12.H3", "decoder.L0.cross.H2"."""
    site: str
    """Path of the attention module in the model."""
    layer: int | None
    index: int
    """Number of the head in its site."""
    group: int
    """Key/value head that it reads."""
    kind: str
    """One of "self" and "cross"."""


@dataclass(eq=False)
class HeadSums:
    """Sums of every column for every head. `a + b` adds two of the same heads."""

    heads: list[Head]
    sums: dict[str, Sums] = field(default_factory=dict)
    # Why a column is empty; the key is "column", or "site column" where it is empty at one site.
    reasons: dict[str, str] = field(default_factory=dict)
    # model, text, tokens, documents, notes, versions
    meta: dict[str, Any] = field(default_factory=dict)
    # Divergence of every two heads, where it was measured (statistics=["nearest"]).
    pairs: Pairs | None = None

    def add(self, column: str, first: int, *, x: Any, y: Any, rows: Any) -> None:
        """Add the numerators, denominators and row counts of one document, `[heads]`, or of several
        documents, `[documents, heads]`, to the heads from number `first` on.
        """
        x, y, rows = (np.atleast_2d(np.asarray(a, np.float64)) for a in (x, y, rows))
        sums = self.sums.setdefault(column, self._zeros())
        sums[first : first + x.shape[1]] += terms(x, y, rows).sum(0)

    def add_sums(self, column: str, sums: Sums) -> None:
        """Add `terms` summed over documents, `[heads, 7]`, for every head."""
        self.sums[column] = self.sums.get(column, 0) + sums

    def value(self, column: str) -> Sums:
        """Values of a column, float64 `[heads]`, NaN where it is empty.

        Raises:
            KeyError: no such statistic; the message gives the nearest name.
        """
        sums = self._column(column)
        y = sums[:, Y]
        return np.divide(sums[:, X], y, out=np.full(len(y), np.nan), where=y != 0)

    def count(self, column: str) -> NDArray[np.int64]:
        """Number of rows that each head's value is a mean over, int64 `[heads]`."""
        return self._column(column)[:, ROWS].astype(np.int64)

    def error(self, column: str) -> Sums:
        """Standard error of each head's value over documents (ratio estimator), float64 `[heads]`;
        NaN for fewer than two documents.

        A document is one text, also where it is read in windows or in chunks with a cache; of
        tokenized inputs, one batch element.
        """
        s, value = self._column(column), self.value(column)
        number = np.where(s[:, TERMS] > 1, s[:, TERMS], np.nan)
        residual = s[:, XX] - 2 * value * s[:, XY] + value**2 * s[:, YY]
        variance = np.maximum(residual, 0) * number / (number - 1)
        return np.sqrt(variance) / np.abs(np.where(s[:, Y] == 0, np.nan, s[:, Y]))

    @property
    def columns(self) -> list[str]:
        """Columns with a value for at least one head, in the order of the statistics."""
        measured = {*self.sums, *(["nearest"] if self.pairs is not None else [])}
        return [
            c for c in columns(measured) if c in measured and (self._column(c)[:, Y] != 0).any()
        ]

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
        kind, _, name = column.partition(":")
        if kind in ("contribution", "even") and name in known:
            raise KeyError(
                f"no statistic named {column!r}: {name} is not a mass on a class of keys, so it has"
                f" one column, {name!r}"
            )
        hint = did_you_mean(column, known) or "multihead.reader.list_statistics() lists them"
        raise KeyError(f"no statistic named {column!r}; {hint.strip()}")

    def __radd__(self, other: object) -> Self:
        return self if other == 0 else NotImplemented  # so that sum([a, b]) works

    def __add__(self, other: Self) -> Self:
        if not isinstance(other, HeadSums):
            return NotImplemented
        self._require_same_model(other)
        names = self.sums.keys() | other.sums.keys()
        sums = {}
        for column in (c for c in columns(names) if c in names):
            a, b = self.sums.get(column, self._zeros()), other.sums.get(column, self._zeros())
            # The probe, and what depends on weights alone, is the same in every reading of a model:
            # two equal measurements are not twice the evidence.
            is_fixed = column == "copying" or describe(column).name.startswith("probe:")
            sums[column] = a.copy() if is_fixed and np.array_equal(a, b) else a + b
        pairs = [table.pairs for table in (self, other) if table.pairs is not None]
        total = type(self)(
            self.heads,
            sums,
            meta=self._add_meta(other),
            pairs=pairs[0] + pairs[1] if len(pairs) == 2 else next(iter(pairs), None),
        )
        total.reasons = {
            key: why for key, why in (self.reasons | other.reasons).items() if not total._has(key)
        }
        return total

    def _require_same_model(self, other: Self) -> None:
        mine, theirs = ([(h.head, h.site) for h in table.heads] for table in (self, other))
        if mine != theirs:
            odd = sorted({head for head, _ in set(mine) ^ set(theirs)})[:3]
            raise MultiheadError(
                f"tables of {len(mine)} and {len(theirs)} heads that are not the same"
                f" ({', '.join(odd) or 'their order differs'}); add tables of one model only"
            )
        models = {m["fingerprint"] for m in (self.meta, other.meta) if "fingerprint" in m}
        if len(models) > 1:
            raise MultiheadError(
                "tables of two models, or of one model in two dtypes (fingerprints"
                f" {' and '.join(sorted(models))}), though their heads have the same names; add"
                " tables of one model only"
            )
        for name in self.conflicting_classes(other):
            patterns = [repr(table.meta["classes"][name]) for table in (self, other)]
            raise MultiheadError(
                f"class {name} has two patterns, {' and '.join(patterns)}, and their sum would be"
                " of neither; read one of the texts again with another name for its class"
            )

    def _add_meta(self, other: Self) -> dict[str, Any]:
        meta = self.meta | other.meta
        for key in ("documents", "tokens"):
            meta[key] = self.meta.get(key, 0) + other.meta.get(key, 0)
        for key in ("classes", "statistics"):
            both = self.meta.get(key, {}) | other.meta.get(key, {})
            if both:
                meta[key] = both
        if "relations" in meta:
            meta["relations"] = pooled(
                self.meta.get("relations", {}), other.meta.get("relations", {})
            )
        notes = [*self.meta.get("notes", []), *other.meta.get("notes", [])]
        meta["notes"] = list(dict.fromkeys(notes))
        return meta

    def has_same_sums(self, other: Self) -> bool:
        """Whether both hold exactly the same sums, which two different texts never give."""
        return (
            self.sums.keys() == other.sums.keys()
            and bool(self.meta.get("documents"))
            and all(np.array_equal(x, other.sums[column]) for column, x in self.sums.items())
        )

    def conflicting_classes(self, other: Self) -> list[str]:
        """Names of token classes with one pattern in this table and another in the other."""
        mine, theirs = (table.meta.get("classes", {}) for table in (self, other))
        return [name for name in mine if theirs.get(name, mine[name]) != mine[name]]

    def _has(self, reason: str) -> bool:
        """Whether the column of a reason ("column", or "site column") holds a value."""
        site, _, column = reason.rpartition(" ")
        if column == "nearest":
            return self.pairs is not None
        if column not in self.sums:
            return False
        here = np.array([not site or head.site == site for head in self.heads])
        return bool((self.sums[column][here, Y] != 0).any())
