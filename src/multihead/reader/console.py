"""A table of heads as text for a terminal, a pipe and a notebook."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from ..terminal import Paragraph, Part, drop_columns, print_parts, to_text
from .digest import FEW, RELATION_RULE, REST_RULE, ROLE_RULE, Digest, about, scope_rule
from .statistics import is_relation
from .sums import HeadSums

if TYPE_CHECKING:
    from rich.console import Console

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
    return to_text(_parts(table, width, top, all_heads, reasons), width)


def print_table(
    table: HeadSums,
    console: Console | None = None,
    *,
    top: int = 5,
    all_heads: bool = False,
    reasons: bool = False,
) -> None:
    """Print a `Table`: in colour and within the terminal's width, or into a pipe as plain text with
    every column.

    `top`, `all_heads` and `reasons` choose the rows as in `text_table`: a row for each head up to 32
    heads or with `all_heads`, else the `top` heads of each role; `reasons` adds why columns are
    empty. Without a `console` it prints to standard output.

    >>> import multihead
    >>> model, tokenizer = multihead.load_builtin()
    >>> table = multihead.read(model, "the cat and the cat", tokenizer=tokenizer)
    >>> multihead.reader.print_table(table)  # doctest: +ELLIPSIS
    read  ...
    """
    from rich.console import Console

    console = console or Console()
    width = console.width if console.is_terminal else None
    parts = _parts(table, width, top, all_heads, reasons)
    print_parts(parts, console, width=width, styles=STYLES)


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
        cells = [[getattr(cell, "text", cell) for cell in row] for row in grid.rows]
        rows = "".join(
            f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in cells
        )
        title = f"<caption>{html.escape(grid.title)}</caption>" if grid.title else ""
        parts.append(f"<table>{title}<thead><tr>{names}</tr></thead><tbody>{rows}</tbody></table>")
    parts += [f"<div><small>{html.escape(text)}</small></div>" for text in _closing(digest, every)]
    return f"<div>{''.join(parts)}</div>"


def _parts(
    table: HeadSums, width: int | None, top: int, all_heads: bool, reasons: bool
) -> list[Part]:
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
    whose = "the head's strongest role (rows: all, for a mixed head)" if every else "the role"
    rules = [f"{ROLE_RULE} weight, contribution, even and rows are those of {whose}. {REST_RULE}"]
    missing = [key for key in digest.unmeasured() if " " not in key]
    if missing:
        rules.append(
            f"Without a value here: {', '.join(missing)} (the page and table.reasons say why)."
        )
    rules += [*relation_rule, scope_rule(digest.table)]
    if not every:
        rules.append(
            "All heads: --all here, --json or --csv for every number, the page for the maps; in"
            " Python multihead.reader.print_table(table, all_heads=True), table.rows(),"
            " table.save(...)."
        )
    return rules
