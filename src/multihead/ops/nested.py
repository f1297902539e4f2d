"""Nested tensors of the jagged layout: sequences of different lengths without padding.

Their numbers are those of packed documents, all sequences one after another, and that is how they
are computed: each query attends to the interval of keys that are of its sequence. No padding is
made and nothing is repeated.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..errors import MultiheadError
from .masks import IntervalMask, intervals
from .slopes import AlibiBias

__all__ = ["Sequences", "is_nested", "pack_bias", "pack_mask", "refuse_nested", "unpack"]


class Sequences(NamedTuple):
    """Where the sequences of a nested tensor lie in its packed numbers, `[total, ...]`.

    Attributes:
        offsets: integers `[B + 1]`: sequence b is at `offsets[b] .. offsets[b + 1] - 1`.
        number: integers `[total]`, the sequence of each token.
        position: integers `[total]`, its position there.
        longest: length of the longest sequence.
    """

    offsets: Tensor
    number: Tensor
    position: Tensor
    longest: int

    @property
    def lengths(self) -> Tensor:
        """Integers `[B]`."""
        return self.offsets.diff()

    def nest(self, packed: Tensor) -> Tensor:
        """Packed numbers `[total, ...]` as the nested tensor `[B, j, ...]`."""
        return torch.nested.nested_tensor_from_jagged(packed, offsets=self.offsets)


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
    if nested.lengths() is not None:  # sequences with gaps between them
        nested = nested.contiguous()
    values, offsets = nested.values(), nested.offsets()
    lengths = offsets.diff()
    index = torch.arange(values.shape[0], device=values.device)
    number = torch.repeat_interleave(lengths, output_size=values.shape[0])
    position = index - offsets[:-1][number]
    longest = int(lengths.max()) if lengths.numel() else 0
    return values, Sequences(offsets, number, position, longest)


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
    start, stop = mask.bounds(queries.longest, keys.longest, queries.offsets.device)
    batch = queries.offsets.shape[0] - 1
    if start.shape[0] not in (1, batch):
        raise MultiheadError(
            f"mask is for a batch of {start.shape[0]}, but the nested tensors have {batch}"
            " sequences"
        )
    first, count = (x[queries.number] for x in (keys.offsets[:-1], keys.lengths))
    start, stop = (
        torch.minimum(x.expand(batch, -1)[queries.number, queries.position], count) + first
        for x in (start, stop)
    )
    return intervals(start[None], stop[None])


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
    batch, places = queries.offsets.shape[0] - 1, []
    for what, x, side in (
        ("query_positions", bias.query_positions, queries),
        ("key_positions", bias.key_positions, keys),
    ):
        if x.shape[0] not in (1, batch) or x.shape[1] < side.longest:
            raise MultiheadError(
                f"{name}: {what}{list(x.shape)} of AlibiBias, but the nested tensors have {batch}"
                f" sequences of up to {side.longest} tokens"
            )
        places.append(x.expand(batch, -1)[side.number, side.position])
    return AlibiBias(bias.slopes, *places)
