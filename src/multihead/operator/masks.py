"""Masks: for each query row the one interval of keys `start <= j < stop` that it may read.

Causal, sliding window, padding and their intersections let every row read neighbouring keys only, so two small integer
arrays stand for an L x S matrix. They compose with `&`, and what lies outside them is never computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# rules: (L, S, device) -> start, stop, each integer and broadcastable to [B, L]
Rule = Callable[[int, int, torch.device], tuple[Tensor, Tensor]]
BLOCK_ELEMENTS = 1 << 22  # of a dense mask looked at in one go


@dataclass(frozen=True)
class IntervalMask:
    """An intersection of rules, each of which gives every query row its interval of keys.

    Make one with `causal`, `window`, `padding`, `intervals` or `from_dense`, and join them with `&`.

    >>> mask = causal() & window(left=1)
    >>> mask.dense(3, 3).int().tolist()
    [[[1, 0, 0], [1, 1, 0], [0, 1, 1]]]
    """

    rules: tuple[Rule, ...]
    plain_causal: bool = False  # exactly causal(0): what fused kernels call is_causal

    def __and__(self, other: IntervalMask) -> IntervalMask:
        if not isinstance(other, IntervalMask):
            raise TypeError(f"mask & {type(other).__name__}: only interval masks join with '&'; "
                            "call .dense(L, S) on this one and use torch's & for boolean masks")
        return IntervalMask(self.rules + other.rules)

    def bounds(self, length: int, keys: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """`start` and `stop`, int64 `[B or 1, length]`, with 0 <= start <= stop <= keys (empty rows: start = stop)."""
        start = torch.zeros(1, length, dtype=torch.int64, device=device)
        stop = torch.full_like(start, keys)
        for rule in self.rules:
            low, high = rule(length, keys, torch.device(device))
            try:
                start, stop = torch.maximum(start, low), torch.minimum(stop, high)
            except RuntimeError as error:
                raise ValueError(f"a mask made for [batch, rows] = {list(torch.broadcast_shapes(low.shape, high.shape))} meets "
                                 f"{list(start.shape)}: the batch and the number of query rows must agree") from error
        stop = stop.clamp(0, keys)
        return torch.minimum(start.clamp(min=0), stop), stop

    def dense(self, length: int, keys: int, device: torch.device | str = "cpu") -> Tensor:
        """The same mask as a boolean `[B or 1, length, keys]`, True where a row may read."""
        start, stop = self.bounds(length, keys, device)
        return allowed(start, stop, torch.arange(keys, device=device))


def allowed(start: Tensor, stop: Tensor, keys: Tensor) -> Tensor:
    """`[..., L]` bounds and `[S]` key numbers -> boolean `[..., L, S]`."""
    return (keys >= start[..., None]) & (keys < stop[..., None])


def _check_offset(offset: int | Tensor) -> None:
    if isinstance(offset, Tensor):
        fits = not offset.is_floating_point() and offset.dtype != torch.bool and offset.ndim <= 1
    else:
        fits = isinstance(offset, int) and not isinstance(offset, bool)
    if not fits:
        raise TypeError(f"offset={offset!r}: expected an int, or integers of shape [B]: the keys before the first query")


def _column(offset: int | Tensor, device: torch.device) -> Tensor:
    return torch.as_tensor(offset, device=device).reshape(-1, 1)


def causal(offset: int | Tensor = 0) -> IntervalMask:
    """Row i reads keys 0 .. i + offset; `offset` keys precede the first query (an int, or `[B]` integers).

    >>> causal(offset=2).dense(2, 4).int().tolist()
    [[[1, 1, 1, 0], [1, 1, 1, 1]]]
    """

    _check_offset(offset)

    def rule(length: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
        stop = torch.arange(1, length + 1, device=device) + _column(offset, device)
        return torch.zeros_like(stop), stop

    return IntervalMask((rule,), plain_causal=isinstance(offset, int) and offset == 0)


def window(left: int | None = None, right: int | None = None, *, offset: int | Tensor = 0) -> IntervalMask:
    """Row i reads keys i + offset - left .. i + offset + right; None leaves that side open."""
    _check_offset(offset)
    for name, value in (("left", left), ("right", right)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise TypeError(f"{name}={value!r}: expected an int, or None for no limit")
        if value is not None and value < 0:
            raise ValueError(f"{name}={value}: expected a number of keys of at least 0, or None for no limit")

    def rule(length: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
        at = torch.arange(length, device=device) + _column(offset, device)
        start = torch.zeros_like(at) if left is None else at - left
        stop = torch.full_like(at, keys) if right is None else at + right + 1
        return start, stop

    return IntervalMask((rule,))


def padding(lengths: Tensor | None = None, *, valid: Tensor | None = None) -> IntervalMask:
    """Keys that are text: the first `lengths[b]` of each row, or a boolean `valid [B, S]` without holes.

    A `valid` with holes isn't an interval: it raises, and `valid[:, None, None, :]` is the dense mask to use then.

    >>> padding(valid=torch.tensor([[False, True, True]])).dense(1, 3).int().tolist()
    [[[0, 1, 1]]]
    """
    if lengths is not None and valid is None:
        stop = lengths.reshape(-1, 1)
        start = torch.zeros_like(stop)
    elif valid is None or lengths is not None:
        raise ValueError("padding(lengths=..., valid=...): give exactly one of the two")
    else:
        if valid.dtype != torch.bool or valid.ndim != 2:
            raise TypeError(f"valid is {valid.dtype} {list(valid.shape)}: expected bool [B, S], True where there is text; "
                            "turn a 0/1 mask around with valid.bool()")
        start, stop, interval = _runs(valid)
        if not interval.all():
            row = int((~interval).nonzero()[0, 0])
            raise ValueError(f"valid[{row}] has holes, so it isn't one interval of keys; "
                             "pass valid[:, None, None, :] as a dense mask instead")
        start, stop = start[:, None], stop[:, None]
    return IntervalMask((lambda length, keys, device: (start.to(device), stop.to(device)),))


def intervals(start: Tensor, stop: Tensor) -> IntervalMask:
    """Any mask whose rows read `start[b, i] <= j < stop[b, i]`; both integer `[B or 1, L]`."""
    for name, value in (("start", start), ("stop", stop)):
        if value.is_floating_point() or value.dtype == torch.bool or value.ndim != 2:
            raise TypeError(f"{name} is {value.dtype} {list(value.shape)}: expected integers of shape [B or 1, L]")
    return IntervalMask((lambda length, keys, device: (start.to(device), stop.to(device)),))


def from_function(function: Callable[[int, int], Tensor], length: int, keys: int, *,
                  step: int | None = None) -> IntervalMask | Tensor:
    """A mask that is only known as a function: `function(i0, i1)` gives boolean `[B or 1, 1, i1 - i0, keys]`.

    Evaluated in blocks of `step` rows. An `IntervalMask` where every row's allowed keys are neighbours (their count equals
    stop - start), otherwise the dense boolean mask.
    """
    step = step or max(1, BLOCK_ELEMENTS // max(keys, 1))
    starts: list[Tensor] = []
    stops: list[Tensor] = []
    for i in range(0, length, step):
        block = function(i, min(i + step, length))
        start, stop, interval = _runs(block[:, 0])
        if block.shape[1] != 1 or not bool(interval.all()):
            return torch.cat([function(j, min(j + step, length)) for j in range(0, length, step)], dim=-2)
        starts.append(start)
        stops.append(stop)
    if not starts:
        return IntervalMask(())
    return intervals(torch.cat(starts, -1), torch.cat(stops, -1))


def from_dense(mask: Tensor) -> IntervalMask | Tensor:
    """A dense boolean mask `[B or 1, 1, L, S]` as intervals where it is that on every row, else unchanged."""
    result = from_function(lambda i, j: mask[..., i:j, :], mask.shape[-2], mask.shape[-1])
    return mask if isinstance(result, Tensor) else result


def _runs(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Boolean `[..., S]` -> first True, one past the last True (0, 0 where none), and whether all between are True."""
    if mask.shape[-1] == 0:
        zero = torch.zeros(mask.shape[:-1], dtype=torch.int64, device=mask.device)
        return zero, zero, zero == 0
    as_byte = mask.to(torch.uint8)
    count = as_byte.sum(-1, dtype=torch.int64)
    start = as_byte.argmax(-1)
    stop = torch.where(count > 0, mask.shape[-1] - as_byte.flip(-1).argmax(-1), start)
    return start, stop, stop - start == count
