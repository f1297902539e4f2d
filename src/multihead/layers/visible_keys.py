"""`VisibleKeys`, the keys and values that a call with a cache reads; and writes to its memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from ..errors import MultiheadError
from ..ops.backends.blocks import autocast_off
from ..ops.functional import attention
from ..ops.masks import IntervalMask, bounds_to_dense, padding, runs, window
from ..ops.modes import known
from ..ops.numbers import dequantize
from ..ops.tensors import TensorLike, to_tensor


class Quantization(NamedTuple):
    """The factors of int8 keys and values: x = (int8 * scale) basis^T.

    Attributes:
        k_scale, v_scale: `[B, G, S]`, float32.
        k_basis, v_basis: orthonormal `[E, E]` and `[Ev, Ev]`, float32; None for none.
    """

    k_scale: Tensor
    v_scale: Tensor
    k_basis: Tensor | None = None
    v_basis: Tensor | None = None

    def to_numbers(self, k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """int8 keys and values in `dtype`."""
        wide = torch.promote_types(dtype, torch.float32)
        v = from_basis(dequantize(v, self.v_scale, wide), self.v_basis)
        return self.keys_to_numbers(k, dtype), v.to(dtype)

    def keys_to_numbers(self, k: Tensor, dtype: torch.dtype) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        return from_basis(dequantize(k, self.k_scale, wide), self.k_basis).to(dtype)


class VisibleKeys(NamedTuple):
    """Keys and values of a cache and of one call.

    Attributes:
        k: `[B, G, S, E]`.
        v: `[B, G, S, Ev]`.
        offset: position of the first query; where padding precedes it, less than the position of
            the first token, and so possibly negative.
        total: number of positions so far, of the longest sequence.
        lengths: `[B]`, if the sequences differ: keys from there on are empty.
        positions: `[1 or B, S]`, the position of each key, -1 for empty slots; None if key j is at
            position j.
        left: number of keys before its own that a query reads; None for all.
        sinks: number of first keys that every query reads as well.
        quantized: how k and v are to be read, if they are int8.
    """

    k: Tensor
    v: Tensor
    offset: int | Tensor
    total: int
    lengths: Tensor | None = None
    positions: Tensor | None = None
    left: int | None = None
    sinks: int = 0
    quantized: Quantization | None = None

    def key_positions(self) -> Tensor:
        """The position of each key, `[S]` or `[1 or B, S]`, -1 for empty slots."""
        if self.positions is not None:
            return self.positions
        return torch.arange(self.k.shape[2], device=self.k.device)

    def to_mask(
        self, mask: IntervalMask | Tensor | None, bias: object, length: int
    ) -> IntervalMask | Tensor | None:
        """The mask of a call, which concerns positions, as a mask of these keys.

        Raises:
            MultiheadError: a mask or bias of single keys, where the index of a key isn't its
                position in every sequence.
        """
        if self.lengths is not None or self.left is not None:
            name = None
            if bias is not None:
                name = "attn_bias"
            elif isinstance(mask, Tensor) or (isinstance(mask, IntervalMask) and mask.rules):
                name = "mask"
            if name is not None:
                raise MultiheadError(
                    f"{name} is one of single keys, but this cache evicts keys, or its sequences"
                    " differ in length, so that the index of a key isn't its position; give a mask"
                    " of distances, causal() or window(...), or a PositionBias"
                )
        if self.positions is None and not (self.sinks and self.left is not None):
            rules = IntervalMask() if self.lengths is None else padding(self.lengths)
            if self.left is not None:
                rules = rules & window(left=self.left, right=0, offset=self.offset)
            if isinstance(mask, IntervalMask):
                return rules & mask.after(self.offset)
            return mask if rules.static(length, self.k.shape[2]) == "all" else rules
        assert not isinstance(mask, Tensor)
        return self._to_dense(IntervalMask() if mask is None else mask, length)

    def _to_dense(self, mask: IntervalMask, length: int) -> Tensor:
        """bool `[B, 1, L, S]`."""
        device, keys = self.k.device, torch.atleast_2d(self.key_positions())
        queries = torch.arange(length, device=device) + to_column(self.offset, device)
        start, stop = mask.after(self.offset).bounds(length, self.total, device)
        visible = bounds_to_dense(start, stop, keys[:, None]) & (keys >= 0)[:, None]
        if self.left is not None:
            distance = queries[..., None] - keys[:, None]
            is_near = (distance <= self.left) | (keys < self.sinks)[:, None]
            visible = visible & (distance >= 0) & is_near
        return visible[:, None]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: IntervalMask | Tensor | None,
    *,
    quantized: Quantization | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, ...]:
    """`multihead.attention` of keys and values that may be int8: queries enter the basis of the
    keys, and the output leaves that of the values.
    """
    if quantized is None:
        return attention(q, k, v, mask, **options)
    if not torch.compiler.is_compiling() and has_torch_function((q, k, v)):
        # a reading weighs values and keys as the model has them
        k, v = quantized.to_numbers(k, v, q.dtype)
        return attention(q, k, v, mask, **options)
    result = attention(
        to_basis(q, quantized.k_basis),
        k,
        v,
        mask,
        k_scale=quantized.k_scale,
        v_scale=quantized.v_scale,
        **options,
    )
    if isinstance(result, tuple):
        return (from_basis(result[0], quantized.v_basis), *result[1:])
    return from_basis(result, quantized.v_basis)


def to_basis(x: Tensor, basis: Tensor | None) -> Tensor:
    """x `[..., E]` times an orthonormal matrix `[E, E]`, computed in float32 or better."""
    if basis is None:
        return x
    wide = torch.promote_types(x.dtype, basis.dtype)
    with autocast_off(x):
        return (x.to(wide) @ basis.to(wide)).to(x.dtype)


def from_basis(x: Tensor, basis: Tensor | None) -> Tensor:
    """The inverse of `to_basis`."""
    return x if basis is None else to_basis(x, basis.mT)


def write_tokens(
    buffer: Tensor,
    new: Tensor,
    start: Tensor,
    *,
    count: Tensor | None = None,
    circular: bool = False,
) -> None:
    """Write `new [B, G, L, E]` into `buffer [B, G, C, E]` in place, token i of sequence b at slot
    `start[b] + i`.

    Args:
        buffer: the memory.
        new: the tokens.
        start: integers `[B]`.
        count: integers `[B]`, the number of tokens of each sequence to write; all unless given.
        circular: whether slot 0 follows the last one.

    Raises:
        MultiheadError: a token has no slot.

    >>> buffer = torch.zeros(1, 1, 3, 1)
    >>> write_tokens(buffer, torch.tensor([[[[1.0], [2.0]]]]), torch.tensor([2]), circular=True)
    >>> buffer.flatten().tolist()
    [2.0, 0.0, 1.0]
    """
    room, length = buffer.shape[2], new.shape[2]
    index = torch.arange(length, device=new.device)
    slots = start.to(new.device)[:, None] + index
    if circular and length <= room:
        slots = slots % room
    real = torch.ones_like(slots, dtype=torch.bool)
    if count is not None:
        real = index < count[:, None]
    misplaced = (real & ((slots < 0) | (slots >= room))).any()
    if not known(~misplaced):
        raise MultiheadError(
            f"start={start.tolist()}: {length} tokens from there on don't fit into the {room} slots"
            " of the buffer"
        )
    if count is None:
        index = slots[:, None, :, None].expand(-1, buffer.shape[1], -1, buffer.shape[3])
        buffer.scatter_(2, index, new)
    else:
        row, token = real.nonzero(as_tuple=True)
        buffer[row, :, slots[row, token]] = new[row, :, token]


def to_valid(
    valid: TensorLike,
    batch: int | None = None,
    length: int | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """`valid` as a bool tensor `[B, S]` on `device`.

    Raises:
        TypeError: anything else than booleans.
        MultiheadError: another shape than `[batch, length]`, if those are given.

    >>> to_valid([[True, False]])
    tensor([[ True, False]])
    """
    shape = "[B, S]" if batch is None else f"[B, S] = {[batch, length]}"
    expected = f"bool {shape}, True for the real tokens among the keys of this call"
    found = to_tensor("valid", valid, expected, empty=torch.bool)
    actual = f"valid is {found.dtype} {list(found.shape)}: expected {expected}"
    if found.dtype != torch.bool:
        raise TypeError(f"{actual}; convert a 0/1 mask with valid.bool()")
    if found.ndim != 2 or (batch is not None and found.shape != (batch, length)):
        raise MultiheadError(actual)
    return found if device is None else found.to(device)


def longest(lengths: int | Tensor) -> int:
    if not isinstance(lengths, Tensor):
        return lengths
    return int(lengths.max()) if lengths.numel() else 0


def to_column(value: int | Tensor, device: torch.device) -> Tensor:
    """`[1 or B, 1]`."""
    return torch.as_tensor(value, device=device).reshape(-1, 1)


def valid_span(valid: Tensor) -> tuple[Tensor, Tensor]:
    """First and one past the last real token of each sequence, `[B]`."""
    start, stop, _ = runs(valid)
    return start, stop
