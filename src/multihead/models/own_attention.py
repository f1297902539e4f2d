"""`OwnAttention`: a few query rows of one call, by the attention function and the mask that the
model has when it isn't instrumented.

A row of attention needs one query, all keys and values, and its row of the mask. So the model's own
function can be compared with another on 64 of n rows at 64/n of the cost, at full length: grouping,
scale, soft cap, sinks, biases, and masks far beyond a window.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..layers.interval_tensor import IntervalTensor
from .contexts import named_implementation
from .names import is_masking

# Attribute of an attention module while a tap compares its calls: what is given them.
COMPARE = "_multihead_compare"
OF_QUERIES = {"position_bias": -2, "indices": 1}  # options with a row for each query, and its axis
ROWWISE = ("sdpa", "eager")  # implementations whose mask has a row for each query


class OwnAttention(NamedTuple):
    """One call of a transformers attention function: its arguments, as the module gave them."""

    module: nn.Module
    query: Tensor  # [B, H, L, E]
    key: Tensor  # [B, G, S, E]
    value: Tensor  # [B, G, S, Ev]
    mask: Any
    options: dict[str, Any]

    def rows(self, *ranges: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """The output of the queries in some ranges, one after another `[B, R, H, Ev]`, and which of
        them may read something, bool `[B, R]`.
        """
        name = named_implementation(self.module)
        function = find_function(self.module)
        if function is None:
            raise RuntimeError(f"{type(self.module).__name__} has no function for {name!r}")
        length = self.query.shape[2]
        masks = [self._mask(name, start, stop) for start, stop in ranges]
        mask = None if masks[0] is None else torch.cat([m for m in masks if m is not None], -2)
        q = _rows_of(self.query, 2, length, ranges)
        some = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool, device=q.device)
        if mask is not None:
            may = mask if mask.dtype == torch.bool else ~is_masking(mask)
            some = some & may.any(-1).any(1)
        options = {
            name: _rows_of(value, OF_QUERIES[name], length, ranges) if name in OF_QUERIES else value
            for name, value in self.options.items()
        }
        options |= {"dropout": 0.0}
        out = function(self.module, q, self.key, self.value, mask, **options)[0]
        return out, some

    def _mask(self, name: str, start: int, stop: int) -> Tensor | None:
        """Rows start:stop of the mask, as the model's own implementation takes it."""
        length, keys, mask = self.query.shape[2], self.key.shape[2], self.mask
        if isinstance(mask, IntervalTensor) and mask.make_rows is not None:
            rows: Tensor | None = mask.make_rows(name, start, stop)
            return rows
        if mask is None:
            causal = self.options.get("is_causal")
            if causal is None:
                causal = getattr(self.module, "is_causal", True)
            if name == "eager" or not causal or length == 1:
                return None
            index = torch.arange(keys, device=self.query.device)
            mask = (index <= torch.arange(start, stop, device=index.device)[:, None])[None, None]
        elif mask.shape[-2] == length:
            mask = mask[..., start:stop, :]
        if name == "eager" and mask.dtype == torch.bool:
            low = torch.finfo(self.query.dtype).min
            mask = torch.zeros_like(mask, dtype=self.query.dtype).masked_fill(~mask, low)
        return mask


def find_function(module: nn.Module) -> Callable[..., Any] | None:
    """The attention function that the module calls when it isn't instrumented, if it computes row
    by row.
    """
    from transformers import AttentionInterface

    name = named_implementation(module)
    if name not in ROWWISE:
        return None
    forward = inspect.unwrap(type(module).forward)
    eager = getattr(forward, "__globals__", {}).get("eager_attention_forward")
    function: Callable[..., Any] | None = eager
    if name != "eager":
        function = AttentionInterface().get_interface(name, eager)
    return function


def _rows_of(value: Any, axis: int, length: int, ranges: Sequence[tuple[int, int]]) -> Any:
    """The rows of a tensor that has one for each query."""
    if not isinstance(value, Tensor) or value.shape[axis] != length:
        return value
    parts = [value.narrow(axis, start, stop - start) for start, stop in ranges]
    return torch.cat(parts, axis) if len(parts) > 1 else parts[0]
