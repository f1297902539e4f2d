"""The commands `check` and `warm`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import MultiheadError
from .options import check_outputs, print_text, replace_unprintable

if TYPE_CHECKING:
    from ..checks.report import Report

STYLES = {
    "right": "bold green",
    "wrong": "bold red",
    "partly judged": "bold yellow",
    "label": "bold",
}


def check_command(
    where: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:NAME",
            help="A Python file, which is run, and the name in it of a module, a class or a"
            " function that computes attention.",
        ),
    ],
    args: Annotated[
        str | None,
        typer.Option(
            metavar="ARGUMENTS",
            help="Constructor arguments of a class, or further keyword arguments of a function:"
            " --args '64, num_heads=4'.",
        ),
    ] = None,
    causal: Annotated[
        bool | None,
        typer.Option(
            "--causal/--not-causal",
            help="Whether it should hide later tokens; inferred unless given.",
        ),
    ] = None,
    num_heads: Annotated[
        int | None, typer.Option(help="Number of query heads, where no attribute gives it.")
    ] = None,
    scale: Annotated[
        float | None, typer.Option(help="Scale of the scores; 1/sqrt(head_dim) unless given.")
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Count what is a matter of taste as a bug too: what a query without a key gives,"
            " and what True means in an attention_mask.",
        ),
    ] = False,
    page: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a page (one HTML file) here: what was found, and the weights of each head"
            " next to those of the definition.",
        ),
    ] = None,
) -> None:
    """Check an attention implementation for bugs. Exit code 0: it is right, 1: it is wrong, 2: it
    couldn't be run, 3: no bug was found, but not everything could be judged.
    """
    check_outputs(page=(page, ".html .htm"))
    from ..checks.load import load_target

    target, further = load_target(where, args)
    from ..checks.run import check

    try:
        report = check(
            target,
            causal=causal,
            num_heads=num_heads,
            scale=scale,
            arguments=further,
            strict=strict,
        )
        try:
            if page is not None:
                from ..report.checked import write_check_page

                write_check_page(page, report)
        finally:
            _print_report(report)
        if page is not None:
            print_text(f"wrote {page.absolute()}: open it in a browser")
    except (MultiheadError, OSError):
        raise
    except Exception:  # 1 would mean that there are bugs in the target
        sys.excepthook(*sys.exc_info())
        print_text(
            "multihead: the check itself failed, by a bug in multihead: this is no verdict on"
            f" {where}. Please report it with the lines above; we're sorry.",
            sys.stderr,
        )
        raise typer.Exit(2) from None
    if report.exit_code:
        raise typer.Exit(report.exit_code)


def _print_report(report: Report) -> None:
    """Print a report: in colour and within the terminal's width, or into a pipe as plain text."""
    from rich.console import Console

    from ..terminal import print_parts

    replace_unprintable()
    console = Console()
    width = console.width if console.is_terminal else None
    print_parts(report.parts(), console, width=width, styles=STYLES)


def warm_command() -> None:
    """Compile the CPU kernels once per machine, so that no first call waits for it."""
    from ..ops.backends import jit

    print_text(f"{jit.compile_all()} kernels are ready")
