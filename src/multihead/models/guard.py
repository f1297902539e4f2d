"""The one place where an exception of transformers, tokenizers or gguf becomes the checkpoint's
fault.

A checkpoint can hold anything, and each library that reads it fails in its own way. Only their
calls are in this guard; an exception that passes through code of this package is a bug of ours and
keeps its traceback.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from ..errors import MultiheadError
from ..outside import clean_exception

__all__ = ["blame_checkpoint"]

PACKAGE = str(Path(__file__).parents[1])


@contextlib.contextmanager
def blame_checkpoint(what: str, advice: str = "") -> Iterator[None]:
    """Turn any exception of other libraries in the `with` into a MultiheadError: "`what`: the
    exception`advice`".

    >>> with blame_checkpoint("model='x': its config can't be used"):
    ...     int("eight")
    Traceback (most recent call last):
    multihead.errors.MultiheadError: model='x': its config can't be used: ValueError: invalid ...
    """
    try:
        yield
    except BaseException as error:
        if not _is_of_content(error) or _is_ours(error.__traceback__):
            raise
        message = f"{what}: {type(error).__name__}: {str(error).strip()}{advice}"
        raise MultiheadError(message) from clean_exception(error)


def _is_of_content(error: BaseException) -> bool:
    """Not the user's Ctrl-C and not an error of ours; a panic of Rust is no Exception."""
    if isinstance(error, MultiheadError):
        return False
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _is_ours(trace: TracebackType | None) -> bool:
    """Whether the exception came through code of this package that the guarded call ran."""
    files = []
    while trace is not None:
        files.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    return any(file.startswith(PACKAGE) for file in files[2:])  # after the guard and its caller
