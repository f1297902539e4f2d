"""Text for a terminal or a pipe: tables in aligned columns (laid out by rich) and wrapped prose.

Every printed result of the library is a list of parts, `Grid`, `Paragraph` or a ready-made line,
which `to_text` renders as plain text and `print_parts` prints in colour. Texts in them may come
from a checkpoint or from another user's table; they are made harmless here. rich is imported when
the first table is laid out.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .outside import clean

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

PROSE = 100  # columns of prose where no width is given
# characters of one entry of a table, and of a paragraph, at most
LONGEST_CELL, LONGEST_PROSE = 1_000, 10_000


@dataclass(frozen=True)
class Cell:
    """One entry of a table; `style` is a name that the caller of `print_parts` maps to a colour."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Grid:
    """A table without rules: column names, rows, and the columns that are aligned left.

    >>> print(to_text([Grid(["layer", "heads"], [["L0", "12"], ["L10", "9"]])]))
    layer  heads
    L0        12
    L10        9
    """

    names: list[str]
    rows: Sequence[Sequence[Cell | str]]
    title: str = ""
    style: str = ""
    left: Iterable[int] = (0,)


@dataclass(frozen=True)
class Paragraph:
    """Prose that is wrapped, after an optional label; later lines are indented by the label's
    width, and all lines by `indent`. `style` is that of the label, "label" unless given.
    """

    text: str
    label: str = ""
    indent: int = 0
    style: str = "label"


Part = Grid | Paragraph | str


def format_number(value: float, style: str = ".2f") -> str:
    """A number in a format, "-" for NaN, and never "-0.00".

    >>> format_number(-0.001), format_number(float("nan"))
    ('0.00', '-')
    """
    text = "-" if math.isnan(value) else format(value, style)
    return text.removeprefix("-") if text.strip("-0.") == "" and len(text) > 1 else text


def drop_columns(grid: Grid, width: int | None) -> tuple[Grid, list[str]]:
    """The grid without empty columns and, with a `width`, without the last columns that don't fit;
    and the names of the latter. The first two columns always stay.
    """
    from rich.cells import cell_len

    columns = [
        [name, *(cell_text(row[n]) for row in grid.rows)] for n, name in enumerate(grid.names)
    ]
    sizes = [max(map(cell_len, column)) + 2 for column in columns]
    kept = [n for n, column in enumerate(columns) if n == 0 or any(column[1:])]
    dropped: list[str] = []
    while width and len(kept) > 2 and sum(sizes[n] for n in kept) - 2 > width:
        dropped.insert(0, grid.names[kept.pop()])
    left = set(grid.left)
    smaller = replace(
        grid,
        names=[grid.names[n] for n in kept],
        rows=[[row[n] for n in kept] for row in grid.rows],
        left=[place for place, n in enumerate(kept) if n in left],
    )
    return smaller, dropped


def to_text(parts: Iterable[Part], width: int | None = None) -> str:
    """The parts as plain text; grids are as wide as their content, prose as `width` or 100."""
    return "\n".join(line.plain.rstrip() for line in _lines(parts, width, {}))


def print_parts(
    parts: Iterable[Part],
    console: Console | None = None,
    *,
    width: int | None = None,
    styles: Mapping[str, str] | None = None,
) -> None:
    """Print the parts, in colour on a terminal; `styles` gives rich's styles for names of styles
    (and for "title", "names", "label" and "prose").
    """
    from rich.console import Console

    console = console or Console()
    for line in _lines(parts, width, styles or {}):
        line.rstrip()
        console.print(line, soft_wrap=True, highlight=False)


def _lines(parts: Iterable[Part], width: int | None, styles: Mapping[str, str]) -> list[Text]:
    from rich.text import Text

    lines: list[Text] = []
    for part in parts:
        if isinstance(part, str):
            lines += [Text(clean(line)) for line in part.split("\n")]
        elif isinstance(part, Paragraph):
            lines += _paragraph(part, width or PROSE, styles)
        else:
            if part.title:
                title = f"{styles.get('title', '')} {styles.get(part.style, '')}"
                lines.append(Text(clean(part.title, LONGEST_PROSE), title.strip()))
            lines += _grid(part, styles)
    return lines


def _paragraph(part: Paragraph, width: int, styles: Mapping[str, str]) -> list[Text]:
    from rich.text import Text

    first = " " * part.indent
    label = f"{clean(part.label, LONGEST_CELL)}  " if part.label else ""
    rest = first + " " * len(label)
    text = clean(part.text, LONGEST_PROSE)
    wrapped = textwrap.wrap(text, max(20, width - len(rest)), break_on_hyphens=False) or [""]
    style = "" if label else styles.get("prose", "")
    begin = Text.assemble(first, (label, styles.get(part.style, "")), (wrapped[0], style))
    return [begin, *(Text.assemble(rest, (line, style)) for line in wrapped[1:])]


def _grid(grid: Grid, styles: Mapping[str, str]) -> list[Text]:
    """The lines that rich lays out, whatever the width of the terminal: nothing is cut or
    folded.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(grid.names), header_style=""
    )
    left = set(grid.left)
    for n, name in enumerate(grid.names):
        table.add_column(
            Text(clean(name, LONGEST_CELL), styles.get("names", "")),
            justify="left" if n in left else "right",
            no_wrap=True,
        )
    for row in grid.rows:
        table.add_row(*(Text(cell_text(cell), _style(cell, styles)) for cell in row))
    wide = Console(width=100_000, color_system="truecolor", force_terminal=True)
    rendered = wide.render_lines(table, pad=False)
    return [Text.assemble(*((s.text, s.style or "") for s in line)) for line in rendered]


def cell_text(cell: Cell | str) -> str:
    """The text of an entry of a grid, made harmless."""
    return clean(cell if isinstance(cell, str) else cell.text, LONGEST_CELL)


def _style(cell: Cell | str, styles: Mapping[str, str]) -> str:
    return "" if isinstance(cell, str) else styles.get(cell.style, "")
