"""Progress on long work: a bar on a terminal, nothing in a pipe."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Shows `what` and, as the given function is called with (done, total), a bar; on standard
    error, then gone.
    """
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)


def stages() -> Callable[[str, int, int], None]:
    """One bar after another, for work of several kinds: called with what is being done, how far,
    and of how many.
    """
    if not sys.stderr.isatty():
        return lambda what, done, total: None
    stack, name = ExitStack(), ""
    show: Callable[[int, int], None] = lambda done, total: None  # noqa: E731

    def step(what: str, done: int, total: int) -> None:
        nonlocal name, show
        if what != name:
            stack.close()
            name, show = what, stack.enter_context(progress(what))
        show(done, total)
        if done >= total:
            stack.close()
            name = ""

    return step


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed: the first time it only asks to come to an end, the second time it
    stops at once.
    """
    pressed = False

    def ask(*_: object) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.write(2, b"multihead: stopping after this pass; Ctrl-C again stops at once\n")

    before = signal.getsignal(signal.SIGINT)
    if (
        before != signal.SIG_IGN
    ):  # as a shell sets it for work in the background: Ctrl-C isn't meant for it
        signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
