"""Formulas of the operators' arithmetic, for `torch.utils.flop_counter.FlopCounterMode`.

As for torch's `scaled_dot_product_attention`: two floating-point operations for each multiply-add
of the two products, for every query and every key, whatever the mask leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

__all__ = ["register_flops"]


def register_flops() -> None:
    """Register the formulas of `multihead::attend` and its backward pass, and of torch's fused CPU
    kernel where torch has none, since `multihead.attention` may choose it.
    """
    aten, ops = torch.ops.aten, torch.ops.multihead
    fused = getattr(aten, "_scaled_dot_product_flash_attention_for_cpu", None)
    fused_backward = getattr(aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)
    formulas: tuple[tuple[Any, Any], ...] = (
        (ops.attend, _forward),
        (ops.attend_backward, _backward),
        (fused, _forward),
        (fused_backward, _fused_backward),
    )
    for operator, formula in formulas:
        if operator is not None and operator not in flop_registry:
            register_flop_formula(operator)(formula)


def _forward(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    batch, heads, length, width = q
    return 2 * batch * heads * length * k[2] * (width + v[3])


def _fused_backward(
    grad: Sequence[int], q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any
) -> int:
    batch, heads, length, width = q
    # the scores again, and the gradients of weights, values, queries and keys
    return 2 * batch * heads * length * k[2] * (3 * width + 2 * v[3])


def _backward(grad: Sequence[int], *inputs: Any, **_: Any) -> int:
    # after the gradients of the log-sum-exp and the weights, the output and the log-sum-exp
    return _fused_backward(grad, *inputs[4:7])
