"""Positions of the tokens of a call: given ones are checked, others are counted.

Most encodings have one position a token. One whose attribute `num_axes` is larger, such as
`Rotary(scaling={"mrope_section": [2, 1, 1]})`, has as many, along the first axis of `position_ids`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import MultiheadError
from ..ops.tensors import TensorLike
from .require import position_shapes, to_position_ids
from .visible_keys import longest


def num_axes_of(encoding: nn.Module | None) -> int:
    """Number of axes of a position in this encoding."""
    return int(getattr(encoding, "num_axes", 1))


def check_position_ids(encoding: nn.Module | None, position_ids: TensorLike, x: Tensor) -> Tensor:
    """`position_ids` of the tokens x `[B, L, D]` as a tensor, `[L]` or `[B, L]`; of several axes
    `[L]` or `[num_axes, 1 or B, L]`.

    Raises:
        MultiheadError: no encoding that uses them, or another shape.
        TypeError: not integers.
    """
    if encoding is None:
        raise MultiheadError(
            f"position_ids={position_ids!r}, but this layer has no position encoding"
            " (positions=), so they would change nothing"
        )
    num_axes, (batch, length) = num_axes_of(encoding), x.shape[:2]
    found = to_position_ids("position_ids", position_ids, "L", x.device, num_axes=num_axes)
    if num_axes > 1:
        return fit_axes("position_ids", found, batch, length, num_axes)
    if found.shape not in ((length,), (batch, length)):
        raise MultiheadError(
            f"position_ids{list(found.shape)}: expected [L] or [B, L] = {[batch, length]}"
        )
    return found


def count_positions(encoding: nn.Module | None, x: Tensor, offset: int | Tensor) -> Tensor:
    """Positions of x `[B, L, D]` from `offset` on: `[L]`, or `[B, L]` if sequences differ (of
    several axes `[num_axes, B, L]`); 0 for padding on the left.

    Raises:
        MultiheadError: several axes after other tokens, whose number isn't the next position.
    """
    index, num_axes = torch.arange(x.shape[1], device=x.device), num_axes_of(encoding)
    if num_axes > 1 and longest(offset) > 0:
        raise MultiheadError(
            f"position_ids is missing: the cache holds {longest(offset)} tokens, and positions of"
            f" {num_axes} axes don't count tokens (an image of 4 x 4 advances by 4); give"
            " position_ids="
        )
    if not isinstance(offset, Tensor):
        return index + offset
    found = (index + offset[:, None]).clamp(min=0)
    return found if num_axes == 1 else found.expand(num_axes, -1, -1)


def fit_axes(name: str, positions: Tensor, batch: int, length: int, num_axes: int) -> Tensor:
    """Positions of several axes as `[L]` or `[num_axes, 1 or B, L]`, which can't be confused.

    Those of text, `[L]` and `[B, L]`, are the same along all axes.

    Raises:
        MultiheadError: another shape, or `[num_axes, L]` for as many sequences as there are axes.

    >>> fit_axes("positions", torch.arange(4)[None], 2, 4, 3).shape
    torch.Size([3, 1, 4])
    """
    shape = tuple(positions.shape)
    if len(shape) == 2 and shape[0] == num_axes:
        if batch == num_axes:
            raise MultiheadError(
                f"{name}{list(shape)} with a batch of {batch} are either the {num_axes} axes of all"
                f" sequences or one axis of each: give {name}[:, None] for the former,"
                f" {name}.expand({num_axes}, {batch}, {length}) for the latter"
            )
        positions = positions[:, None]
    elif len(shape) == 2:
        positions = positions.expand(num_axes, *shape)
    if positions.shape[-1] != length or (
        positions.dim() == 3
        and (positions.shape[0] != num_axes or positions.shape[1] not in (1, batch))
    ):
        raise MultiheadError(
            f"{name}{list(shape)}: expected {position_shapes('L', num_axes)} with L={length},"
            f" B={batch}; give one position, or one of each axis, for each vector"
        )
    return positions
