"""Masks of other makes: what becomes of them, against their own library where there is one."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import multihead
from multihead.ops import convert, masks


@given(data=st.data())
def test_from_dense_finds_intervals_and_only_those(data: Any) -> None:
    length, keys = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    dense = torch.tensor(
        data.draw(
            st.lists(
                st.lists(st.booleans(), min_size=keys, max_size=keys),
                min_size=length,
                max_size=length,
            )
        )
    )[None, None]
    found = convert.from_dense(dense)
    runs = all(
        "101" not in "".join("1" if x else "0" for x in row).replace("00", "0").replace("00", "0")
        for row in dense[0, 0]
    )
    assert isinstance(found, masks.IntervalMask) == runs
    if runs:
        assert torch.equal(found.dense(length, keys), dense)


def test_from_function_goes_block_by_block() -> None:
    asked = []

    def function(i: int, j: int) -> torch.Tensor:
        asked.append((i, j))
        return torch.ones(1, 1, 7, 7, dtype=torch.bool).tril()[..., i:j, :]

    found = convert.from_rows(function, 7, 7, step=3)
    assert asked == [(0, 3), (3, 6), (6, 7)]
    assert torch.equal(found.dense(7, 7), torch.ones(1, 1, 7, 7, dtype=torch.bool).tril())


def test_a_function_of_indices() -> None:
    lengths = torch.tensor([2, 5])
    found = multihead.masks.from_function(
        lambda b, h, i, j: (j < lengths[b]) & (j <= i), 5, 5, batch=2
    )
    assert isinstance(found, masks.IntervalMask)
    assert torch.equal(
        found.dense(5, 5), (multihead.masks.padding(lengths) & multihead.masks.causal()).dense(5, 5)
    )
    strided = multihead.masks.from_function(lambda b, h, i, j: (i - j) % 2 == 0, 5, 5)
    assert (
        isinstance(strided, torch.Tensor)
        and strided.shape == (1, 1, 5, 5)
        and strided[0, 0, 4].tolist() == [1, 0, 1, 0, 1]
    )
    by_head = multihead.masks.from_function(lambda b, h, i, j: j <= i + h, 4, 4, heads=2)
    assert isinstance(by_head, torch.Tensor) and by_head.shape == (1, 2, 4, 4)
    with pytest.raises(TypeError, match=r"function gave torch\.int64"):
        multihead.masks.from_function(lambda b, h, i, j: i - j, 3, 3)


@pytest.mark.parametrize(
    ("mask", "known"),
    [
        (multihead.masks.causal(), "causal"),
        (multihead.masks.causal(3), None),
        (multihead.masks.causal(9), "all"),
        (masks.IntervalMask(), "all"),
        (multihead.masks.window(left=2), None),
    ],
)
def test_a_causal_mask_is_recognised(mask: masks.IntervalMask, known: str | None) -> None:
    found = convert.from_dense(mask.dense(7, 7))
    assert isinstance(found, masks.IntervalMask) and found.static(7, 7) == known
    assert torch.equal(found.dense(7, 7), mask.dense(7, 7)) and (known is None or not found.rules)


@given(data=st.data())
def test_torch_masks_mean_the_same(data: Any) -> None:
    """Any mixture of torch's two masks, bool or float: our operator with the turned masks equals
    torch's layer with its own.
    """
    batch, heads, length, keys = 2, 2, 3, 4
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    attn_shape = data.draw(st.sampled_from([None, (length, keys), (batch * heads, length, keys)]))

    def mask(shape: Any) -> Any:
        if shape is None:
            return None
        if data.draw(st.booleans()):
            return (torch.rand(*shape, generator=g) > 0.7).index_fill(
                -1, torch.tensor(0), False
            )  # torch has NaN without a key
        return torch.randn(*shape, generator=g)

    attn_mask, key_mask = mask(attn_shape), mask(data.draw(st.sampled_from([None, (batch, keys)])))
    layer = torch.nn.MultiheadAttention(4, heads, batch_first=True, bias=False)
    x, y = torch.randn(batch, length, 4, generator=g), torch.randn(batch, keys, 4, generator=g)
    with torch.no_grad():
        layer.in_proj_weight.copy_(torch.eye(4).repeat(3, 1))
        layer.out_proj.weight.copy_(torch.eye(4))
    as_float = attn_mask is not None and key_mask is not None and attn_mask.dtype != key_mask.dtype
    theirs = [
        (
            m.float().masked_fill(m, -torch.inf)
            if as_float and m is not None and m.dtype == torch.bool
            else m
        )
        for m in (attn_mask, key_mask)
    ]  # torch only warns of a mixture; it means this
    want = layer(x, y, y, attn_mask=theirs[0], key_padding_mask=theirs[1], need_weights=False)[0]
    may, bias = multihead.masks.from_torch_mask(attn_mask, key_mask, num_heads=heads)
    q, k = multihead.ops.split_heads(x, heads), multihead.ops.split_heads(y, heads)
    got = multihead.ops.merge_heads(multihead.attention(q, k, k, may, bias=bias))
    assert torch.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(
    ("attn", "key", "heads", "error", "words"),
    [
        (
            torch.ones(3, 3, dtype=torch.int64),
            None,
            None,
            TypeError,
            ["attn_mask", "int64", ".bool()"],
        ),
        (None, torch.ones(2, 3, dtype=torch.uint8), None, TypeError, ["key_padding_mask", "uint8"]),
        (
            torch.ones(4, 3, 3),
            None,
            None,
            ValueError,
            ["attn_mask[4, 3, 3]", "num_heads=None", "[B * H, L, S]"],
        ),
        (torch.ones(4, 3, 3), None, 3, ValueError, ["num_heads=3"]),
        (None, torch.ones(2, 3, 3), None, ValueError, ["key_padding_mask[2, 3, 3]", "[B, S]"]),
    ],
)
def test_words(attn: Any, key: Any, heads: Any, error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        multihead.masks.from_torch_mask(attn, key, num_heads=heads)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_long_mask_is_looked_at_in_bounded_memory() -> None:
    """In a process of its own: small results kept from each block once left holes between the large
    ones, n x n in all.
    """
    code = """if True:
        import resource, torch
        from multihead.ops.convert import from_rows
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        before = peak()
        mask = from_rows(lambda i, j: torch.ones(1, 1, j - i, 16384, dtype=torch.bool).tril(i), 16384, 16384, step=128)
        print(type(mask).__name__, peak() - before)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    kind, beyond = done.stdout.split()
    assert kind == "IntervalMask" and int(beyond) < 100, f"{beyond} MiB"
