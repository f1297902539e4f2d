"""`Fit`: how much of a model fits on one device or several: the longest context at a batch size,
and the largest batch at a context.

A device holds its weights and its cache. With tensor parallelism over N devices (Shoeybi et al.
2019, arXiv 1909.08053) matrices are divided: W_Q and W_O by query heads, W_K and W_V by key/value
heads, everything else by columns or rows. Where there are fewer key/value heads than devices, a
device holds one of them, so that N / G devices hold the same (as vLLM does). What isn't divided is
on every device: vectors (norms), and the latent of MLA with the matrices that make it, whose cache
is the same on every device.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import MultiheadError
from ..terminal import Grid, Part, to_text
from .totals import CostTotals, Weights

LONGEST = 2**40  # tokens; a cache that still fits grows with no token
UNITS = {"": 1, "k": 10, "m": 20, "g": 30, "t": 40}


@dataclass(frozen=True)
class Fit:
    """Bytes of one device, and what fits, as `Cost.fit` returns it.

    >>> import multihead
    >>> llama = multihead.cost(embed_dim=4096, num_heads=32, num_kv_heads=8, num_layers=32)
    >>> fit = llama.fit("3.81 GiB", weights=0)
    >>> fit.max_context_length, fit.max_batch_size  # at a batch of 1, and at 4,096 tokens
    (31200, 7)
    """

    devices: int
    memory: int | None  # for weights and cache
    weights: int
    cache: int  # of the batch at the context length, in whole pages
    context_length: int
    batch_size: int
    max_context_length: int | None  # at the batch size; None: any length fits, or no memory given
    max_batch_size: int | None  # at the context length; None: no memory given, or nothing is cached
    max_positions: int | None = None  # tokens that the config allows

    @property
    def free(self) -> int | None:
        """Bytes that weights and cache leave, below 0 where they don't fit."""
        return None if self.memory is None else self.memory - self.weights - self.cache

    def to_dict(self) -> dict[str, Any]:
        """All numbers, `free` included."""
        return {**asdict(self), "free": self.free}

    def __str__(self) -> str:
        from .show import format_bytes

        name = "a device" if self.devices > 1 else "on the device"
        rows = [
            ["weights", f"{self.weights:,}", format_bytes(self.weights)],
            [
                f"cache, {self.context_length:,} tokens x {self.batch_size:,}",
                f"{self.cache:,}",
                format_bytes(self.cache),
            ],
        ]
        if self.memory is not None:
            rows.append(["memory", f"{self.memory:,}", format_bytes(self.memory)])
        title = f"{name}, tensor parallel over {self.devices}" if self.devices > 1 else name
        return to_text([Grid([title, "bytes", ""], rows), *self._texts()])

    def _texts(self) -> list[Part]:
        """Sentences on what fits."""
        if self.memory is None:
            return []
        from .show import format_bytes

        room = self.memory - self.weights
        if room < 0:
            return [f"the weights don't fit: {format_bytes(-room)} too much"]
        length = (
            "any length"
            if self.max_context_length is None
            else (f"{self.max_context_length:,} tokens")
        )
        if self.max_positions is not None and self.max_context_length not in range(
            self.max_positions + 1
        ):
            length += f" (the config allows {self.max_positions:,})"
        lines: list[Part] = [f"longest context at a batch of {self.batch_size:,}: {length}"]
        if self.max_batch_size is not None:
            lines.append(
                f"largest batch at {self.context_length:,} tokens: {self.max_batch_size:,}"
            )
        return [*lines, "not counted: activations, a framework's own memory, fragmentation"]


def compute_fit(
    cost: CostTotals,
    memory: int | str | None = None,
    *,
    tensor_parallel: int = 1,
    weights: int | str | None = None,
) -> Fit:
    """Compute what of `cost` fits into the memory of a device; see `Cost.fit`."""
    space = None if memory is None else parse_size("memory", memory)
    given = None if weights is None else parse_size("weights", weights)
    if type(tensor_parallel) is not int or tensor_parallel < 1:
        raise MultiheadError(
            f"tensor_parallel={tensor_parallel!r}: expected a number of devices, at least 1"
        )
    part = cost.on_device(tensor_parallel)
    held = _weights_on_device(cost.weights, part, tensor_parallel, given)
    used = part.cache("paged")
    room = None if space is None else space - held
    one = used // cost.batch_size
    return Fit(
        devices=tensor_parallel,
        memory=space,
        weights=held,
        cache=used,
        context_length=cost.context_length,
        batch_size=cost.batch_size,
        max_context_length=None if room is None else _longest(part, room),
        max_batch_size=None if room is None or not one else max(0, room // one),
        max_positions=cost.max_positions,
    )


def _longest(part: CostTotals, room: int) -> int | None:
    """The largest number of tokens whose cache, in whole pages, takes at most `room` bytes: by
    bisection, since a longer context never takes less. None where any number fits.
    """

    def fits(tokens: int) -> bool:
        return part.at_length(tokens).cache("paged") <= room

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
        if high > LONGEST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _weights_on_device(weights: Weights, part: CostTotals, devices: int, given: int | None) -> int:
    """Bytes of the weights that each device holds, `part` being the attention on one of them."""
    size = weights.bytes if given is None else given
    if size is None:
        raise MultiheadError(
            f"weights=None: {weights.unknown}, and no file here has their size; give it, such as"
            " weights='14.2GiB'"
        )
    matrices = weights.parameters - weights.attention - weights.vectors
    attention = sum(sum(shape.parameters.values()) for shape in part.shapes)
    held = attention + weights.vectors + -(-matrices // devices)
    return -(-size * held // weights.parameters)


def parse_size(name: str, value: int | str) -> int:
    """Bytes of a size such as 80GiB, 24 GB (10**9), 512M (2**20) or a number of bytes.

    >>> parse_size("memory", "80GiB") == 80 * 2**30, parse_size("memory", "1.5 GB")
    (True, 1500000000)
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    text = value.strip().lower() if isinstance(value, str) else ""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", text)
    if match is None:
        raise MultiheadError(
            f"{name}={value!r}: expected bytes or a size such as 80GiB, 24GB or 512MiB"
        )
    number, unit, binary = match.groups()
    decimal = not binary and text.endswith("b")
    base = 1000 ** (UNITS[unit] // 10) if decimal else 2 ** UNITS[unit]
    return int(float(number) * (base if unit else 1))
