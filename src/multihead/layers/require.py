"""Checks of arguments that several layers share."""

from __future__ import annotations

import math
from numbers import Integral, Real

import torch
from torch import Tensor

from ..errors import MultiheadError
from ..ops.tensors import TensorLike, to_tensor


def require_positive_int(name: str, value: object) -> None:
    """Raise unless `value` is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}={value!r}: expected an integer; give one, at least 1")
    if value < 1:
        raise MultiheadError(f"{name}={value}: must be at least 1")


def require_number(
    name: str, value: object, must: str, *, above: float = -math.inf, least: float = -math.inf
) -> None:
    """Raise unless `value` is a finite number above `above` and at least `least`; `must` is that
    condition, for the message.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r}: expected a number; it must {must}")
    if not (above < float(value) < math.inf and least <= float(value)):  # NaN fails both
        raise MultiheadError(f"{name}={value}: must {must}")


def to_position_ids(
    name: str,
    positions: TensorLike,
    axis: str,
    device: torch.device | str = "cpu",
    *,
    num_axes: int = 1,
) -> Tensor:
    """`positions` as a tensor, a list as one on `device`; raises unless they are integers of shape
    [axis] or [B, axis], or with several axes of positions also [num_axes, axis] or
    [num_axes, B, axis].

    >>> to_position_ids("positions", [0, 1], "L")
    tensor([0, 1])
    """
    shapes = position_shapes(axis, num_axes)
    positions = to_tensor(name, positions, f"integers {shapes}", device=device)
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise TypeError(
            f"{name} is {positions.dtype}: expected integers, the position of each vector; convert"
            f" it, {name}.long()"
        )
    if positions.dim() not in (1, 2) and not (num_axes > 1 and positions.dim() == 3):
        hint = ""
        if positions.dim() == 3 and num_axes == 1:
            hint = "; only Rotary(scaling={'mrope_section': ...}) has positions of several axes"
        raise MultiheadError(
            f"{name}{list(positions.shape)}: expected {shapes}; give one position for each vector"
            f"{hint}"
        )
    return positions


def position_shapes(axis: str, num_axes: int) -> str:
    """The shapes that positions may have, for messages."""
    if num_axes == 1:
        return f"[{axis}] or [B, {axis}]"
    return f"[{axis}], [B, {axis}], [{num_axes}, {axis}] or [{num_axes}, B, {axis}]"
