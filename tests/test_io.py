"""Files are written whole or not at all; a killed job continues where it was."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from multihead.errors import MultiheadError
from multihead.io import (
    ResumeFile,
    atomic_file,
    atomic_folder,
    require_file_path,
    require_new_file,
    require_new_folder,
    write_text,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_whole_or_stays(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    write_text(target, "old é")
    target.chmod(0o640)

    def interrupted() -> None:
        with atomic_file(target) as part:
            part.write_text("half of the")
            assert part.parent == tmp_path and part.suffix == ".json"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert target.read_text(encoding="utf-8") == "old é" and names(tmp_path) == ["a.json"]
    write_text(target, "new")
    assert target.read_text() == "new" and target.stat().st_mode & 0o777 == 0o640
    assert names(tmp_path) == ["a.json"]


def test_a_new_file_has_the_usual_mode(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "a", "")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_paths_that_can_not_be_written(tmp_path: Path) -> None:
    with pytest.raises(MultiheadError, match=r"path='.*no/a': the folder '.*no' doesn't exist"):
        write_text(tmp_path / "no" / "a", "")
    with pytest.raises(MultiheadError, match=r"--json .*: the folder .* doesn't exist; create it"):
        require_file_path(tmp_path / "no" / "a", "--json")
    with pytest.raises(MultiheadError, match=r"path='.*' is a folder; give the name of a file"):
        require_file_path(tmp_path)
    if os.geteuid():  # root can write to all folders
        (shut := tmp_path / "shut").mkdir(0o500)
        with pytest.raises(OSError, match="shut/a"):
            write_text(shut / "a", "")


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "model"

    def interrupted() -> None:
        with atomic_folder(target) as partial:
            (partial / "weights").write_text("")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert names(tmp_path) == []
    with atomic_folder(target) as partial:
        (partial / "weights").write_text("w")
        assert not target.exists()
    assert names(tmp_path) == ["model"] and names(target) == ["weights"]
    with pytest.raises(MultiheadError, match="there is something already"):
        require_new_folder(target)
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    with pytest.raises(MultiheadError, match=r"out='.*link' is a link"):
        require_new_folder(tmp_path / "link")
    (tmp_path / "empty").mkdir()
    assert require_new_folder(tmp_path / "empty") == tmp_path / "empty"


def test_a_job_continues_from_its_state_and_tensors(tmp_path: Path) -> None:
    path, settings = tmp_path / "p", {"seed": 1, "weights": {"w": 1.0}}
    tensors = {"w": torch.randn(3, 4).T, "half": torch.ones(2, dtype=torch.bfloat16)}
    ResumeFile(path, "job", settings).save({"done": 3}, tensors)
    again = ResumeFile(path, "job", {"seed": 1, "weights": {"w": 1.00001}})
    state, kept = again.load(lambda state, kept: (state, kept)) or ({}, {})
    assert state == {"done": 3}
    torch.testing.assert_close(kept, tensors, rtol=0, atol=0)
    assert names(tmp_path) == ["p"]


def test_without_a_file_there_is_nothing_to_continue_from(tmp_path: Path) -> None:
    assert ResumeFile(tmp_path / "p", "job", {}).load(lambda state, _: state) is None
    nothing = ResumeFile(None, "job", {}, seconds=0)
    nothing.save({})
    assert nothing.load(lambda state, _: state) is None and not nothing.is_due()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"seed": 2, "name": "a"}, r"another job \(seed 1, now 2\)"),
        ({"seed": 1}, r"another job \(name \"a\", now null\)"),
        ({"seed": 1, "name": "b" * 99}, r"now \"bbb.*\.\.\.\)"),
    ],
)
def test_another_job_does_not_continue(
    tmp_path: Path, settings: dict[str, object], words: str
) -> None:
    ResumeFile(tmp_path / "p", "job", {"seed": 1, "name": "a"}).save({})
    with pytest.raises(MultiheadError, match=words):
        ResumeFile(tmp_path / "p", "job", settings).load(lambda state, _: state)


@pytest.mark.parametrize("tensors", [{}, {"w": torch.ones(5)}], ids=["state", "tensors"])
@pytest.mark.parametrize("end", [0, 1, 30, -1])
def test_a_damaged_file_is_refused(
    tmp_path: Path, end: int, tensors: dict[str, torch.Tensor]
) -> None:
    file = ResumeFile(tmp_path / "p", "job", {})
    file.save({"done": 3}, tensors)
    (tmp_path / "p").write_bytes((tmp_path / "p").read_bytes()[:end])
    with pytest.raises(MultiheadError, match=r"resume='.*p' is damaged .*; delete that file to"):
        file.load(lambda state, _: state)


def test_writing_takes_little_of_the_time(tmp_path: Path) -> None:
    file = ResumeFile(tmp_path / "p", "job", {})
    assert not file.is_due()
    file._written -= 21
    assert file.is_due()
    file._took = 2.0  # a large file: no more than a twentieth of the time
    assert not file.is_due()
    assert ResumeFile(tmp_path / "p", "job", {}, seconds=0).is_due()


def test_a_new_file_replaces_nothing(tmp_path: Path) -> None:
    assert require_new_file(tmp_path / "x") == tmp_path / "x"
    (tmp_path / "x").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "none")
    for name in ("x", "link"):
        with pytest.raises(MultiheadError, match="there is something already, and nothing is ov"):
            require_new_file(tmp_path / name)
    with pytest.raises(
        MultiheadError, match=r"^--save [^=]*: '.*x' is a file; give a path in a fold"
    ):
        require_new_folder(tmp_path / "x" / "new", "--save")
    with pytest.raises(MultiheadError, match=r"--save .*: the folder .* doesn't exist"):
        require_new_file(tmp_path / "none" / "x", "--save")


def test_targets_that_can_not_be_written(tmp_path: Path) -> None:
    """Found by trying: whoever may do anything still can't write to /proc, nor a name too long."""
    os.mkfifo(tmp_path / "pipe")
    for path, words in (
        ("/proc/x.json", "can't be written to under that name"),
        (tmp_path / ("x" * 300), "can't be written to under that name"),
        (tmp_path / "a\0b", "null|can't be written"),
        ("/dev/stdout", "no regular file"),
        (tmp_path / "pipe", "no regular file"),
    ):
        with pytest.raises((MultiheadError, ValueError), match=words):
            require_file_path(path)
    for path in ("/proc/x", tmp_path / ("x" * 300)):
        with pytest.raises(MultiheadError, match="can't be written to"):
            require_new_folder(path)
    assert [p.name for p in tmp_path.iterdir()] == ["pipe"]
