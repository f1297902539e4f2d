"""The page: one HTML file that shows what each head does, without any reference to the network."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ..io import write_text
from ..outside import clean
from ..reader.console import text_table
from ..reader.digest import REST_RULE, ROLE_RULE, Digest, about, notes, scope_rule
from ..reader.table import Table
from .frame import Frame
from .payload import payload

if TYPE_CHECKING:
    from ..reader.maps import HeadMap

SCRIPTS = ("common.js", "grid.js", "maps.js", "head.js", "table.js", "start.js")
BUDGET = 3_000_000  # bytes of a whole page


def render(
    table: Table,
    maps: Iterable[HeadMap] = (),
    *,
    title: str | None = None,
    budget: int = BUDGET,
    by: str = "token",
) -> str:
    """The page as HTML of at most `budget` bytes; maps that don't fit are left out, those of the
    least informative heads first.

    Raises:
        MultiheadError: a map's head isn't in the table, or the numbers alone exceed the budget.
    """
    digest = Digest(table)
    model = clean(table.meta.get("model") or "a model")
    frame = Frame(
        "page.html.jinja",
        SCRIPTS,
        title=title or f"What each head does: {model}",
        about=[a for a in about(table) if a[0] != "note"],
        notes=notes(table),
        counts=digest.counts(),
        rules=[ROLE_RULE, REST_RULE, scope_rule(table)],
        plain=text_table(table),
        budget=f"{budget / 1e6:g} MB",
    )
    return frame.render(payload(table, maps, budget - frame.size, by))


def write_page(
    path: str | os.PathLike[str],
    table: Table,
    maps: Iterable[HeadMap] = (),
    *,
    title: str | None = None,
    budget: int = BUDGET,
    by: str = "token",
) -> None:
    """Write the page, completely or not at all. `by` "word" shows maps between words at first."""
    write_text(Path(path), render(table, maps, title=title, budget=budget, by=by))
