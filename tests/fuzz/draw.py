"""What the fuzzers draw from a seed: tensors in every memory layout, masks of every kind."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from multihead import masks

# of the largest number that is compared: how far a result may be from float64's
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Draw(random.Random):
    """Random numbers of one case; torch's generator starts from the same seed."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.torch = torch.Generator(device="cpu").manual_seed(seed)

    def maybe(self, probability: float = 0.5) -> bool:
        return self.random() < probability

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        x = torch.empty(shape, dtype=torch.float64, device="cpu")
        return x.normal_(generator=self.torch).to(dtype)


LAYOUTS = ("plain", "plain", "heads last", "every other", "inside", "reversed axes", "negated")


def arrange(draw: Draw, x: Tensor) -> Tensor:
    """The same numbers in another layout of the memory."""
    layout = draw.choice(LAYOUTS)
    if layout == "heads last" and x.ndim > 2:
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "every other" and x.ndim:
        larger = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan)
        larger[..., ::2] = x
        return larger[..., ::2]
    if layout == "inside" and x.ndim:
        larger = x.new_full([n + 3 for n in x.shape], torch.nan)
        part = larger[tuple(slice(1, n + 1) for n in x.shape)]
        part.copy_(x)
        return part
    if layout == "reversed axes":
        axes = list(range(x.ndim))[::-1]
        return x.permute(axes).contiguous().permute(axes)
    if layout == "negated":
        return torch._neg_view(-x)
    return x


def broadcast(draw: Draw, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to this one, perhaps with fewer axes."""
    found = tuple(1 if draw.maybe(0.3) else n for n in shape)
    while found and found[0] == 1 and draw.maybe(0.4) and len(found) > 1:
        found = found[1:]
    return found


def cumulative(draw: Draw, total: int, count: int) -> list[int]:
    """Cumulative lengths of so many sequences, some of them empty."""
    return [0, *sorted(draw.randint(0, total) for _ in range(count - 1)), total]


def interval_mask(draw: Draw, batch: int, length: int, keys: int) -> masks.IntervalMask:
    """An interval mask of one to three rules; in a history of other positions too."""
    found = masks.IntervalMask()
    kinds: tuple[str, ...] = ("causal", "window", "prefix", "documents", "padding", "valid", "rows")
    if draw.maybe(0.1):  # with other lengths of keys, where only masks of keys may join
        kinds, count = kinds[-3:], draw.randint(1, 4)
        inside = draw.choice((None, masks.causal(draw.randint(-1, 2)), masks.window(1, 0)))
        found = masks.documents.from_cu_seqlens(
            cumulative(draw, length, count), cumulative(draw, keys, count), mask=inside
        )
    for _ in range(draw.randint(1, 3)):
        kind = draw.choice(kinds)
        offset: Any = draw.randint(-2, keys + 2)
        if draw.maybe(0.3):
            offset = torch.tensor(
                [draw.randint(0, keys + 1) for _ in range(batch)], dtype=torch.int64
            )
        if kind == "causal":
            rule = masks.causal(offset)
        elif kind == "window":
            sides = [draw.choice((None, draw.randint(0, keys + 1))) for _ in range(2)]
            rule = masks.window(sides[0], sides[1], offset=offset)
        elif kind == "padding":
            lengths = [draw.randint(0, keys) for _ in range(batch)]
            rule = masks.padding(torch.tensor(lengths, dtype=torch.int64))
        elif kind == "valid":
            valid = torch.zeros(batch, keys, dtype=torch.bool)
            for row in valid:
                start = draw.randint(0, keys)
                row[start : draw.randint(start, keys)] = True
            rule = masks.padding(valid=valid)
        elif kind == "documents":
            if length > keys:
                continue
            ids = torch.tensor([[draw.random() < 0.2 for _ in range(keys)] for _ in range(batch)])
            rule = masks.documents(ids.reshape(batch, keys).long().cumsum(1))
            if draw.maybe(0.3):
                rule = masks.documents.from_cu_seqlens(cumulative(draw, keys, draw.randint(1, 4)))
        elif kind == "prefix":
            rule = masks.prefix(draw.randint(0, keys + 1))
        else:
            bounds = torch.tensor(
                [[draw.randint(-2, keys + 2) for _ in range(2)] for _ in range(batch * length)],
                dtype=torch.int64,
            ).reshape(batch, length, 2)
            rule = masks.intervals(bounds[..., 0], bounds[..., 1])
        found = found & rule
    return found
