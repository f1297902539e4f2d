"""Splitting and merging heads, `[B, L, H*E]` <-> `[B, H, L, E]`.

A reshape without the transpose keeps the shape and mixes tokens with heads, so nothing in this
library reshapes by hand.
"""

from __future__ import annotations

from torch import Tensor

from ..errors import MultiheadError
from .tensors import require_tensor, to_count


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Split heads, `[..., L, H*E]` -> `[..., H, L, E]`: head h is the h-th run of E neighbouring
    columns.

    Raises:
        MultiheadError: `num_heads` doesn't divide the width.
        TypeError: `x` isn't a tensor, `num_heads` no integer.

    >>> import torch
    >>> split_heads(torch.arange(8).view(1, 2, 4), 2).tolist()
    [[[[0, 1], [4, 5]], [[2, 3], [6, 7]]]]
    """
    require_tensor("x", x)
    width, num_heads = x.shape[-1], to_count("num_heads", num_heads, least=1)
    if width % num_heads:
        raise MultiheadError(
            f"num_heads={num_heads} doesn't divide the width {width} of x{list(x.shape)}; "
            "pass x with a last axis of num_heads * head_dim"
        )
    # not unflatten: torch.onnx's exporter by tracing takes the sizes of its result for constants
    return x.reshape(*x.shape[:-1], num_heads, width // num_heads).transpose(-2, -3)


def merge_heads(x: Tensor) -> Tensor:
    """Merge heads, `[..., H, L, E]` -> `[..., L, H*E]`: the inverse of `split_heads`.

    Raises:
        MultiheadError: fewer than three axes.
        TypeError: `x` isn't a tensor.

    >>> import torch
    >>> x = torch.randn(2, 3, 8)
    >>> torch.equal(merge_heads(split_heads(x, 4)), x)
    True
    """
    require_tensor("x", x)
    if x.ndim < 3:
        raise MultiheadError(
            f"x{list(x.shape)} has no head axis; expected [..., heads, length, head_dim]"
        )
    return x.transpose(-2, -3).flatten(-2)
