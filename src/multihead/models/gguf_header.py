"""The table of contents of a GGUF file, checked against the size of the file before anything else
reads it.

The format is https://github.com/ggml-org/ggml/blob/master/docs/gguf.md: a header, named values,
then the name, shape, type and place of each tensor. The libraries that read it trust its counts and
lengths, and a count that lies keeps them busy forever.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import MultiheadError

__all__ = ["GGUFHeader", "read_gguf_header"]

VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
NUMBERS = dict(enumerate("BbHhIif?", 0)) | {10: "Q", 11: "q", 12: "d"}  # formats of struct by type
MOST_AXES = 8


@dataclass(frozen=True)
class GGUFHeader:
    """The contents of a file: its named numbers and texts (without arrays), and its tensors."""

    values: dict[str, Any]
    tensors: int
    elements: int  # of all tensors
    types: tuple[str, ...]  # of the tensors, that of the most first
    names: frozenset[str]  # of the tensors


def read_gguf_header(file: Path) -> GGUFHeader:
    """Read and check the table of contents.

    Raises:
        ValueError: what is wrong with it.
    """
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Reader(data).read()


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        self.names = {int(kind): kind.name for kind in GGMLQuantizationType}
        self.data, self.at = data, 0
        # elements and bytes of a block, by type
        self.block_sizes = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}

    def read(self) -> GGUFHeader:
        magic, version, tensors, entries = self.take("<4sIQQ")
        if magic != b"GGUF" or version not in VERSIONS:
            raise MultiheadError(f"version {version}, expected {' or '.join(map(str, VERSIONS))}")
        # a named value takes 13 bytes at least, a tensor 24
        self.require_room(
            entries * 13 + tensors * 24, f"{entries:,} values and {tensors:,} tensors"
        )
        values: dict[str, Any] = {}
        for _ in range(entries):
            name = self.text()
            (kind,) = self.take("<I")
            value = self.value(kind)
            if value is not None:
                values[name] = value
        aligned = values.get("general.alignment", 32)
        if not isinstance(aligned, int) or not 0 < aligned <= 1 << 20 or aligned & (aligned - 1):
            raise MultiheadError(f"general.alignment is {aligned!r}, expected a power of two")
        return GGUFHeader(values, tensors, *self.tensors(tensors, aligned))

    def tensors(self, count: int, aligned: int) -> tuple[int, tuple[str, ...], frozenset[str]]:
        """Check the tensors, and return the number of their elements, types and names."""
        elements, ends = 0, []
        types: Counter[str] = Counter()
        for _ in range(count):
            name = self.text()
            (axes,) = self.take("<I")
            if axes > MOST_AXES:
                raise MultiheadError(f"tensor {name[:80]!r} has {axes:,} axes")
            size = math.prod(self.take(f"<{axes}Q"))
            kind, offset = self.take("<IQ")
            if kind not in self.block_sizes:
                raise MultiheadError(f"tensor {name[:80]!r} is of type {kind}, which doesn't exist")
            per_block, block = self.block_sizes[kind]
            if offset % aligned or size % per_block:
                raise MultiheadError(
                    f"tensor {name[:80]!r} of {size:,} elements at byte {offset:,} is not aligned"
                )
            elements += size
            types[self.names[kind]] += 1
            ends.append((offset + size // per_block * block, name))
        self.at += -self.at % aligned  # where the tensors begin
        last, name = max(ends, default=(0, ""))
        self.require_room(last, f"tensor {name[:80]!r} that ends {last:,} bytes on,")
        names = frozenset(name for _, name in ends)
        return elements, tuple(name for name, _ in types.most_common()), names

    def value(self, kind: int) -> Any:
        """A number or text; None for an array."""
        if kind == STRING:
            return self.text()
        if kind in NUMBERS:
            return self.take(f"<{NUMBERS[kind]}")[0]
        if kind != ARRAY:
            raise MultiheadError(f"a value is of type {kind}, which doesn't exist")
        element, count = self.take("<IQ")
        if element in NUMBERS:
            self.skip(count * struct.calcsize(f"<{NUMBERS[element]}"), f"an array of {count:,}")
        elif element == STRING:
            self.require_room(count * 8, f"an array of {count:,} texts")
            for _ in range(count):
                (length,) = self.take("<Q")
                self.skip(length, f"a text of {length:,} bytes")
        else:
            raise MultiheadError(f"an array is of type {element}, which none can have")
        return None

    def text(self) -> str:
        (length,) = self.take("<Q")
        start = self.at
        self.skip(length, f"a text of {length:,} bytes")
        return self.data[start : self.at].decode("utf-8")

    def take(self, form: str) -> tuple[Any, ...]:
        start = self.at
        self.skip(struct.calcsize(form), "its table of contents")
        return struct.unpack_from(form, self.data, start)

    def skip(self, size: int, what: str) -> None:
        self.require_room(size, what)
        self.at += size

    def require_room(self, size: int, what: str) -> None:
        if self.at + size > len(self.data):
            raise MultiheadError(
                f"{what} at byte {self.at:,} can't be in a file of {len(self.data):,} bytes"
            )
