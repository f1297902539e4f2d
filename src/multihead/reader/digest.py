"""The digest of a table of heads: what is shown first of it, on a terminal, in a notebook and on
the page.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..outside import clean
from ..terminal import Cell, Grid, format_number
from .roles import (
    RESTING_REACH,
    RESTING_WEIGHT,
    ROLES,
    THRESHOLD,
    assign_roles,
    is_resting,
    score_roles,
)
from .statistics import columns, describe, is_relation
from .statistics.columns import REQUESTABLE
from .sums import HeadSums

# Up to this many heads get a row each; of more, the strongest heads of each role are shown.
FEW = 32
MIXED = "mixed"
SINKS = ("first", "special")  # the roles of keys on which resting heads put their weight

ROLE_RULE = (
    "A role's score is the pooled contribution on its keys minus that of uniform attention over"
    f" the allowed keys; a head has a role from {THRESHOLD:.2f} on, and without one it is {MIXED}."
)
REST_RULE = (
    f"A resting head has {RESTING_WEIGHT:.0%} or more of its weight on the first or a special token"
    f" and contributes at most {RESTING_REACH:.0%} of what uniform attention would."
)
RELATION_RULE = (
    "right: how often the word that the head reads most is the one that the dependency arc names;"
    " ^ reverses an arc: the governing word reads its dependent. The best of many heads is"
    " optimistic: try it on another file."
)
PROBE_RULE = (
    "The roles induction and duplicate, and their queries, are measured on the probe: random tokens"
    " that are repeated once."
)


class Digest:
    """Roles, scores and the order of the heads of a table, computed once."""

    def __init__(self, table: HeadSums) -> None:
        self.table = table
        self.scores = score_roles(table)
        self.roles = assign_roles(table)
        self.resting = is_resting(table)

    def order(self) -> list[int]:
        """Indices of the heads, most informative first: by their strongest score, then by norm.

        A resting head's score on its sink doesn't count; another role does: an induction head can
        rest on a text that repeats nothing.
        """
        strongest = np.full(len(self.table.heads), -np.inf)
        for role, score in self.scores.items():
            counts = ~np.isnan(score) & ~(self.resting & (role in SINKS))
            strongest = np.where(counts, np.fmax(strongest, score), strongest)
        norm = np.nan_to_num(self.table.value("norm"))
        return sorted(range(len(self.table.heads)), key=lambda n: (-strongest[n], -norm[n]))

    def holders(self, role: str) -> list[int]:
        """Indices of the heads that have a role, strongest first."""
        heads = [n for n, roles in enumerate(self.roles) if role in roles]
        return sorted(heads, key=lambda n: -self.scores[role][n])

    def grids(self, top: int, every: bool) -> list[Grid]:
        """One grid with a row for each head, or one for each role with its `top` strongest heads;
        then the relations, where they were measured.
        """
        relations = self._relations()
        if self.only_relations:
            return relations
        if every:
            picks = [(n, self._strongest(n)) for n in range(len(self.table.heads))]
            return [self._grid(picks), *relations]
        return [*(self._role_grid(role, top) for role in ROLES if self.holders(role)), *relations]

    @property
    def only_relations(self) -> bool:
        """Whether nothing but relations was measured, so that there are no roles to show."""
        return bool(self.table.columns) and all(map(is_relation, self.table.columns))

    def counts(self) -> str:
        """Number of heads with each role, with none, and at rest."""
        if self.only_relations:
            return f"{len(self.table.heads):,}"
        parts = [
            f"{role} {len(self.holders(role))}"
            for role in ROLES
            if not np.isnan(self.scores[role]).all()
        ]
        parts += [f"{MIXED} {self.roles.count([])}", f"resting {int(self.resting.sum())}"]
        many = f"{len(self.table.heads):,}"
        return f"{many}: {', '.join(parts)} (a head may have several roles)"

    def unmeasured(self) -> dict[str, str]:
        """Statistics without a value, each with its reason; the key is "column" for the whole
        table, or "site column" for one site.
        """
        present, reasons = set(self.table.columns), self.table.reasons
        empty = [
            c
            for c in columns(self.table.sums)
            if c not in present and (c == describe(c).name or describe(c).name in present)
        ]
        sites = {head.site for head in self.table.heads}
        at_sites = {key: why for key, why in reasons.items() if key.rpartition(" ")[0] in sites}

        def reason(column: str) -> str:
            local = [why for key, why in at_sites.items() if key.endswith(f" {column}")]
            return reasons.get(column, local[0] if local else "not measured in this reading")

        shown = {c: reason(c) for c in empty}
        shown |= {key: why for key, why in at_sites.items() if key.rpartition(" ")[2] in present}
        return {clean(key): clean(why) for key, why in shown.items()}

    def _relations(self) -> list[Grid]:
        """The most accurate head of each relation and direction, with the best fixed distance."""
        table, rows = self.table, []
        for column in filter(is_relation, table.columns):
            value, best = table.value(column), int(np.nanargmax(table.value(column)))
            fixed = table.meta.get("relations", {}).get(column)
            baseline = (
                (format_number(fixed["accuracy"]), f"{fixed['offset']:+d}") if fixed else ("-", "-")
            )
            entries = (
                column.partition(":")[2],
                table.heads[best].head,
                format_number(value[best]),
                format_number(table.error(column)[best]),
                f"{table.count(column)[best]:,}",
                *baseline,
            )
            rows.append([clean(entry) for entry in entries])
        title = (
            f"relations: the most accurate of {len(table.heads):,} heads, and the best fixed"
            " distance"
        )
        names = ["relation", "head", "right", "±", "arcs", "at a distance", "of words"]
        return [Grid(names, rows, title, left=(0, 1))] if rows else []

    def _mixed(self, n: int) -> str:
        """The label of a head without a role, with the role that it comes nearest to."""
        nearest = max(ROLES, key=lambda role: np.nan_to_num(self.scores[role][n], nan=-np.inf))
        score = self.scores[nearest][n]
        return MIXED if np.isnan(score) else f"{MIXED} (nearest: {nearest} {format_number(score)})"

    def _strongest(self, n: int) -> str:
        return self.roles[n][0] if self.roles[n] else ""

    def _role_grid(self, role: str, top: int) -> Grid:
        holders = self.holders(role)
        many = f"{len(holders):,} head" + ("s" if len(holders) != 1 else "")
        title = f"{role} ({describe(ROLES[role]).meaning}): {many}"
        title += f", the {top} strongest" if len(holders) > top else ""
        return self._grid([(n, role) for n in holders[:top]], title, role)

    def _grid(self, picks: list[tuple[int, str]], title: str = "", role: str = "") -> Grid:
        """A row for each pair of a head and the role whose masses it shows; in the grid of one
        `role` its score is given, else all roles of the head.
        """
        table = self.table
        values = {c: table.value(c) for c in ("norm", "share", "entropy_ratio", "distance")}
        on_request = [c for c in table.columns if c in REQUESTABLE or c.startswith("class:")]
        values |= {c: table.value(c) for c in on_request}
        masses = {role: self._masses(role) for role in {role for _, role in picks}}
        rows = []
        for n, shown in picks:
            weight, contribution, error, even, count = (column[n] for column in masses[shown])
            scores = f"{self.scores[role][n]:.2f}" if role else self._roles_and_scores(n)
            rows.append(
                [
                    Cell(clean(table.heads[n].head), shown or MIXED),
                    Cell(scores, shown or MIXED),
                    Cell(format_number(weight)),
                    Cell(format_number(contribution)),
                    # Empty, not "-": the column vanishes in a reading of one document.
                    Cell("" if np.isnan(error) else format_number(error)),
                    Cell(format_number(even)),
                    Cell(f"{int(count):,}"),
                    Cell("resting" if self.resting[n] else "", "resting"),
                    *(Cell(format_number(values[c][n], "#.2g")) for c in on_request),
                    Cell(format_number(values["norm"][n], "#.3g")),
                    Cell(format_number(values["share"][n])),
                    Cell(format_number(values["entropy_ratio"][n])),
                    Cell(format_number(values["distance"][n], ".1f")),
                ]
            )
        names = ["head", "score" if role else "roles and scores"]
        names += ["weight", "contribution", "±", "uniform", "queries", "rests"]
        names += [*on_request, "norm", "share", "entropy_ratio", "distance"]
        return Grid(names, rows, title, role, left=(0, 7) if role else (0, 1, 7))

    def _masses(self, role: str) -> tuple[NDArray[np.generic], ...]:
        """Weight, contribution, its error, uniform attention and count of a role's keys, each
        `[heads]`; for "" (no role) NaN and the rows of all queries.
        """
        table = self.table
        if not role:
            nothing = np.full(len(table.heads), np.nan)
            return nothing, nothing, nothing, nothing, table.count("entropy")
        mass, pooled = ROLES[role], f"contribution:{ROLES[role]}"
        return (
            table.value(mass),
            table.value(pooled),
            table.error(pooled),
            table.value(f"even:{mass}"),
            table.count(pooled),
        )

    def _roles_and_scores(self, n: int) -> str:
        scores = (f"{role} {self.scores[role][n]:.2f}" for role in self.roles[n])
        return ", ".join(scores) or self._mixed(n)


def about(table: HeadSums) -> list[tuple[str, str]]:
    """Labelled lines on the model, the text and its size, then the notes; only those in `meta`."""
    meta = table.meta
    lines = [(key, clean(meta[key])) for key in ("model", "text") if meta.get(key)]
    size = [f"{meta['tokens']:,} tokens"] if isinstance(meta.get("tokens"), int) else []
    if isinstance(meta.get("documents"), int):
        size.append(f"{meta['documents']:,} document" + ("s" if meta["documents"] != 1 else ""))
    if size:
        lines.append(("read", " in ".join(size)))
    return lines + [("note", note) for note in notes(table)]


def notes(table: HeadSums) -> list[str]:
    """Warnings and remarks of the reading."""
    partial = table.meta.get("partial")
    why = f": {partial}" if isinstance(partial, str) else ""
    first = [f"the reading is partial{why}"] if partial else []
    more = table.meta.get("notes") or []
    return [clean(note) for note in first + ([more] if isinstance(more, str) else list(more))]


def scope_rule(table: HeadSums) -> str:
    """A sentence on which text, or probe, the numbers come from."""
    has_probe = any(describe(column).name.startswith("probe:") for column in table.columns)
    begin = f"{PROBE_RULE} All the rest" if has_probe else "This"
    return (
        f"{begin} is what the heads did on this text; on another text they may do something else."
    )
