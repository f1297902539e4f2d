"""Conversion of masks: mask functions, dense booleans, torch's inverted masks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import MultiheadError
from .masks import IntervalMask, intervals, runs
from .numbers import add_biases
from .tensors import TensorLike, to_count, to_tensor

BLOCK_ELEMENTS = 1 << 22  # of a dense mask looked at in one go


def from_function(
    function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    length: int,
    keys: int,
    *,
    batch: int = 1,
    heads: int = 1,
    device: torch.device | str = "cpu",
) -> IntervalMask | Tensor:
    """Convert a mask function of indices, as FlexAttention and transformers use them.

    `function(b, h, i, j)` gets integer tensors that broadcast to `[batch, heads, rows, keys]` and
    gives booleans, True where query i may attend to key j. It is called for a block of queries at a
    time. The result is an `IntervalMask` where every query's keys are neighbours and the same for
    all heads; otherwise the dense mask.

    Raises:
        TypeError: the function gives something else than booleans.

    >>> chunks = from_function(lambda b, h, i, j: (i // 2 == j // 2) & (j <= i), 4, 4)
    >>> type(chunks).__name__, chunks.dense(4, 4).int().tolist()
    ('IntervalMask', [[[[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]]])
    """
    length, keys = to_count("length", length), to_count("keys", keys)
    batch, heads = to_count("batch", batch, least=1), to_count("heads", heads, least=1)
    b, h, j = (
        torch.arange(n, device=device).view(shape)
        for n, shape in ((batch, (-1, 1, 1, 1)), (heads, (1, -1, 1, 1)), (keys, (1, 1, 1, -1)))
    )

    def rows(i0: int, i1: int) -> Tensor:
        found = function(b, h, torch.arange(i0, i1, device=device).view(1, 1, -1, 1), j)
        found = to_tensor("what function gave", found, "bool", device=device, empty=torch.bool)
        if found.dtype != torch.bool:
            raise TypeError(
                f"function gave {found.dtype} {list(found.shape)}: expected bool, True where query"
                " i may attend to key j"
            )
        return found.expand(batch, heads, i1 - i0, keys)

    return from_rows(
        rows, length, keys, step=max(1, BLOCK_ELEMENTS // max(1, batch * heads * keys))
    )


def from_rows(
    function: Callable[[int, int], Tensor], length: int, keys: int, *, step: int | None = None
) -> IntervalMask | Tensor:
    """Convert a function that gives all keys of some queries: `function(i0, i1)` is boolean
    `[B or 1, 1 or H, i1 - i0, keys]`.
    """
    step = step or max(1, BLOCK_ELEMENTS // max(keys, 1))
    found: tuple[Tensor, Tensor] | None = (
        None  # made once: small tensors kept from each block leave holes between large ones
    )
    for i in range(0, length, step):
        block = function(i, min(i + step, length))
        *bounds, interval = runs(block[:, 0])
        if block.shape[1] != 1 or not bool(interval.all()):
            return torch.cat(
                [function(j, min(j + step, length)) for j in range(0, length, step)], dim=-2
            )
        if found is None:
            found = bounds[0].new_empty(len(block), length), bounds[0].new_empty(len(block), length)
        for whole, part in zip(found, bounds):
            whole[:, i : i + step] = part
    if found is None:
        return IntervalMask()
    start, stop = found
    return _causal(start, stop, keys) or intervals(start, stop)


def _causal(start: Tensor, stop: Tensor, keys: int) -> IntervalMask | None:
    """The mask as a band, which fused kernels support, if it is `causal(offset)` or allows
    everything.
    """
    if not stop.numel() or bool(start.any()):
        return None
    number = torch.arange(1, stop.shape[1] + 1, device=stop.device)
    offset = int(stop[0, 0]) - 1
    if bool((stop == keys).all()):
        return IntervalMask()
    return (
        IntervalMask(high=1 + offset)
        if bool((stop == (number + offset).clamp(0, keys)).all())
        else None
    )


def from_dense(mask: TensorLike) -> IntervalMask | Tensor:
    """Convert a dense boolean mask `[B or 1, 1, L, S]` to intervals, if every query's keys are one
    interval; else return it unchanged.

    Raises:
        TypeError: a mask that isn't bool.

    >>> type(from_dense(torch.ones(1, 1, 3, 3, dtype=torch.bool).tril())).__name__
    'IntervalMask'
    """
    expected = "bool [B or 1, 1 or H, L, S]"
    found = to_tensor("mask", mask, expected, empty=torch.bool)
    if found.dtype != torch.bool or found.ndim != 4:
        raise TypeError(f"mask is {found.dtype} {list(found.shape)}: expected {expected}")
    result = from_rows(lambda i, j: found[..., i:j, :], found.shape[-2], found.shape[-1])
    return found if isinstance(result, Tensor) else result


def from_torch_mask(
    attn_mask: TensorLike | None = None,
    key_padding_mask: TensorLike | None = None,
    *,
    num_heads: int | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Convert the two masks of `nn.MultiheadAttention` and `nn.Transformer` layers to `(mask,
    bias)` of `multihead.attention`.

    There True means "may **not** attend", and floating numbers are added to the scores; the two
    kinds may be mixed. (The `attn_mask` of `scaled_dot_product_attention` needs no conversion: True
    means "may attend" there as here.)

    Args:
        attn_mask: `[L, S]`, or `[B * H, L, S]` with `num_heads` given; bool or floating.
        key_padding_mask: `[B, S]`, or `[S]` of an input without a batch; bool or floating.
        num_heads: H, to split the first axis of a three-axis `attn_mask`.

    Returns:
        `mask`, bool and True where a query may attend, or None; and `bias`, added to the scores,
        or None. Both broadcast to `[B, H, L, S]`.

    Raises:
        TypeError: for integer masks. ValueError: for other shapes.

    >>> mask, bias = from_torch_mask(torch.ones(3, 3).triu(1).bool())
    >>> mask[0, 0].int().tolist(), bias
    ([[1, 0, 0], [1, 1, 0], [1, 1, 1]], None)
    """
    if num_heads is not None:
        num_heads = to_count("num_heads", num_heads, least=1)
    found: list[Tensor] = []
    for name, given in (("attn_mask", attn_mask), ("key_padding_mask", key_padding_mask)):
        if given is None:
            continue
        x = to_tensor(name, given, "bool or floating numbers", empty=torch.bool)
        if x.dtype != torch.bool and not x.is_floating_point():
            raise TypeError(
                f"{name} is {x.dtype}: expected bool, True where a query may not attend, or numbers"
                f" to add; convert a 0/1 mask of that meaning with {name}.bool()"
            )
        if name == "key_padding_mask":
            if x.ndim not in (1, 2):
                raise MultiheadError(
                    f"key_padding_mask{list(x.shape)}: expected [B, S], or [S] of an input without"
                    " a batch"
                )
            found.append(x.reshape(-1, 1, 1, x.shape[-1]))
        elif x.ndim == 2:
            found.append(x[None, None])
        elif x.ndim == 3 and num_heads is not None and x.shape[0] % num_heads == 0:
            found.append(x.unflatten(0, (-1, num_heads)))
        else:
            raise MultiheadError(
                f"attn_mask{list(x.shape)} with num_heads={num_heads}: expected [L, S], or [B * H,"
                " L, S] and num_heads=H"
            )
    mask = bias = None
    for x in found:
        if x.dtype == torch.bool:
            mask = ~x if mask is None else mask & ~x
        else:
            bias = x.clone() if bias is None else add_biases(bias, x)
    return mask, bias
