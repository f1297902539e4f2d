"""Masks that transformers' models pass around as two integers a query: `IntervalTensor`, and the
mask function that builds one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops.convert import BLOCK_ELEMENTS, from_rows
from ..ops.masks import IntervalMask, intervals


class IntervalTensor(Tensor):
    """A boolean mask `[B, 1, L, S]` for models to pass around, which holds two integers a query.

    Any operation on it first turns it into the ordinary dense tensor, so it is always right.
    """

    mask: IntervalMask
    # (implementation, first row, end) -> these rows of the mask that transformers makes for it
    make_rows: Callable[[str, int, int], Tensor | None] | None = None

    @staticmethod
    def __new__(cls, start: Tensor, stop: Tensor, shape: tuple[int, ...]) -> IntervalTensor:
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=start.device)
        self.mask = intervals(start, stop)
        return self

    def materialize(self) -> Tensor:
        return self.mask.dense(self.shape[-2], self.shape[-1], self.device).expand(self.shape)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"IntervalTensor(shape={list(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if (
            function is torch.ops.aten.add.Tensor
            and isinstance(args[1], IntervalTensor)
            and args[0].is_floating_point()
        ):
            # attention that isn't this module's adds its mask to the scores
            return args[0].masked_fill(~args[1].materialize(), torch.finfo(args[0].dtype).min)
        plain = torch.utils._pytree.tree_map_only(
            IntervalTensor, IntervalTensor.materialize, (args, kwargs or {})
        )
        return function(*plain[0], **plain[1])


def mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    device: Any = "cpu",
    **kwargs: Any,
) -> Tensor:
    """The mask as transformers asks for it: by its own function, a block of queries at a time."""
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)

    def make(function: Any, i: int, j: int) -> Any:
        return function(
            batch_size=batch_size,
            q_length=j - i,
            kv_length=kv_length,
            q_offset=q_offset + i,
            kv_offset=kv_offset,
            attention_mask=attention_mask,
            device=device,
            **kwargs,
        )

    found = from_rows(
        lambda i, j: make(sdpa_mask, i, j),
        q_length,
        kv_length,
        step=max(1, BLOCK_ELEMENTS // max(1, batch_size * kv_length)),
    )
    if isinstance(found, Tensor):
        return found
    start, stop = found.bounds(q_length, kv_length, device)
    mask = IntervalTensor(start, stop, (batch_size, 1, q_length, kv_length))
    mask.make_rows = lambda name, i, j: make(AttentionMaskInterface()[name], i, j)
    return mask
