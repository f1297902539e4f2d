"""Files: atomic writes, checks of paths before any work, and resumable progress.

Everything that the library writes goes through `atomic_file` or `atomic_folder`: next to the target
first, then renamed, so that the target is the old content or the whole new one at any moment.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import MultiheadError
from .version import __version__

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Progress",
    "ResumeFile",
    "atomic_file",
    "atomic_folder",
    "parse_json",
    "read_regular_file",
    "require_file_path",
    "require_new_file",
    "require_new_folder",
    "require_regular_file",
    "write_text",
]

# The callback of every long job: units done, units in all (0 where unknown), and the current stage.
Progress = Callable[[int, int, str], None]

T = TypeVar("T")


# ---- checks


def require_file_path(path: str | os.PathLike[str], argument: str = "path") -> Path:
    """Check that a file can be written at `path`: its folder exists and takes files of that name,
    and nothing but a file is there.

    Args:
        path: the file to write.
        argument: how the user passed it, for the message: the name of an argument, or an option
            such as "--json".

    Raises:
        MultiheadError: the folder doesn't exist or can't be written to, the name is too long, or
            `path` is a folder or a device.

    >>> require_file_path("nowhere/heads.json")
    Traceback (most recent call last):
    multihead.errors.MultiheadError: path='nowhere/heads.json': the folder ... doesn't exist; ...
    """
    file = Path(path)
    name, folder = _name(path, argument), file.absolute().parent
    _require_parent(folder, name)
    _require_writable(file, name)
    if file.is_dir():
        raise MultiheadError(f"{name} is a folder; give the name of a file in it")
    if (file.exists() and not file.is_file()) or folder == Path("/dev"):
        raise MultiheadError(f"{name} is no regular file; give the name of one, or of a new one")
    return file


def _name(path: str | os.PathLike[str], argument: str) -> str:
    """An argument of Python, or an option, with its value."""
    return f"{argument} {path}" if argument.startswith("-") else f"{argument}={str(path)!r}"


def _require_parent(folder: Path, name: str) -> None:
    if folder.is_dir():
        return
    if folder.exists():
        raise MultiheadError(f"{name}: {str(folder)!r} is a file; give a path in a folder")
    raise MultiheadError(
        f"{name}: the folder {str(folder)!r} doesn't exist; create it first, or give a path in"
        " one that does"
    )


def require_new_folder(path: str | os.PathLike[str], argument: str = "out") -> Path:
    """Check that a new folder could be created at `path`: nothing is there but an empty folder.

    Raises:
        MultiheadError: there is something already, `path` is a link, or the folder around it
            doesn't exist or can't be written to.
    """
    folder = Path(path)
    name = _name(path, argument)
    _require_parent(folder.absolute().parent, name)
    _require_writable(folder, name)
    if folder.is_symlink():
        raise MultiheadError(
            f"{name} is a link, which can't become a folder; give the name of a new folder"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise MultiheadError(
            f"{name}: there is something already, and nothing is overwritten; give the name of a"
            " new folder"
        )
    return folder


def require_new_file(path: str | os.PathLike[str], argument: str = "out") -> Path:
    """Check that a new file could be created at `path`; see `require_file_path`.

    Raises:
        MultiheadError: there is something already, or no file can be written there.
    """
    file = require_file_path(path, argument)
    name = _name(path, argument)
    if file.exists() or file.is_symlink():
        raise MultiheadError(
            f"{name}: there is something already, and nothing is overwritten; give the name of a"
            " new file"
        )
    return file


def _require_writable(path: Path, name: str) -> None:
    """Raise where nothing of that name can be written: by trying, next to it, under the name that
    an atomic write begins with. Permissions don't bind root, nor of disks that are read-only.
    """
    folder = path.absolute().parent
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{path.name}.", suffix=".part"):
            pass
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise MultiheadError(
            f"{name}: the folder {str(folder)!r} can't be written to under that name ({why}); give"
            " a path in another one, or another name"
        ) from error


# ---- reading files from anywhere

# bytes of a file that is read whole, at most
LONGEST_FILE = 1 << 30
OPENED = ("/dev/fd/", "/proc/self/fd/", "/dev/stdin")  # what a shell hands over, as in <(command)
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def require_regular_file(path: str | os.PathLike[str], name: str) -> Path:
    """Check that `path` is a regular file or a link to one: reading a pipe or a device may never
    end.

    Args:
        path: the file to read; it exists.
        name: how messages name it, such as "path='x.json'".

    Raises:
        OSError: it doesn't exist, or is a link to itself.
        MultiheadError: it is a folder, a pipe, a socket or a device.

    >>> require_regular_file("/dev/null", "table /dev/null")
    Traceback (most recent call last):
    multihead.errors.MultiheadError: table /dev/null is a device; expected a regular file
    """
    file = Path(path)
    try:
        kind = stat.S_IFMT(file.stat().st_mode)
    except ValueError as error:  # a NUL in the name
        raise MultiheadError(f"{name} is not the name of a file ({error})") from error
    except OSError as error:
        raise OSError(error.errno, f"{name}: {error.strerror}") from error
    if kind != stat.S_IFREG:
        what = KINDS.get(kind, "no file")
        raise MultiheadError(f"{name} is {what}; expected a regular file")
    return file


def read_regular_file(path: str | os.PathLike[str], name: str) -> bytes:
    """The content of a regular file, or of what a shell hands over as one.

    Raises:
        OSError: it doesn't exist, or can't be read.
        MultiheadError: see `require_regular_file`; or it is longer than a gibibyte.

    >>> read_regular_file("/dev/zero", "table /dev/zero")
    Traceback (most recent call last):
    multihead.errors.MultiheadError: table /dev/zero is a device; expected a regular file
    """
    if str(path).startswith(OPENED):
        with open(path, "rb") as file:
            content = file.read(LONGEST_FILE + 1)
        size = len(content)
    else:
        size = require_regular_file(path, name).stat().st_size
        content = b"" if size > LONGEST_FILE else Path(path).read_bytes()
    if size > LONGEST_FILE:
        raise MultiheadError(f"{name} has {size:,} bytes, expected at most {LONGEST_FILE:,}")
    return content


def parse_json(content: bytes, name: str, hint: str = "") -> Any:
    """The value that a JSON file holds.

    Args:
        content: of the file.
        name: how messages name it.
        hint: the end of a message, such as what to do.

    Raises:
        MultiheadError: it isn't JSON in UTF-8, or is nested too deeply.

    >>> parse_json(b'{"a": [1, 2]}', "a.json")
    {'a': [1, 2]}
    >>> parse_json(b'{"a":', "a.json")
    Traceback (most recent call last):
    multihead.errors.MultiheadError: a.json is not valid JSON (Expecting value: line 1 column 6 ...)
    """
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError:
        why = "its brackets are nested too deeply"
    except ValueError as error:
        why = str(error)
    raise MultiheadError(f"{name} is not valid JSON ({why}){hint}")


# ---- atomic writes


@contextmanager
def atomic_file(
    path: str | os.PathLike[str], *, argument: str = "path", part: Path | None = None
) -> Iterator[Path]:
    """Give a temporary path next to `path` to write to; it replaces `path` at the end.

    After an exception `path` is as it was, and the temporary file is removed. The file keeps
    its mode, a new one gets the usual mode.

    Args:
        path: the file to write.
        argument: how the user passed it, for the messages.
        part: the temporary path; by default one that no other writer has. A file with a single
            writer that may be killed names it, so that at most one remains.

    Raises:
        MultiheadError: see `require_file_path`.
        OSError: the file can't be written.
    """
    target = require_file_path(path, argument)
    if part is None:
        try:
            handle, name = tempfile.mkstemp(
                dir=target.parent, prefix=f".{target.name}.", suffix=f".part{target.suffix}"
            )
        except OSError as error:  # with the path that the user gave
            raise OSError(error.errno, error.strerror, str(target)) from error
        os.close(handle)
        part = Path(name)
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.chmod(part, target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask())
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str, *, argument: str = "path") -> None:
    """Write `text` to a UTF-8 file, whole or not at all; see `atomic_file`."""
    with atomic_file(path, argument=argument) as part:
        part.write_text(text, encoding="utf-8")


@contextmanager
def atomic_folder(path: str | os.PathLike[str], *, argument: str = "out") -> Iterator[Path]:
    """Give a temporary folder next to `path` to fill; it becomes `path` at the end.

    Raises:
        MultiheadError: see `require_new_folder`.
        OSError: it can't be written. The temporary folder is removed.
    """
    target = require_new_folder(path, argument)
    partial = Path(
        tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.absolute().parent)
    )
    try:
        yield partial
        partial.chmod(0o777 & ~_umask())
        os.rename(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# ---- resumable progress


class ResumeFile:
    """Progress of a long job in one file, so that a killed job continues where it was.

    The file holds the job's settings and its state (JSON), and tensors, all under a checksum. A job
    with other settings can't continue from it.

    Args:
        path: the file; it is whole at any moment. None: nothing is kept.
        job: a noun for the messages, such as "reading".
        settings: everything that the result depends on, by name; JSON values.
        seconds: between two writes at least.
        share: of the job's time that writing may take at most.

    Raises:
        MultiheadError: no file can be written at `path`.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "progress"
    >>> ResumeFile(path, "sum", {"numbers": 3}).save({"sum": 7})
    >>> ResumeFile(path, "sum", {"numbers": 3}).load(lambda state, tensors: state["sum"])
    7
    >>> ResumeFile(path, "sum", {"numbers": 4}).load(lambda state, tensors: state["sum"])
    Traceback (most recent call last):
    multihead.errors.MultiheadError: resume=... was written for another sum (numbers 3, now 4), ...
    """

    FORMAT, VERSION = "multihead-progress", 2

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        job: str,
        settings: Mapping[str, Any],
        *,
        seconds: float = 20.0,
        share: float = 0.05,
    ) -> None:
        self.path = None if path is None else require_file_path(path, "resume")
        self.job = job
        self.settings = json.loads(json.dumps({"multihead": __version__, **settings}))
        self.seconds, self.share = seconds, share
        self._written, self._took = time.monotonic(), 0.0

    def load(self, parse: Callable[[dict[str, Any], dict[str, Tensor]], T]) -> T | None:
        """Read the state that an earlier job saved, or None where there is no file.

        Args:
            parse: turns the state and the tensors into what the job continues from. It raises
                ValueError, KeyError, TypeError or AttributeError where they are damaged.

        Raises:
            MultiheadError: the file is damaged or belongs to another job.
        """
        if self.path is None or not self.path.exists():
            return None
        try:
            checksum, _, body = read_regular_file(self.path, "it").partition(b"\n")
            if hashlib.sha256(body).hexdigest().encode() != checksum:
                raise MultiheadError("its checksum is not that of its content")
            text, _, packed = body.partition(b"\n")
            data = json.loads(text)
            if (data["format"], data["version"]) != (self.FORMAT, self.VERSION):
                raise MultiheadError(f"format {data['format']!r}, version {data['version']}")
            settings = dict(data["settings"])
            tensors: dict[str, Tensor] = {}
            if packed:
                from safetensors.torch import load

                tensors = load(packed)
            parsed = parse(data["state"], tensors)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self.error(f"is damaged or not a progress file ({error})") from error
        differing = sorted(
            name
            for name in self.settings.keys() | settings.keys()
            if not _is_close(self.settings.get(name), settings.get(name))
        )
        if differing:
            shown = ", ".join(
                f"{name} {_short(settings.get(name))}, now {_short(self.settings.get(name))}"
                for name in differing
            )
            raise self.error(f"was written for another {self.job} ({shown})")
        return parsed

    def is_due(self) -> bool:
        """Whether it is time for another write."""
        wait = max(self.seconds, self._took / self.share)
        return self.path is not None and time.monotonic() - self._written >= wait

    def save(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Write the state of the job (JSON values, no NaN) and its tensors."""
        if self.path is None:
            return
        start = time.monotonic()
        data = {
            "format": self.FORMAT,
            "version": self.VERSION,
            "settings": self.settings,
            "state": state,
        }
        body = json.dumps(data, allow_nan=False).encode()
        if tensors:
            from safetensors.torch import save

            kept = {name: x.detach().contiguous().cpu() for name, x in tensors.items()}
            body += b"\n" + save(kept)
        part = self.path.with_name(f"{self.path.name}.part")
        with atomic_file(self.path, argument="resume", part=part), part.open("wb") as file:
            file.write(hashlib.sha256(body).hexdigest().encode() + b"\n")
            file.write(body)
        self._written = time.monotonic()
        self._took = self._written - start

    def error(self, why: str) -> MultiheadError:
        """The error for a file that the job can't continue from; `why` completes its name."""
        return MultiheadError(
            f"resume={str(self.path)!r} {why}, so the {self.job} can't continue from it; delete"
            " that file to start again"
        )


def _is_close(a: Any, b: Any) -> bool:
    """Equal, floats to four digits: recomputed values may differ in their last digits."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_is_close(value, b[name]) for name, value in a.items())
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-4)
    return bool(a == b)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
