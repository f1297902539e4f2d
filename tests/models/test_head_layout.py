"""The heads of a pruned module, as a checkpoint of any version has them."""

from __future__ import annotations

import json

import pytest

from multihead import MultiheadError
from multihead.models.head_layout import HeadLayout

LAYOUT = HeadLayout((0, 2, 5), (0, 1), (0, 0, 1), (0, 2, 5), 6, "groups", True)
# as version 1 of the format writes it
ENTRY = {
    "heads": [0, 2, 5],
    "kv": [0, 1],
    "reads": [0, 0, 1],
    "numbers": [0, 2, 5],
    "of": 6,
    "layout": "groups",
    "bias": True,
}


def test_checkpoints_of_the_first_version_are_read() -> None:
    assert HeadLayout.from_json(ENTRY) == LAYOUT
    assert LAYOUT.to_json() == ENTRY
    dropped = HeadLayout((), (), (), (), 6, num_returns=2)
    assert HeadLayout.from_json(json.loads(json.dumps(dropped.to_json()))) == dropped


@pytest.mark.parametrize(
    ("kv_heads", "reads", "is_even"),
    [
        ((0, 1), (0, 0, 1, 1), True),
        ((0, 1), (0, 1, 0, 1), False),
        ((0, 1, 2), (0, 0, 1, 2), False),
        ((0,), (0, 0, 0, 0), True),
    ],
)
def test_even_is_what_every_attention_computes(
    kv_heads: tuple[int, ...], reads: tuple[int, ...], is_even: bool
) -> None:
    assert HeadLayout((0, 1, 2, 3), kv_heads, reads, (0, 1, 2, 3), 4).is_even == is_even


def test_a_missing_entry_is_named() -> None:
    with pytest.raises(MultiheadError, match=r"^it has no heads$"):
        HeadLayout.from_json({key: value for key, value in ENTRY.items() if key != "heads"})
    with pytest.raises(MultiheadError, match=r"^kv is \(-1, 0\)$"):  # as the file has it
        HeadLayout.from_json(ENTRY | {"kv": [-1, 0]})
