"""Shared checks of arguments: what passes, and the messages of the rest."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from multihead.layers.require import require_number, require_positive_int, to_position_ids


def test_what_passes() -> None:
    require_positive_int("size", np.int64(3))
    require_number("theta", 0.5, "be positive", above=0.0)
    to_position_ids("positions", torch.arange(3, dtype=torch.uint8), "L")
    to_position_ids("positions", torch.zeros(2, 3, dtype=torch.long), "L")


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: require_positive_int("size", 0), ValueError, ["size=0", "at least 1"]),
        (lambda: require_positive_int("size", True), TypeError, ["size=True", "integer"]),
        (lambda: require_positive_int("size", 2.0), TypeError, ["size=2.0", "integer"]),
        (lambda: require_number("x", math.nan, "be finite"), ValueError, ["x=nan", "be finite"]),
        (lambda: require_number("x", "1", "be finite"), TypeError, ["x='1'", "number"]),
        (lambda: require_number("x", 0.5, "be 1 or more", least=1.0), ValueError, ["x=0.5"]),
        (
            lambda: to_position_ids("ids", torch.zeros(3), "L"),
            TypeError,
            ["ids is torch.float32", "ids.long()"],
        ),
        (
            lambda: to_position_ids("ids", torch.zeros(1, 2, 3).long(), "L"),
            ValueError,
            ["ids[1, 2, 3]", "[L] or [B, L]"],
        ),
    ],
)
def test_messages(call: Any, error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)
