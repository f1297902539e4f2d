"""A table of heads in a terminal, in a pipe and in a notebook."""

from __future__ import annotations

import html
import textwrap
from typing import TYPE_CHECKING

from .digest import FEW, RELATION_RULE, REST_RULE, ROLE_RULE, Digest, Section, about, text_rule
from .statistics import is_relation
from .table import Table

if TYPE_CHECKING:
    from rich.console import Console

PROSE = 100  # width of running text where no width is given
COLOURS = {
    "induction": "bright_red",
    "duplicate": "magenta",
    "previous": "bright_blue",
    "self": "green",
    "next": "cyan",
    "first": "yellow",
    "special": "yellow",
    "mixed": "",
    "resting": "dim",
    "title": "bold",
    "names": "dim",
    "about": "bold",
    "quiet": "dim",
}
Line = list[tuple[str, str]]  # spans of text, each with the name of its style


def text_table(
    table: Table,
    *,
    width: int | None = None,
    top: int = 5,
    all_heads: bool = False,
    reasons: bool = False,
) -> str:
    """The table as plain text: a row a head for up to 32 heads or with `all_heads`, else `top`
    heads of each role.

    Nothing is ever cut off: with a `width`, whole columns are left out from the right, and a line
        says which.
    `reasons` adds why columns are empty.
    """
    return "\n".join(
        "".join(text for text, _ in line).rstrip()
        for line in _lines(table, width, top, all_heads, reasons)
    )


def print_table(
    table: Table,
    console: Console | None = None,
    *,
    top: int = 5,
    all_heads: bool = False,
    reasons: bool = False,
) -> None:
    """Print the table: in colour and as wide as the terminal, or as plain text with every column
    into a pipe.
    """
    from rich.console import Console
    from rich.text import Text

    console = console or Console()
    width = console.width if console.is_terminal else None
    for line in _lines(table, width, top, all_heads, reasons):
        styled = Text.assemble(
            *((text, " ".join(COLOURS.get(s, "") for s in style.split())) for text, style in line)
        )
        styled.rstrip()
        console.print(styled, soft_wrap=True, highlight=False)


def html_table(table: Table, *, top: int = 5, all_heads: bool = False) -> str:
    """The table as a piece of HTML for notebooks: escaped, with nothing from outside."""
    parts = ["<div>"]
    digest = Digest(table)
    parts += [
        f"<div><b>{html.escape(label)}</b> {html.escape(text)}</div>"
        for label, text in [*about(table), ("heads", digest.counts())]
    ]
    every = all_heads or len(table.heads) <= FEW
    for section in digest.sections(top, every):
        names = "".join(f"<th>{html.escape(name)}</th>" for name in section.names)
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell.text)}</td>" for cell in row) + "</tr>"
            for row in section.rows
        )
        title = f"<caption>{html.escape(section.title)}</caption>" if section.title else ""
        parts.append(f"<table>{title}<thead><tr>{names}</tr></thead><tbody>{rows}</tbody></table>")
    parts += [f"<div><small>{html.escape(text)}</small></div>" for text in _closing(digest, every)]
    return "".join(parts) + "</div>"


def _lines(table: Table, width: int | None, top: int, all_heads: bool, reasons: bool) -> list[Line]:
    digest = Digest(table)
    every = all_heads or len(table.heads) <= FEW
    lines: list[Line] = []
    for label, text in about(table):
        lines += _prose(text, width, label)
    lines += _prose(digest.counts(), width, "heads")
    left_out: list[str] = []
    for section in digest.sections(top, every):
        lines += [[], [(section.title, f"title {section.style}")]] if section.title else [[]]
        more, lost = _grid(section, width)
        lines += more
        left_out = [name for name in section.names if name in {*left_out, *lost}]
    lines.append([])
    for text in _closing(digest, every):
        lines += _prose(text, width)
    if left_out:
        lines += _prose(f"Left out, for want of width: {', '.join(left_out)}.", width)
    if reasons:
        for column, why in digest.unmeasured().items():
            lines += _prose(f"{column}: {why}", width, "empty")
    return lines


def _closing(digest: Digest, every: bool) -> list[str]:
    whose = "the head's strongest role (rows: all, for a mixed head)" if every else "the role"
    about_relations = [RELATION_RULE] if any(map(is_relation, digest.table.columns)) else []
    if digest.only_relations:
        return about_relations
    found = [f"{ROLE_RULE} weight, contribution, even and rows are those of {whose}. {REST_RULE}"]
    missing = [key for key in digest.unmeasured() if " " not in key]
    if missing:
        found.append(
            f"Without a value here: {', '.join(missing)} (the page and table.reasons say why)."
        )
    found += [*about_relations, text_rule(digest.table)]
    if not every:
        found.append(
            "All heads: --all here, --json or --csv for every number, the page for the maps; "
            "in Python multihead.reader.print_table(table, all_heads=True), table.rows(), table.save(...)."
        )
    return found


def _prose(text: str, width: int | None, label: str = "") -> list[Line]:
    """Running text, wrapped; a label stands before it and its further lines are set in."""
    indent = " " * (len(label) + 2 if label else 0)
    wrapped = textwrap.wrap(
        text, max(20, (width or PROSE) - len(indent)), break_on_hyphens=False
    ) or [""]
    style = "" if label else "quiet"
    first: Line = [(f"{label}  ", "about"), (wrapped[0], style)] if label else [(wrapped[0], style)]
    return [first] + [[(indent + more, style)] for more in wrapped[1:]]


def grid_text(section: Section) -> str:
    """A section's table as plain text, in full width."""
    lines, _ = _grid(section, None)
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)


def _grid(section: Section, width: int | None) -> tuple[list[Line], list[str]]:
    """The section's lines, and the names of the columns that did not fit into the width."""
    cells = [[name, *(row[n].text for row in section.rows)] for n, name in enumerate(section.names)]
    keep = [
        n for n, name in enumerate(section.names) if any(cells[n][1:]) or n == 0
    ]  # "rests" where none does
    sizes = {n: max(map(len, cells[n])) for n in keep}
    lost: list[str] = []
    while width and len(keep) > 2 and sum(sizes[n] + 2 for n in keep) - 2 > width:
        lost.insert(0, section.names[keep.pop()])
    words = {"head", "relation", "roles and scores", "rests", "column", "roles in a", "roles in b"}

    def put(n: int, text: str) -> str:
        return (text.ljust if section.names[n] in words else text.rjust)(sizes[n]) + "  "

    lines: list[Line] = [[(put(n, section.names[n]), "names") for n in keep]]
    for row in section.rows:
        lines.append([(put(n, row[n].text), row[n].style) for n in keep])
    return lines, lost
