"""The commands `table show`, `table merge` and `table compare`, on tables that `read --json`
wrote.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated

import typer

from ..errors import MultiheadError
from .options import AllHeadsOption, CsvOption, JsonOption, check_outputs, print_result
from .read import save_table, show_table

TableArgument = Annotated[Path, typer.Argument(help="Table that 'multihead read --json' wrote.")]


def show_command(
    table: TableArgument, csv: CsvOption = None, all_heads: AllHeadsOption = False
) -> None:
    """Print a saved table again."""
    check_outputs(csv=(csv, ".csv"))
    from ..reader.table import load_table

    loaded = load_table(table)
    save_table(loaded, csv)
    show_table(loaded, all_heads, csv)


def merge_command(
    tables: Annotated[
        list[Path], typer.Argument(help="Tables of one model that 'multihead read --json' wrote.")
    ],
    json: JsonOption = None,
    csv: CsvOption = None,
    all_heads: AllHeadsOption = False,
) -> None:
    """Add tables of one model on several texts, wherever they were made."""
    check_outputs(json=(json, ".json"), csv=(csv, ".csv"))
    twice = [
        path for path in tables if sum(path.resolve() == other.resolve() for other in tables) > 1
    ]
    if twice:
        raise MultiheadError(
            f"{twice[0]} is given twice, and its texts would count twice; give each table once"
        )
    from ..reader.table import load_table

    loaded = [load_table(path) for path in tables]
    for (a, one), (b, other) in itertools.combinations(zip(tables, loaded, strict=True), 2):
        if one.has_same_sums(other):
            raise MultiheadError(
                f"{a} and {b} hold the same numbers, so their texts would count twice; give one of"
                " them"
            )
    total = loaded[0]
    for path, table in zip(tables[1:], loaded[1:], strict=True):
        try:
            total = total + table
        except MultiheadError as error:
            raise MultiheadError(f"{tables[0]} and {path}: {error}") from error
    total.meta["text"] = f"{len(tables)} tables: " + ", ".join(map(str, tables))
    save_table(total, json, csv)
    show_table(total, all_heads, json, csv)


def compare_command(
    a: TableArgument,
    b: Annotated[Path, typer.Argument(help="Another one: after a training, or on another text.")],
    json: JsonOption = None,
    csv: CsvOption = None,
) -> None:
    """Show the largest differences of two tables of one model."""
    check_outputs(json=(json, ".json"), csv=(csv, ".csv"))
    from ..reader.compare import compare
    from ..reader.table import load_table

    comparison = compare(load_table(a), load_table(b))
    save_table(comparison, json, csv)
    print_result(comparison, json, csv)
