"""Text for a terminal: columns are aligned to the character, prose is wrapped, nothing is cut off."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from multihead.terminal import (
    Cell,
    Grid,
    Paragraph,
    drop_columns,
    format_number,
    print_parts,
    to_text,
)

GRID = Grid(["name", "count", "note"], [["x", "1", "a"], ["yy", "22,222", ""]], left=(0, 2))


def test_columns_are_aligned_left_or_right() -> None:
    assert to_text([GRID]).splitlines() == ["name   count  note", "x          1  a", "yy    22,222"]


def test_wide_characters_take_two_columns() -> None:
    text = to_text([Grid(["name", "n"], [["日本", "1"], ["ab", "2"]])])
    assert text.splitlines() == ["name  n", "日本  1", "ab    2"]


def test_empty_columns_go_and_others_are_dropped_from_the_right() -> None:
    grid = Grid(["a", "empty", "b", "c"], [["1", "", "2", "3"]])
    assert drop_columns(grid, None)[0].names == ["a", "b", "c"]
    smaller, dropped = drop_columns(grid, 5)
    assert (smaller.names, smaller.rows, dropped) == (["a", "b"], [["1", "2"]], ["c"])
    assert drop_columns(grid, 1)[0].names == ["a", "b"]  # two stay, however narrow it is


def test_columns_keep_their_side_when_others_go() -> None:
    smaller, _ = drop_columns(Grid(["a", "empty", "b"], [["1", "", "x"]], left=(0, 2)), None)
    assert list(smaller.left) == [0, 1]


def test_a_row_wider_than_any_terminal_is_one_line() -> None:
    assert to_text([Grid(["a"], [["x" * 500]])]).splitlines() == ["a", "x" * 500]


def test_prose_is_wrapped_after_its_label() -> None:
    lines = to_text([Paragraph("one two three four five six", "label", indent=2)], width=30)
    assert lines.splitlines() == ["  label  one two three four", "         five six"]


def test_a_title_comes_before_its_grid() -> None:
    text = to_text([Grid(["a"], [["1"]], "numbers"), "", "end"])
    assert text.splitlines() == ["numbers", "a", "1", "", "end"]


def test_styles_colour_a_terminal_and_not_a_pipe() -> None:
    parts = [Grid(["a"], [[Cell("1", "good")]], "numbers")]
    outputs = []
    for is_terminal in (True, False):
        out = io.StringIO()
        colours = "standard" if is_terminal else None
        console = Console(file=out, force_terminal=is_terminal, color_system=colours)
        print_parts(parts, console, styles={"good": "green", "title": "bold"})
        outputs.append(out.getvalue())
    assert "\x1b[32m1" in outputs[0] and "\x1b[1mnumbers" in outputs[0]
    assert outputs[1] == "numbers\na\n1\n"


def test_markup_is_taken_as_text() -> None:
    assert to_text([Grid(["[bold]"], [["[red]x[/red]"]]), "[dim]y"]) == (
        "[bold]\n[red]x[/red]\n[dim]y"
    )


@pytest.mark.parametrize(
    ("value", "style", "text"),
    [
        (float("nan"), ".2f", "-"),
        (-0.001, ".2f", "0.00"),
        (-0.02, ".2f", "-0.02"),
        (1.0, ".2f", "1.00"),
        (0.0001234, "#.2g", "0.00012"),
    ],
)
def test_format_number(value: float, style: str, text: str) -> None:
    assert format_number(value, style) == text


HOSTILE = "a\x1b]8;;http://evil\x07b\u202ec\nd [red]e[/red] [link=http://evil]f[/link]"


def test_text_from_outside_is_harmless_wherever_it_is_in_a_table() -> None:
    parts = [
        Grid([HOSTILE, "n"], [[Cell(HOSTILE), HOSTILE]], HOSTILE),
        Paragraph(HOSTILE, HOSTILE),
        HOSTILE,
    ]
    terminal = Console(file=io.StringIO(), force_terminal=True, width=200, color_system=None)
    print_parts(parts, terminal, styles={"title": "bold"})
    for text in (to_text(parts), terminal.file.getvalue()):
        assert "\x1b]" not in text and "\u202e" not in text and "\x07" not in text
        assert "[red]e[/red]" in text and "[link=http://evil]" in text


def test_an_entry_of_ten_million_characters_is_cut() -> None:
    text = to_text([Grid(["a"], [["x" * 10_000_000]]), Paragraph("y" * 10_000_000)])
    assert len(text) < 20_000
