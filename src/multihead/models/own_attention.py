"""`OwnAttention`: a few query rows of one call, by the attention function and the mask that the
model has when it isn't instrumented.

A row of attention needs one query, all keys and values, and its row of the mask. So the model's own
function can be compared with another on 64 of n rows at 64/n of the cost, at full length: grouping,
scale, soft cap, sinks, biases, and masks far beyond a window.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..layers.interval_tensor import IntervalTensor
from .contexts import named_implementation
from .names import is_masking

# Attribute of an attention module while a tap compares its calls: what is given them.
COMPARE = "_multihead_compare"
ROWWISE = ("sdpa", "eager")  # implementations whose mask has a row for each query


class OwnAttention(NamedTuple):
    """One call of a transformers attention function: its arguments, as the module gave them."""

    module: nn.Module
    query: Tensor  # [B, H, L, E]
    key: Tensor  # [B, G, S, E]
    value: Tensor  # [B, G, S, Ev]
    mask: Any
    options: dict[str, Any]

    def rows(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """The output of queries start:stop, `[B, R, H, Ev]`, and which of them may read something,
        bool `[B, R]`.
        """
        name = named_implementation(self.module)
        function = find_function(self.module)
        if function is None:
            raise RuntimeError(f"{type(self.module).__name__} has no function for {name!r}")
        mask = self._mask(name, start, stop)
        q = self.query[:, :, start:stop]
        some = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool, device=q.device)
        if mask is not None:
            may = mask if mask.dtype == torch.bool else ~is_masking(mask)
            some = some & may.any(-1).any(1)
        options = {
            name: _rows_of(name, value, self.query.shape[2], start, stop)
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


def _rows_of(name: str, value: Any, length: int, start: int, stop: int) -> Any:
    """The rows of an option that has one for each query."""
    axis = {"position_bias": -2, "indices": 1}.get(name)
    if axis is None or not isinstance(value, Tensor) or value.shape[axis] != length:
        return value
    return value.narrow(axis, start, stop - start)
