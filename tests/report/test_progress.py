"""The bar of a long job on a terminal, and Ctrl-C that ends it in good order."""

from __future__ import annotations

import io
import signal

import pytest
from rich import progress as rich

from multihead.report.progress import show_progress, stoppable


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_nothing_is_shown_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress("reading") as progress:
        progress(1, 2, "reading")
    assert capsys.readouterr() == ("", "")


def test_a_bar_follows_the_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    bars: list[rich.Progress] = []
    add = rich.Progress.add_task

    def add_task(self: rich.Progress, *args: object, **options: object) -> rich.TaskID:
        bars.append(self)
        return add(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(rich.Progress, "add_task", add_task)
    shown = []
    with show_progress() as progress:
        for done, total, stage in [
            (1, 0, "loading"),  # the total isn't known
            (2, 0, "loading"),
            (1, 4, "scoring heads"),
            (4, 4, "scoring heads"),
            (1, 4, "tuning, loss 0.5000"),
        ]:
            progress(done, total, stage)
            (task,) = bars[0].tasks
            shown.append((task.description, task.completed, task.total, task.visible))
    assert shown == [
        ("loading", 1, None, True),
        ("loading", 2, None, True),
        ("scoring heads", 1, 4, True),
        ("scoring heads", 4, 4, False),
        ("tuning, loss 0.5000", 1, 4, True),
    ]


def test_ctrl_c_asks_first_and_stops_then(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    with stoppable() as stop:
        assert not stop()
        signal.raise_signal(signal.SIGINT)
        assert stop() and "stopping after this pass" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stoppable() as stop:
            signal.raise_signal(signal.SIGINT)
            assert not stop()
    finally:
        signal.signal(signal.SIGINT, before)
