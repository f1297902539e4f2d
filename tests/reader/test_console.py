"""The table in a terminal, in a pipe and in a notebook."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import multihead
from multihead.reader.console import html_table, text_table
from multihead.reader.digest import Digest
from multihead.reader.roles import ROLES, THRESHOLD
from multihead.reader.table import Table, print_table


def printed(table, **options):
    """What print_table writes to a terminal or a pipe of 80 columns."""
    out = io.StringIO()
    print_table(table, Console(file=out, width=80, **options))
    return out.getvalue()


def rows_of(text, table):
    """The lines of the text that begin with a head's label."""
    labels = {h.head for h in table.heads}
    return {
        line.split()[0]: line
        for line in text.splitlines()
        if line.split() and line.split()[0] in labels
    }


def test_few_heads_get_a_row_each_with_every_number_that_stands_in_the_table(made):
    table = made.table(4, 8)
    digest, rows = Digest(table), rows_of(text_table(table), table)
    assert list(rows) == [h.head for h in table.heads]
    for n, head in enumerate(table.heads):
        held = digest.roles[n]
        for role in held:
            assert f"{role} {digest.scores[role][n]:.2f}" in rows[head.head]
        assert ("mixed" in rows[head.head]) == (not held)
        assert ("resting" in rows[head.head]) == digest.resting[n]
        assert f"{table.value('norm')[n]:#.3g}" in rows[head.head]
        if held:
            mass = ROLES[held[0]]
            assert f"{table.value(mass)[n]:.2f}" in rows[head.head]
            assert f"{table.value(f'contribution:{mass}')[n]:.2f}" in rows[head.head]
            assert f" {table.count(f'contribution:{mass}')[n]} " in rows[head.head]


def test_many_heads_show_the_strongest_of_each_role_and_how_to_see_all(made):
    table = made.table(30, 9, empty=("special",))
    digest, text = Digest(table), text_table(table, top=3)
    prose = " ".join(text.split())
    for role in ROLES:
        holders = [n for n in np.argsort(-digest.scores[role]) if role in digest.roles[n]]
        if holders:
            section = text.split(f"\n{role} (")[1].split("\n\n")[0]
            assert f"{len(holders)} head" in section.splitlines()[0]
            assert list(rows_of(section, table)) == [table.heads[n].head for n in holders[:3]]
            assert f"{role} {len(holders)}, " in prose
    assert f"mixed {digest.roles.count([])}" in prose
    assert f"resting {digest.resting.sum()} " in prose
    assert "--all" in text
    assert "table.rows()" in text
    assert f"{THRESHOLD:.2f}" in text
    assert len(rows_of(text_table(table, all_heads=True), table)) == 270


def test_a_pipe_gets_plain_text_with_every_column(made):
    table = made.table()
    text = printed(table)
    assert "\x1b" not in text
    assert text == text_table(table) + "\n"
    header = next(line for line in text.splitlines() if line.startswith("head "))
    assert max(map(len, text.splitlines())) > 80  # wider than the console says, and not cut
    assert header.split()[-2:] == ["entropy_ratio", "distance"]


def test_a_terminal_gets_colours_and_no_line_wider_than_itself(made):
    table = made.table()
    coloured = printed(table, force_terminal=True, color_system="standard")
    assert "\x1b[" in coloured
    plain = printed(table, force_terminal=True, color_system=None, no_color=True)
    assert max(len(line) for line in plain.splitlines()) <= 80
    assert "Left out, for want of width: " in plain
    assert "distance" in plain.split("Left out, for want of width: ")[1]


def test_a_width_leaves_out_whole_columns_and_says_which(made):
    text = text_table(made.table(), width=60)
    assert max(map(len, text.splitlines())) <= 60
    left = (
        text.replace("\n", " ").split("Left out, for want of width: ")[1].split(".")[0].split(", ")
    )
    header = next(line for line in text.splitlines() if line.startswith("head "))
    assert left[-1] == "distance"
    assert not set(left) & set(header.split())


def test_reasons_are_given_on_request(made):
    table = made.table(2, 3, stacks=("decoder.", "decoder.+cross"))
    assert "special: the text has no special tokens" not in text_table(table)
    text = text_table(table, reasons=True)
    assert "special: the text has no special tokens" in text
    assert "model.decoder.layers.1.cross_attn previous: queries and keys" in text
    assert "probe:induction: not measured in this reading" in text


def test_a_table_without_any_value_says_so(made):
    text = text_table(Table(made.heads(1, 2)))
    assert "mixed 2" in text
    assert "Without a value here: entropy" in text
    assert "(the page and table.reasons give the reasons)" in " ".join(text.split())
    assert text_table(Table([]))


def test_names_and_texts_cannot_steer_a_terminal(made):
    table = made.table(model="evil\x1b[2Jmodel\r\x07", text="one\ntwo")
    for text in (text_table(table), printed(table, force_terminal=True, color_system=None)):
        assert "\x1b[2J" not in text
        assert "\r" not in text
        assert "one two" in text


def test_markup_of_the_terminal_is_taken_as_text(made):
    assert "[bold]model[/bold] [/]" in printed(made.table(model="[bold]model[/bold] [/]"))


def test_a_partial_reading_and_its_notes_are_shown(made):
    text = text_table(
        made.table(partial="stopped after 3 of 9 documents", notes=["cut at 64 tokens"])
    )
    assert "the reading is partial: stopped after 3 of 9 documents" in text
    assert "cut at 64 tokens" in text


class _Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.seen, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.mark.parametrize("layers", [4, 30])
def test_html_for_notebooks_is_well_formed_and_escaped(made, layers):
    table = made.table(layers, 9, model=made.hostile, notes=["<img src=x onerror=alert(1)>"])
    table.heads = [replace(h, head=f"<i>{h.head}") for h in table.heads]
    parser = _Tags()
    parser.feed(html_table(table))
    assert parser.open == []
    assert set(parser.seen) <= {
        "div",
        "b",
        "small",
        "table",
        "caption",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
    }
    assert made.hostile in parser.text[1]
    assert table._repr_html_() == html_table(table)
    assert str(table) == text_table(table)


def test_importing_the_console_is_light():
    code = "import sys, multihead.reader.console; print(*{m.split('.')[0] for m in sys.modules})"
    source = str(Path(multihead.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": source},
    )
    loaded = set(done.stdout.split())
    assert "multihead" in loaded
    assert not loaded & {"torch", "transformers", "rich", "jinja2", "pandas"}


def test_the_probe_is_named_only_where_it_ran(made):
    with_probe, without = made.table(2, 3, empty=()), made.table(2, 3)
    assert "measured on the probe" in text_table(with_probe)
    assert "the probe" not in text_table(without)
    assert "on another text they may do something else" in " ".join(text_table(without).split())
