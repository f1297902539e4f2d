"""The checks of the constructor of `MultiHeadAttention`, alone; its messages are tested with it."""

from __future__ import annotations

import pytest

from multihead.layers.options import check_options, check_position_encoding, check_sizes
from multihead.layers.position_bias import ALiBi
from multihead.layers.rotary import Rotary


def test_sizes_have_defaults() -> None:
    sizes = dict(embed_dim=24, num_heads=4, num_kv_heads=None, head_dim=None, kdim=None)
    assert check_sizes(**sizes) == (4, 6)
    assert check_sizes(**{**sizes, "num_kv_heads": 2, "head_dim": 5}) == (2, 5)
    for wrong in ({"num_kv_heads": 3}, {"num_heads": 5}, {"kdim": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            check_sizes(**{**sizes, **wrong})


def test_options_and_positions() -> None:
    check_options("rms", "head")
    check_position_encoding(Rotary(6), 4, 6)
    check_position_encoding(ALiBi(4), 4, 6)
    with pytest.raises(ValueError, match="gate='none'"):
        check_options(None, "none")
    with pytest.raises(ValueError, match="width 6"):
        check_position_encoding(Rotary(6), 4, 8)
    with pytest.raises(TypeError, match="expected a module such as"):
        check_position_encoding([0, 1], 4, 8)
