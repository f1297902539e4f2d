"""Splitting and merging: the only two ways, inverse of each other, and the reshape without them is
something else.
"""

from __future__ import annotations

import pytest
import torch

import multihead


def test_one_is_the_inverse_of_the_other() -> None:
    x = torch.randn(2, 3, 8)
    split = multihead.ops.split_heads(x, 2)
    assert split.shape == (2, 2, 3, 4)
    assert torch.equal(split[:, 1], x[..., 4:])
    assert torch.equal(multihead.ops.merge_heads(split), x)


def test_flattening_heads_first_is_another_thing() -> None:
    split = multihead.ops.split_heads(torch.randn(2, 3, 8), 2)
    wrong = split.reshape(2, 3, 8)
    assert wrong.shape == multihead.ops.merge_heads(split).shape
    assert not torch.equal(wrong, multihead.ops.merge_heads(split))


def test_words() -> None:
    with pytest.raises(ValueError, match=r"num_heads=3 doesn't divide the width 8 of x\[2, 3, 8\]"):
        multihead.ops.split_heads(torch.randn(2, 3, 8), 3)
    with pytest.raises(ValueError, match=r"x\[3, 8\] has no head axis"):
        multihead.ops.merge_heads(torch.randn(3, 8))
