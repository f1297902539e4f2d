"""What a person wants to see first of a table of heads: the part that the console, notebooks and
the page share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .roles import RESTING_REACH, RESTING_WEIGHT, ROLES, THRESHOLD, resting, roles, scores
from .statistics import ALSO, columns, describe, is_relation
from .table import Table

# up to this many heads get a row each; of more, the most telling ones of each role are shown
FEW = 32
MIXED = "mixed"
PARKED = ("first", "special")  # where resting heads keep their weight


@dataclass(frozen=True)
class Cell:
    text: str
    style: str = (
        ""  # a role's name, "mixed", "resting" or "": what it is, the renderer picks the colour
    )


@dataclass(frozen=True)
class Section:
    """A part of what is shown: a title and a small table. Columns are in the order in which they
    are wanted.
    """

    title: str
    style: str
    names: list[str]
    rows: list[list[Cell]]


def clean(text: Any) -> str:
    """One line without control characters: a model's name or a text can't move the cursor or
    recolour a terminal.
    """
    return "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in str(text))


def number(value: float, style: str = ".2f") -> str:
    """A number for a person, "-" where there is none; never "-0.00"."""
    text = "-" if np.isnan(value) else format(value, style)
    return text.removeprefix("-") if text.strip("-0.") == "" and len(text) > 1 else text


class Digest:
    """A table's roles and values, worked out once."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.scores = scores(table)
        self.roles = roles(table)
        self.resting = resting(table)

    def order(self) -> list[int]:
        """The heads from the most telling to the least: by their strongest score, then by norm.

        Where a resting head rests tells nothing; what it does besides may: it can be an induction
        head without work.
        """
        strongest = np.full(len(self.table.heads), -np.inf)
        for role, score in self.scores.items():
            told = ~np.isnan(score) & ~(self.resting & (role in PARKED))
            strongest = np.where(told, np.fmax(strongest, score), strongest)
        norm = np.nan_to_num(self.table.value("norm"))
        return sorted(range(len(self.table.heads)), key=lambda n: (-strongest[n], -norm[n]))

    def holders(self, role: str) -> list[int]:
        """The heads that hold a role, strongest first."""
        found = [n for n, held in enumerate(self.roles) if role in held]
        return sorted(found, key=lambda n: -self.scores[role][n])

    def sections(self, top: int, every: bool) -> list[Section]:
        """A row a head, or the `top` most telling heads of each role; then the relations, where
        they were read.
        """
        heads = range(len(self.table.heads))
        relations = self._relations()
        if self.only_relations:
            return relations
        if every:
            return [
                self._section("", "", [(n, self._strongest(n)) for n in heads], with_roles=True),
                *relations,
            ]
        found = []
        for role in ROLES:
            holders = self.holders(role)
            if holders:
                title = f"{role} ({describe(ROLES[role]).meaning}): {_heads(len(holders))}"
                title += f", the {top} strongest" if len(holders) > top else ""
                found.append(
                    self._section(title, role, [(n, role) for n in holders[:top]], with_roles=False)
                )
        return found + relations

    @property
    def only_relations(self) -> bool:
        """Nothing else was read, so there is nothing to say of roles."""
        return bool(self.table.columns) and all(map(is_relation, self.table.columns))

    def _relations(self) -> list[Section]:
        """Of each relation and direction the head that is right most often, beside the best fixed
        distance.
        """
        table, rows = self.table, []
        for column in filter(is_relation, table.columns):
            value, best = table.value(column), int(np.nanargmax(table.value(column)))
            fixed = table.meta.get("relations", {}).get(column)
            beside = (number(fixed["accuracy"]), f"{fixed['offset']:+d}") if fixed else ("-", "-")
            rows.append(
                [
                    Cell(clean(text))
                    for text in (
                        column.partition(":")[2],
                        table.heads[best].head,
                        number(value[best]),
                        number(table.error(column)[best]),
                        f"{table.count(column)[best]:,}",
                        *beside,
                    )
                ]
            )
        title = (
            f"relations: of {len(table.heads):,} heads the one that is right most often, beside the"
            " best fixed distance"
        )
        names = ["relation", "head", "right", "±", "arcs", "at a distance", "of words"]
        return [Section(title, "", names, rows)] if rows else []

    def counts(self) -> str:
        """How many heads hold each role, how many none, how many rest."""
        if self.only_relations:
            return f"{len(self.table.heads):,}"
        parts = [
            f"{role} {len(self.holders(role))}"
            for role in ROLES
            if not np.isnan(self.scores[role]).all()
        ]
        parts += [f"{MIXED} {self.roles.count([])}", f"resting {int(self.resting.sum())}"]
        return (
            f"{len(self.table.heads):,}: " + ", ".join(parts) + " (a head may hold several roles)"
        )

    def unmeasured(self) -> dict[str, str]:
        """The statistics without a value, each with its reason: in the whole table, or ("site
        column") at one site.
        """
        present, reasons = set(self.table.columns), self.table.reasons
        empty = [
            c
            for c in columns(self.table.sums)
            if c not in present and (c == describe(c).name or describe(c).name in present)
        ]
        sites = {h.site for h in self.table.heads}
        at_sites = {key: why for key, why in reasons.items() if key.rpartition(" ")[0] in sites}

        def reason(column: str) -> str:
            found = [why for key, why in at_sites.items() if key.endswith(f" {column}")]
            return reasons.get(column, found[0] if found else "not measured in this reading")

        shown = {c: reason(c) for c in empty} | {
            k: w for k, w in at_sites.items() if k.rpartition(" ")[2] in present
        }
        return {clean(key): clean(why) for key, why in shown.items()}

    def _mixed(self, n: int) -> str:
        """No role, and the one that the head comes nearest to."""
        nearest = max(ROLES, key=lambda role: np.nan_to_num(self.scores[role][n], nan=-np.inf))
        score = self.scores[nearest][n]
        return MIXED if np.isnan(score) else f"{MIXED} (nearest: {nearest} {number(score)})"

    def _strongest(self, n: int) -> str:
        return self.roles[n][0] if self.roles[n] else ""

    def _section(
        self, title: str, style: str, picks: list[tuple[int, str]], with_roles: bool
    ) -> Section:
        """`picks` are pairs of a head and the role whose score, weight, contribution and rows its
        row shows.
        """
        value, count = self.table.value, self.table.count
        mass = {
            role: (
                value(m),
                value(f"contribution:{m}"),
                value(f"even:{m}"),
                count(f"contribution:{m}"),
            )
            for role, m in ROLES.items()
        }
        nothing, all_rows = np.full(len(self.table.heads), np.nan), count("entropy")
        norm, share, entropy, distance = (
            value(c) for c in ("norm", "share", "entropy_ratio", "distance")
        )
        error = {role: self.table.error(f"contribution:{m}") for role, m in ROLES.items()}
        asked = [
            c for c in self.table.columns if c in ALSO or c.startswith("class:")
        ]  # shown because somebody asked
        names = [
            "head",
            "roles and scores" if with_roles else "score",
            "weight",
            "contribution",
            "±",
            "even",
            "rows",
            "rests",
            *asked,
            "norm",
            "share",
            "entropy_ratio",
            "distance",
        ]
        rows = []
        for n, role in picks:
            weight, contribution, even, on = mass.get(role, (nothing, nothing, nothing, all_rows))
            held = ", ".join(f"{r} {self.scores[r][n]:.2f}" for r in self.roles[n]) or self._mixed(
                n
            )
            rows.append(
                [
                    Cell(clean(self.table.heads[n].head), role or MIXED),
                    (
                        Cell(held, role or MIXED)
                        if with_roles
                        else Cell(number(self.scores[role][n]), role)
                    ),
                    Cell(number(weight[n])),
                    Cell(number(contribution[n])),
                    Cell(_error(error.get(role, nothing)[n])),
                    Cell(number(even[n])),
                    Cell(f"{on[n]:,}"),
                    Cell("resting" if self.resting[n] else "", "resting"),
                    *(Cell(number(value(c)[n], "#.2g")) for c in asked),
                    Cell(number(norm[n], "#.3g")),
                    Cell(number(share[n])),
                    Cell(number(entropy[n])),
                    Cell(number(distance[n], ".1f")),
                ]
            )
        return Section(title, style, names, rows)


