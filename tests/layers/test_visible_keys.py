"""Masks of keys in a cache, as a dense mask computed from positions; writing into the memory."""

from __future__ import annotations

import pytest
import torch

from multihead import MultiheadError
from multihead.layers.visible_keys import VisibleKeys, valid_span, write_tokens
from multihead.masks import IntervalMask, causal, padding, prefix, window

K = torch.zeros(2, 1, 6, 4)


def dense(visible: VisibleKeys, mask: IntervalMask | None, length: int) -> torch.Tensor:
    result = visible.to_mask(mask, None, length)
    keys = visible.k.shape[2]
    if result is None:
        return torch.ones(2, 1, length, keys).bool()
    return (result if isinstance(result, torch.Tensor) else result.dense(length, keys)).expand(
        2, 1, length, keys
    )


@pytest.mark.parametrize("mask", [None, causal(), causal() & window(left=1)])
def test_masks_of_distances(mask: IntervalMask | None) -> None:
    """Two queries at positions 4 and 5; in the second sequence two keys fewer."""
    expected = (mask or IntervalMask()).dense(6, 6)[..., 4:, :].expand(2, 1, 2, 6)
    torch.testing.assert_close(dense(VisibleKeys(K, K, 4, 6), mask, 2), expected)
    lengths = torch.tensor([6, 4])
    ragged = VisibleKeys(K, K, lengths - 2, 6, lengths)
    got = dense(ragged, mask, 2)
    torch.testing.assert_close(got[0], expected[0])
    shifted = (mask or IntervalMask()).dense(4, 4)[0, :, 2:]
    torch.testing.assert_close(got[1, :, :, :4], shifted.expand(1, 2, 4))
    assert not got[1, :, :, 4:].any()


def test_keys_in_slots_and_sinks() -> None:
    positions = torch.tensor([[0, 7, 5, 6, -1, -1]])
    visible = VisibleKeys(K, K, 7, 8, None, positions, left=1, sinks=1)
    assert dense(visible, None, 1)[0, 0, 0].tolist() == [True, True, False, True, False, False]
    assert torch.equal(visible.key_positions(), positions)


@pytest.mark.parametrize(
    ("mask", "bias", "word"),
    [
        (prefix(2), None, "mask"),
        (torch.ones(2, 6).bool(), None, "mask"),
        (causal() & padding(torch.tensor([6, 4])), None, "mask"),
        (None, torch.zeros(2, 6), "attn_bias"),
    ],
)
def test_masks_of_single_keys_are_rejected(mask: object, bias: object, word: str) -> None:
    lengths = torch.tensor([6, 4])
    with pytest.raises(MultiheadError, match=f"^{word} is one of single keys"):
        VisibleKeys(K, K, lengths - 2, 6, lengths).to_mask(mask, bias, 2)  # type: ignore[arg-type]


def test_write_tokens() -> None:
    buffer, new = (
        torch.zeros(2, 1, 4, 1),
        torch.tensor([1.0, 2.0]).view(1, 1, 2, 1).expand(2, -1, -1, -1),
    )
    write_tokens(buffer, new, torch.tensor([0, 2]), count=torch.tensor([2, 1]))
    assert buffer.flatten(1).tolist() == [[1, 2, 0, 0], [0, 0, 1, 0]]
    write_tokens(buffer, new, torch.tensor([3, 1]), circular=True)
    assert buffer.flatten(1).tolist() == [[2, 2, 0, 1], [0, 1, 2, 0]]
    with pytest.raises(MultiheadError, match="2 tokens from there on don't fit into the 4 slots"):
        write_tokens(buffer, new, torch.tensor([3, 0]))


def test_valid_span() -> None:
    start, stop = valid_span(torch.tensor([[False, True, True, False], [True] * 4]))
    assert start.tolist() == [1, 0] and stop.tolist() == [3, 4]
