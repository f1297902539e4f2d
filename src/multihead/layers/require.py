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
    name: str, positions: TensorLike, axis: str, device: torch.device | str = "cpu"
) -> Tensor:
    """`positions` as a tensor, a list as one on `device`; raises unless they are integers of shape
    [axis] or [B, axis].

    >>> to_position_ids("positions", [0, 1], "L")
    tensor([0, 1])
    """
    positions = to_tensor(name, positions, f"integers [{axis}] or [B, {axis}]", device=device)
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise TypeError(
            f"{name} is {positions.dtype}: expected integers, the position of each vector; convert"
            f" it, {name}.long()"
        )
    if positions.dim() not in (1, 2):
        raise MultiheadError(
            f"{name}{list(positions.shape)}: expected [{axis}] or [B, {axis}]; give one position"
            " for each vector"
        )
    return positions