def _error(value: float) -> str:
    """A standard error; nothing where there is none, so that a reading of one document has no such
    column.
    """
    return "" if np.isnan(value) else number(value)


def _heads(n: int) -> str:
    return f"{n:,} head" if n == 1 else f"{n:,} heads"


def about(table: Table) -> list[tuple[str, str]]:
    """What was read: labelled lines, of the `meta` that is there."""
    meta = table.meta
    lines = [(key, clean(meta[key])) for key in ("model", "text") if meta.get(key)]
    size = [f"{meta['tokens']:,} tokens"] if isinstance(meta.get("tokens"), int) else []
    if isinstance(meta.get("documents"), int):
        size.append(f"{meta['documents']:,} document" + ("s" if meta["documents"] != 1 else ""))
    if size:
        lines.append(("read", " in ".join(size)))
    return lines + [("note", note) for note in notes(table)]


def notes(table: Table) -> list[str]:
    """Warnings and remarks of the reading."""
    partial = table.meta.get("partial")
    found = (
        []
        if not partial
        else ["the reading is partial" + (f": {partial}" if isinstance(partial, str) else "")]
    )
    given = table.meta.get("notes") or []
    return [clean(note) for note in found + ([given] if isinstance(given, str) else list(given))]


ROLE_RULE = (
    "A role's score is the pooled contribution on its keys minus what an even reading of the"
    f" allowed keys would score; a role is given from {THRESHOLD:.2f} on, and a head that reaches"
    f" none is {MIXED}."
)
REST_RULE = (
    f"A resting head keeps {RESTING_WEIGHT:.0%} or more of its weight on the first or a special key"
    f" and reads at most {RESTING_REACH:.0%} of what an even reading would."
)
RELATION_RULE = (
    "right: how often the word that the head reads most is the one that the arc names; ^ turns an"
    " arc round: the word that governs reads its dependent. The best of many heads is flattered:"
    " try it on another file."
)
PROBE_RULE = (
    "The roles induction and duplicate, and their rows, are measured on the probe: random tokens"
    " said twice."
)


def text_rule(table: Table) -> str:
    """On what the numbers rest."""
    probed = any(describe(column).name.startswith("probe:") for column in table.columns)
    begin = f"{PROBE_RULE} All the rest" if probed else "This"
    return (
        f"{begin} is what the heads did on this text; on another text they may do something else."
    )
