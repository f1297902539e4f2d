"""Checkpoints that were made to do harm: one line and exit code 2, in time, and nothing is run,
unpickled, written, or printed raw.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from cli.commands import call, run
from models import hostile
from multihead.models import loading
from multihead.models.guard import blame_checkpoint

SECONDS = 60  # of a row; a hang is endless
# what other libraries ignore, so that the checkpoint can be read
HARMLESS = {
    "code of the tokenizer",  # its tokenizer.json is enough
    "code of the tokenizer elsewhere",
    "quantised by nothing",
    "an abstract class",  # the config's own class is opened
    *(name for name in hostile.TEXTS if name.startswith("a tokenizer's class")),
}
ROWS = hostile.TEXTS | hostile.CONFIGS | hostile.WEIGHTS | hostile.FILES


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"still running after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def trapped(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The small checkpoint, next to another one, with code and a pickle that leave a mark."""
    shutil.copytree(llama, tmp_path / "plain")
    mark = f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
    for name in ("evil.py", "__init__.py", "setup.py", "conftest.py", "modeling_evil.py"):
        (llama / name).write_text(mark)
    opcodes = f"cos\nsystem\n(V{'touch ' + str(tmp_path / 'ran')}\ntR."
    (llama / "pytorch_model.bin").write_bytes(opcodes.encode())
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("MULTIHEAD_DEBUG", raising=False)
    return llama


def listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def check_row(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """Read a checkpoint by the command; returns its message, "" where it could be read."""
    above = folder if folder.is_dir() else folder.parent
    before = listing(above.parent)
    with time_limit(SECONDS):
        code, out, err = call(monkeypatch, capsys, "read", folder, "--prompt", "the head the head")
    assert all(line.isprintable() for line in (out + err).split("\n"))
    assert not (above.parent / "ran").exists() and listing(above.parent) == before
    if name in HARMLESS:
        assert (code, err) == (0, "")
        return ""
    # notes on how the model was opened come first
    err = "".join(line for line in err.splitlines(True) if not line.startswith("note: "))
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("multihead: ") and len(err) < 3_200
    assert "Unpickler" not in err  # torch has tried to unpickle it
    return err


@pytest.mark.parametrize("name", ROWS)
def test_a_hostile_checkpoint_is_refused_in_one_line(
    name: str, trapped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ROWS[name](trapped)
    check_row(name, trapped, monkeypatch, capsys)


def test_the_checkpoint_itself_can_be_read(
    trapped: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, capsys, "read", trapped, "--prompt", "the head")[::2] == (0, "")


@pytest.mark.parametrize("name", ["a template that panics", "a model type with colours"])
def test_the_whole_process_prints_one_line(name: str, trapped: Path) -> None:
    ROWS[name](trapped)
    done = run("read", trapped, "--prompt", "the head")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.rstrip("\n").isprintable()


@pytest.mark.parametrize(
    "command",
    [
        ["prune", "MODEL", "--calibrate", "TEXT", "--remove", "1"],
        ["share", "MODEL", "--calibrate", "TEXT", "--num-kv-heads", "1"],
        ["tune", "MODEL", "--calibrate", "TEXT"],
        ["curve", "MODEL", "--calibrate", "TEXT", "--evaluate", "TEXT", "--json", "OUT"],
        ["evaluate", "MODEL", "--text", "TEXT"],
        ["cost", "MODEL"],
    ],
    ids=lambda command: command[0],
)
def test_every_command_refuses_it_alike(
    command: list[str],
    trapped: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "text.txt").write_text("the head the head the head")
    places = {"MODEL": trapped, "TEXT": tmp_path / "text.txt", "OUT": tmp_path / "out.json"}
    for name in (
        "a model type with a link",
        "architectures a number",
        "nested brackets",
        "num_hidden_layers is 1000000",
        "num_attention_heads is 1000000000",
        "config.json a pipe",
        "rope of 10^30",
    ):
        shutil.rmtree(trapped)
        shutil.copytree(tmp_path / "plain", trapped)
        ROWS[name](trapped)
        with time_limit(SECONDS):
            code, out, err = call(monkeypatch, capsys, *(places.get(w, w) for w in command))
        if command[0] == "cost" and name == "rope of 10^30":
            continue  # a cost may have a rope that can't be computed
        assert (code, out, err.count("\n")) == (2, "", 1), f"{name}: {err}"
        assert err.rstrip("\n").isprintable()
        assert not (tmp_path / "out.json").exists()


# --- the other side: a bug of ours is a traceback ---


@pytest.mark.parametrize(
    "where",
    [
        (loading, "_check_filled"),
        (loading, "_use_installed_attention"),
        (loading, "weigh_model"),
        (loading, "check_weight_files"),
        (loading, "named_class"),
    ],
    ids=lambda where: where[1],
)
def test_a_bug_of_ours_while_loading_is_a_traceback(
    where: tuple[object, str], llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(*where, fail)
    with pytest.raises(ZeroDivisionError, match="ours"):
        loading.load(llama)


def test_a_bug_of_ours_in_what_transformers_runs_is_a_traceback(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from multihead.models import pruned

    def fail(*_: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(pruned, "resize_as_configured", fail)
    hostile.config(multihead={"version": 1, "sites": {}})(llama)
    with pytest.raises(ZeroDivisionError, match="ours"):
        loading.load(llama)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_what_the_user_asked_for_goes_through(error: BaseException) -> None:
    with pytest.raises(type(error)), blame_checkpoint("model='x'"):
        raise error
