"""What other libraries raise over a checkpoint becomes a MultiheadError; a bug of ours doesn't."""

from __future__ import annotations

import traceback

import pytest

from multihead.errors import MultiheadError, ReadingError
from multihead.models import guard
from multihead.models.guard import blame_checkpoint


class PanicException(BaseException):
    """As pyo3's, which is no Exception."""


@pytest.mark.parametrize(
    "error",
    [
        KeyError("a"),
        RecursionError("deep"),
        MemoryError(),
        OSError(5, "\x1b[31m"),
        PanicException(),
    ],
)
def test_any_exception_is_the_checkpoints_fault(error: BaseException) -> None:
    with pytest.raises(MultiheadError) as caught, blame_checkpoint("model='x'", ". Do this"):
        raise error
    message = str(caught.value)
    assert message.startswith(f"model='x': {type(error).__name__}: ") and message.endswith(
        "Do this"
    )
    assert "\x1b" not in "".join(traceback.format_exception(caught.value))


def test_an_error_of_this_library_stays_as_it_is() -> None:
    with pytest.raises(ReadingError, match=r"^site$"), blame_checkpoint("model='x'"):
        raise ReadingError("site")


def test_an_exception_that_came_through_this_package_is_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def called_by_another_library() -> None:
        raise ZeroDivisionError

    with pytest.raises(MultiheadError), blame_checkpoint("model='x'"):
        called_by_another_library()
    monkeypatch.setattr(guard, "PACKAGE", __file__)
    with pytest.raises(ZeroDivisionError), blame_checkpoint("model='x'"):
        called_by_another_library()
