"""Nested tensors of the jagged layout: sequences of different lengths without padding.

Their numbers are those of packed documents, all sequences one after another, and that is how they
are computed: each query attends to the interval of keys that are of its sequence. No padding is
made and nothing is repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..errors import MultiheadError
from .masks import IntervalMask, intervals
from .modes import known, require
from .slopes import AlibiBias

__all__ = ["Sequences", "is_nested", "pack_bias", "pack_mask", "refuse_nested", "unpack"]


class Sequences(NamedTuple):
    """Where the sequences of a nested tensor lie in its packed numbers, `[total, ...]`.

    Attributes:
        offsets: integers `[B + 1]`: sequence b is from `offsets[b]` on.
        lengths: integers `[B]`.
        number: integers `[total]`, the sequence of each token.
        position: integers `[total]`, its position there.
        has_gaps: whether there are tokens between the sequences, of none of them, as
            `torch.nested.narrow` leaves them. They are computed like padding, since their number is
            a value, which a compiled graph can't have in a shape.
    """

    offsets: Tensor
    lengths: Tensor
    number: Tensor
    position: Tensor
    has_gaps: bool

    @property
    def longest(self) -> int:
        """Length of the longest sequence; reads a value."""
        return int(self.lengths.max()) if len(self.lengths) else 0

    @property
    def real(self) -> Tensor:
        """Boolean `[total]`, whether a token is one of its sequence, and not in a gap."""
        return (self.position >= 0) & (self.position < self.lengths[self.number])

    def nest(self, packed: Tensor) -> Tensor:
        """Packed numbers `[total, ...]` as the nested tensor `[B, j, ...]`, whose j is that of the
        input, so that they can be added.
        """
        lengths = self.lengths if self.has_gaps else None
        return torch.nested.nested_tensor_from_jagged(packed, self.offsets, lengths)

    def align(self, packed: Tensor, other: Sequences, message: Callable[[], str]) -> Tensor:
        """Packed numbers of `other`, which has the same lengths, at the places of this one.

        Raises:
            MultiheadError: other lengths, with `message()`.
        """
        same: bool | Tensor = self.lengths.shape == other.lengths.shape
        if same and self.lengths is not other.lengths:
            same = known(self.lengths == other.lengths)
        if same is not True:
            require(same, message() if same is False else "nested tensors have other lengths")
        if self.offsets is other.offsets or not (self.has_gaps or other.has_gaps):
            return packed
        if not packed.shape[0]:
            return packed.new_zeros(len(self.number), *packed.shape[1:])
        rows = (other.offsets[:-1][self.number] + self.position).clamp(0, packed.shape[0] - 1)
        return _fill_gaps(packed[rows], self)


def _fill_gaps(packed: Tensor, sequences: Sequences) -> Tensor:
    """0 in the gaps: what lies there may be NaN, and gradients of weights would be too."""
    real = sequences.real.reshape(-1, *[1] * (packed.ndim - 1))
    return packed.masked_fill(~real, 0)


def is_nested(*given: object) -> bool:
    """Whether some of these are nested tensors."""
    return any(isinstance(x, Tensor) and x.is_nested for x in given)


def refuse_nested(name: str, why: str, do: str) -> NoReturn:
    """Raise for an argument that has no meaning with nested tensors."""
    raise MultiheadError(f"{name} is given with nested tensors: {why}; {do}")


def unpack(name: str, x: Tensor, axis: int, shape: str) -> tuple[Tensor, Sequences]:
    """The packed numbers `[total, ...]` of a nested tensor whose sequences are along `axis`.

    Raises:
        MultiheadError: a tensor that isn't nested, one of the strided layout, another axis.
    """
    if not x.is_nested:
        raise MultiheadError(
            f"{name}{list(x.shape)} isn't nested, but another input is; pass all of them nested, or"
            " all padded"
        )
    if x.layout != torch.jagged:
        raise MultiheadError(
            f"{name} is a nested tensor of the strided layout: expected the jagged one; convert it,"
            f" torch.nested.as_nested_tensor(list({name}.unbind()), layout=torch.jagged)"
        )
    nested: Any = x
    if nested._ragged_idx != axis or x.ndim != len(shape.split(",")):
        hint = ""
        if axis == 2 and nested._ragged_idx == 1 and x.ndim == 4:
            hint = f"; pass {name}.transpose(1, 2)"
        raise MultiheadError(
            f"{name} is nested with shape {_show(nested)}: expected {shape}, whose lengths differ"
            f" along axis {axis}{hint}"
        )
    if axis > 1:
        nested = nested.transpose(1, axis)
    values, offsets, lengths = nested.values(), nested.offsets(), nested.lengths()
    index = torch.arange(values.shape[0], device=values.device, dtype=offsets.dtype)
    last = max(len(offsets) - 2, 0)
    number = torch.searchsorted(offsets[1:], index, right=True).clamp(max=last)
    position = index - offsets[number]
    if lengths is None:
        return values, Sequences(offsets, offsets.diff(), number, position, False)
    sequences = Sequences(offsets, lengths, number, position, True)
    return _fill_gaps(values, sequences), sequences


def _show(x: Any) -> str:
    sizes = ["j" if n == x._ragged_idx else str(size) for n, size in enumerate(x.shape)]
    return f"[{', '.join(sizes)}]"


def pack_mask(mask: Any, queries: Sequences, keys: Sequences) -> IntervalMask:
    """The mask of packed sequences: that of each sequence, and no key of another.

    Raises:
        MultiheadError: a dense mask, or one of other lengths.
    """
    if mask is not None and not isinstance(mask, IntervalMask):
        refuse_nested(
            "mask",
            "one of single keys doesn't fit sequences of different lengths",
            "give an interval mask, such as causal(), window(...) or prefix(...)",
        )
    mask = IntervalMask() if mask is None else mask
    first, count = (x[queries.number] for x in (keys.offsets[:-1], keys.lengths))
    if not mask.rules:  # one of distances, which needs no length: one graph for all
        at = queries.position
        start = torch.zeros_like(at) if mask.low is None else at + mask.low
        stop = count if mask.high is None else at + mask.high
    else:
        start, stop = mask.bounds(queries.longest, keys.longest, queries.offsets.device)
        batch = len(queries.lengths)
        if start.shape[0] not in (1, batch):
            raise MultiheadError(
                f"mask is for a batch of {start.shape[0]}, but the nested tensors have {batch}"
                " sequences"
            )
        start, stop = (_of_tokens(x, queries) for x in (start, stop))
    start, stop = (first + torch.minimum(x.clamp(min=0), count) for x in (start, stop))
    if queries.has_gaps:  # what lies there reads no key, which takes no time
        start, stop = (x.where(queries.real, 0) for x in (start, stop))
    return intervals(start[None], stop[None])


def _of_tokens(x: Tensor, sequences: Sequences) -> Tensor:
    """Of `[1 or B, L]`, one for each position, those of the packed tokens, `[total]`."""
    if not x.shape[1]:
        return x.new_zeros(len(sequences.number))
    at = sequences.position.clamp(0, x.shape[1] - 1)
    return x.expand(len(sequences.lengths), -1)[sequences.number, at]


def pack_bias(bias: Any, queries: Sequences, keys: Sequences, name: str = "bias") -> Any:
    """`AlibiBias` of packed sequences; None without one.

    Raises:
        MultiheadError: a dense bias.
    """
    if bias is None:
        return None
    if not isinstance(bias, AlibiBias):
        refuse_nested(
            name,
            "one of single keys doesn't fit sequences of different lengths",
            "give AlibiBias(...), or pad the sequences and mask the padding",
        )
    batch, places = len(queries.lengths), []
    for what, x, side in (
        ("query_positions", bias.query_positions, queries),
        ("key_positions", bias.key_positions, keys),
    ):
        if x.shape[0] not in (1, batch) or x.shape[1] < side.longest:
            raise MultiheadError(
                f"{name}: {what}{list(x.shape)} of AlibiBias, but the nested tensors have {batch}"
                f" sequences of up to {side.longest} tokens"
            )
        places.append(_of_tokens(x, side))
    return AlibiBias(bias.slopes, *places)
