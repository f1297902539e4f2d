"""Progress of long jobs on the terminal, and Ctrl-C that ends them in good order."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..io import Progress
from ..outside import clean

LONGEST = 60  # characters of a stage


@contextmanager
def show_progress(stage: str = "") -> Iterator[Progress]:
    """Show a bar on standard error while the context lasts; nothing where that is no terminal.

    Yields the `progress` callback of the library's verbs, called with (done, total, stage). A stage
    that is complete takes its bar away.

    >>> with show_progress("reading") as progress:
    ...     progress(1, 2, "reading")
    """
    if not sys.stderr.isatty():
        yield lambda done, total, stage: None
        return
    from rich import progress as rich
    from rich.console import Console

    bar = rich.Progress(
        rich.SpinnerColumn(),
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(stage, total=None, visible=bool(stage))

        def step(done: int, total: int, stage: str) -> None:
            now = bar.tasks[0]
            if (total or None) != now.total or done < now.completed:  # another stage
                bar.reset(task, total=total or None)
            shown = not total or done < total
            bar.update(task, completed=done, description=clean(stage, LONGEST), visible=shown)

        yield step


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Handle Ctrl-C while the context lasts; yields a function that returns whether it was pressed.

    Pressed once, it only asks the job to end after the current pass; pressed again it stops at
    once, with KeyboardInterrupt.
    """
    pressed = False

    def ask(*_: object) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.write(2, b"multihead: stopping after this pass; Ctrl-C again stops at once\n")

    before = signal.getsignal(signal.SIGINT)
    # ignored by a job that a shell runs in the background, which Ctrl-C isn't meant for
    if before != signal.SIG_IGN:
        signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
