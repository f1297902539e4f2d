"""The command `multihead`: one function for each command, with options and calls only.

`options.py` holds what several commands take; nothing heavy is imported before it is needed.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from types import TracebackType
from typing import Annotated, TextIO

import typer

from ..errors import LONGEST, MultiheadError, MultiheadWarning
from ..outside import clean, clean_lines
from ..version import __version__
from . import check, cost, prune, read, table
from .options import DEBUG, common_options, print_text

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Multi-head attention: read what every head of a model does, prune heads, compute what"
    " attention costs, and check an implementation of it.",
)
tables = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Print, add and compare tables that 'multihead read --json' wrote.",
)


def _print_version(value: bool) -> None:
    if value:
        print(f"multihead {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


app.add_typer(tables, name="table")
for group, name, command in (
    (app, "read", read.read_command),
    (tables, "show", table.show_command),
    (tables, "merge", table.merge_command),
    (tables, "compare", table.compare_command),
    (app, "prune", prune.prune_command),
    (app, "share", prune.share_command),
    (app, "tune", prune.tune_command),
    (app, "curve", prune.curve_command),
    (app, "evaluate", prune.evaluate_command),
    (app, "cost", cost.cost_command),
    (app, "check", check.check_command),
    (app, "statistics", read.statistics_command),
    (app, "warm", check.warm_command),
):
    group.command(name)(common_options(command))


def main() -> None:
    """Run the command. A user's error is one line on standard error and exit code 2; a bug of ours
    keeps its traceback, and so does every error with `--debug` or MULTIHEAD_DEBUG=1. Neither prints
    control characters.
    """
    if not sys.warnoptions:  # of other libraries, on what their users can't change here
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", MultiheadWarning)
    warnings.showwarning = _print_warning
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_traceback
    try:
        app()
    except (MultiheadError, OSError) as error:
        if os.environ.get(DEBUG):
            raise
        rank = os.environ.get("RANK", "0")  # of the processes that torchrun starts
        message = clean(error, LONGEST)
        print(f"multihead{'' if rank == '0' else f' (rank {rank})'}: {message}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("multihead: stopped", file=sys.stderr)
        sys.exit(130)


def _print_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a remark of ours as a note, and another library's with its place."""
    if issubclass(category, MultiheadWarning):
        print_text(f"note: {clean(str(message), LONGEST)}", sys.stderr)
    else:
        (file or sys.stderr).write(
            warnings.formatwarning(message, category, filename, lineno, line or "")
        )


def _print_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print a traceback as Python does, with what it quotes from outside made harmless."""
    print(
        clean_lines("".join(traceback.format_exception(kind, error, trace))),
        end="",
        file=sys.stderr,
    )
