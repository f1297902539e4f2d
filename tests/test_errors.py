"""The kinds of errors, and the hint for a typo."""

from __future__ import annotations

import pytest

from multihead.errors import (
    MissingDependency,
    MultiheadError,
    ReadingError,
    SurgeryError,
    did_you_mean,
)


@pytest.mark.parametrize("kind", [MissingDependency, ReadingError, SurgeryError])
def test_every_kind_is_a_multihead_error_and_a_value_error(kind: type[Exception]) -> None:
    assert issubclass(kind, MultiheadError) and issubclass(kind, ValueError)
    assert issubclass(kind, ImportError) == (kind is MissingDependency)


@pytest.mark.parametrize(
    ("name", "hint"), [("entopy", "did you mean 'entropy'? "), ("xyz", ""), (None, ""), (5, "")]
)
def test_did_you_mean(name: object, hint: str) -> None:
    assert did_you_mean(name, ["entropy", "distance"]) == hint
