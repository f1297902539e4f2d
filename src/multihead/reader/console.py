"""A table of heads as text for a terminal, a pipe and a notebook."""

from __future__ import annotations

import html

from ..terminal import Paragraph, Part, cell_text, drop_columns, to_text
from .digest import FEW, RELATION_RULE, REST_RULE, ROLE_RULE, Digest, about, scope_rule
from .statistics import is_relation
from .sums import HeadSums

STYLES = {
    "induction": "bright_red",
    "duplicate": "magenta",
    "previous": "bright_blue",
    "self": "green",
    "next": "cyan",
    "first": "yellow",
    "special": "yellow",
    "resting": "dim",
    "title": "bold",
    "names": "dim",
    "label": "bold",
    "prose": "dim",
}


def text_table(
    table: HeadSums,
    *,
    width: int | None = None,
    top: int = 5,
    all_heads: bool = False,
    reasons: bool = False,
) -> str:
    """The table as plain text: a row for each head up to 32 heads or with `all_heads`, else the
    `top` heads of each role.

    Nothing is cut off: with a `width`, whole columns are left out from the right, and a line names
    them. `reasons` adds why columns are empty.
    """
    return to_text(table_parts(table, width, top, all_heads, reasons), width)


def html_table(table: HeadSums, *, top: int = 5, all_heads: bool = False) -> str:
    """The table as an HTML fragment for notebooks: escaped, with no outside reference."""
    digest = Digest(table)
    parts = [
        f"<div><b>{html.escape(label)}</b> {html.escape(text)}</div>"
        for label, text in [*about(table), ("heads", digest.counts())]
    ]
    every = all_heads or len(table.heads) <= FEW
    for grid in digest.grids(top, every):
        names = "".join(f"<th>{html.escape(name)}</th>" for name in grid.names)
        cells = [[cell_text(cell) for cell in row] for row in grid.rows]
        rows = "".join(
            f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in cells
        )
        title = f"<caption>{html.escape(grid.title)}</caption>" if grid.title else ""
        parts.append(f"<table>{title}<thead><tr>{names}</tr></thead><tbody>{rows}</tbody></table>")
    parts += [f"<div><small>{html.escape(text)}</small></div>" for text in _closing(digest, every)]
    return f"<div>{''.join(parts)}</div>"


def table_parts(
    table: HeadSums,
    width: int | None = None,
    top: int = 5,
    all_heads: bool = False,
    reasons: bool = False,
) -> list[Part]:
    """The lines and grids of a table; columns that don't fit into `width` are left out and
    named.
    """
    digest = Digest(table)
    every = all_heads or len(table.heads) <= FEW
    parts: list[Part] = [Paragraph(text, label) for label, text in about(table)]
    parts.append(Paragraph(digest.counts(), "heads"))
    left_out: dict[str, None] = {}
    for grid in digest.grids(top, every):
        narrower, dropped = drop_columns(grid, width)
        parts += ["", narrower]
        left_out |= dict.fromkeys(dropped)
    parts += ["", *map(Paragraph, _closing(digest, every))]
    if left_out:
        order = [name for grid in digest.grids(top, every) for name in grid.names]
        names = sorted(left_out, key=order.index)
        parts.append(Paragraph(f"Left out, for want of width: {', '.join(names)}."))
    if reasons:
        unmeasured = digest.unmeasured().items()
        parts += [Paragraph(f"{column}: {why}", "empty") for column, why in unmeasured]
    return parts


def _closing(digest: Digest, every: bool) -> list[str]:
    """The sentences below the table: how to read it, and where the rest is."""
    relation_rule = [RELATION_RULE] if any(map(is_relation, digest.table.columns)) else []
    if digest.only_relations:
        return relation_rule
    whose = "the head's strongest role (queries: all, for a mixed head)" if every else "the role"
    rules = [
        f"{ROLE_RULE} weight, contribution, uniform and queries are those of {whose}. {REST_RULE}"
    ]
    missing = [key for key in digest.unmeasured() if " " not in key]
    if missing:
        rules.append(
            f"Without a value here: {', '.join(missing)} (the page and table.reasons give the"
            f" reasons)."
        )
    rules += [*relation_rule, scope_rule(digest.table)]
    if not every:
        rules.append(
            "All heads: --all here, --json or --csv for every number, the page for the maps; in"
            " Python multihead.reader.print_table(table, all_heads=True), table.rows(),"
            " table.save(...)."
        )
    return rules
