"""Python files of the user: run one, and get what it defines under a name (`FILE.py:NAME`)."""

from __future__ import annotations

import sys
import traceback
import types
from pathlib import Path
from typing import Any

from .errors import MultiheadError, did_you_mean

__all__ = ["load_name"]

MAX_NAMES = 12  # that a message lists


def load_name(where: str, *, argument: str = "", example: str = "attention.py:Attention") -> Any:
    """Run a file as Python runs it, and return what it defines as NAME.

    Args:
        where: `FILE.py:NAME`.
        argument: the name of the argument that `where` was passed as, for messages.
        example: of such an argument, for messages.

    Raises:
        FileNotFoundError: there is no such file.
        MultiheadError: not FILE.py:NAME; the file raises an error, with its line; or it doesn't
            define NAME, with the names that it defines.

    >>> load_name("measure.py", argument="function", example="measure.py:accuracy")
    Traceback (most recent call last):
    multihead.errors.MultiheadError: function='measure.py': expected FILE.py:NAME, such as ...
    """
    label = f"{argument}={where!r}" if argument else where
    path, _, name = where.rpartition(":")
    if not path or not name:
        raise MultiheadError(f"{label}: expected FILE.py:NAME, such as {example}")
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"{label}: there is no such file, {path}")
    module = _run(file, label)
    values = vars(module)
    if name in values:
        return values[name]
    public = [
        n
        for n, v in values.items()
        if not n.startswith("_") and not isinstance(v, types.ModuleType)
    ]
    defined = [
        n
        for n in public
        if not callable(values[n]) or getattr(values[n], "__module__", "") == module.__name__
    ]
    hint = did_you_mean(name, public)
    raise MultiheadError(
        f"{label}: {path} has no {name!r}; {hint}"
        f"it has {', '.join((defined or public)[:MAX_NAMES]) or 'nothing'}"
    )


def _run(file: Path, label: str) -> types.ModuleType:
    module = types.ModuleType(f"_multihead_user_{file.stem}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # where dataclasses look for their module
    folder = str(file.absolute().parent)
    sys.path.insert(0, folder)
    try:
        exec(compile(file.read_bytes(), str(file), "exec"), vars(module))
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(file)]
        line = f"line {lines[-1]}: " if lines else ""
        raise MultiheadError(
            f"{label}: {file} can't be run: {line}{type(error).__name__}: {error}"
        ) from error
    finally:
        sys.path.remove(folder)
    return module
