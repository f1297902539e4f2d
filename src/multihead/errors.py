"""The errors that multihead raises on purpose, and the words that they share.

`MultiheadError` covers bad arguments, models that can't be read or pruned, and failed proofs. It
is a `ValueError`, so `except ValueError` catches it too. Anything else that leaves the library is
a bug of ours and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from .outside import clean

__all__ = [
    "DeviceError",
    "MissingDependency",
    "MultiheadError",
    "MultiheadWarning",
    "ReadingError",
    "SurgeryError",
    "did_you_mean",
]


LONGEST = 3_000  # characters of a message, at most


class MultiheadError(ValueError):
    """Base of all errors of this library: a bad argument, an unsupported model, a failed proof.

    A message may quote a checkpoint, a table or another library. It is one line without control
    characters, so that it is harmless on a terminal, and the middle of a long one is left out.

    >>> issubclass(MultiheadError, ValueError)
    True
    >>> MultiheadError("unknown \\x1b[31m model")
    MultiheadError('unknown �[31m model')
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(clean(arg, LONGEST) if isinstance(arg, str) else arg for arg in args))


class MultiheadWarning(UserWarning):
    """A remark on what a call will give, made before its work; the command prints it as a note.

    >>> issubclass(MultiheadWarning, UserWarning)
    True
    """


class DeviceError(MultiheadError, RuntimeError):
    """Tensors on several devices, or without memory: names the argument. It is a `RuntimeError`, as
    torch's own error is.

    >>> issubclass(DeviceError, RuntimeError)
    True
    """


class MissingDependency(MultiheadError, ImportError):
    """An optional dependency that is not installed; the message gives the pip command.

    >>> issubclass(MissingDependency, ImportError)
    True
    """


class ReadingError(MultiheadError):
    """A model that would be read wrongly: names the first site or output that differs, with both
    values.

    >>> issubclass(ReadingError, MultiheadError)
    True
    """


class SurgeryError(MultiheadError):
    """Heads that can't be removed or shared correctly: names the first site that differs, with both
    values.

    >>> issubclass(SurgeryError, MultiheadError)
    True
    """


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """A hint for a message, such as "did you mean 'entropy'? ", or "" where nothing is close.

    >>> did_you_mean("entopy", ["entropy", "distance"])
    "did you mean 'entropy'? "
    """
    near = difflib.get_close_matches(str(name), list(known), 1)
    return f"did you mean {near[0]!r}? " if near else ""
