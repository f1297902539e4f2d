"""A GGUF file whose table of contents lies is refused in time, by the command too."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from cli.commands import call
from models.test_gguf import small_gguf
from models.test_hostile import time_limit
from multihead.models.gguf_header import read_gguf_header

MANY = 1 << 60


def text(value: bytes | str, length: int | None = None) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value) if length is None else length) + value


def value(name: str, kind: int, content: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + content


def start(version: int = 3, tensors: int = 0, values: int = 1) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values)


def array(kind: int, count: int, content: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + content


def tensor(
    name: str = "a", shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0, axes: Any = None
) -> bytes:
    size = len(shape) if axes is None else axes
    lengths = struct.pack(f"<{len(shape)}Q", *shape)
    return text(name) + struct.pack("<I", size) + lengths + struct.pack("<IQ", kind, offset)


LLAMA = value("general.architecture", 8, text("llama"))
ONE = start(tensors=1) + LLAMA
LIES = {
    "version 99": start(99) + LLAMA,
    "version 0": start(0) + LLAMA,
    "version of the other byte order": b"GGUF" + struct.pack(">IQQ", 3, 0, 1) + LLAMA,
    "2^60 tensors": start(tensors=MANY) + LLAMA,
    "2^60 values": start(values=MANY) + LLAMA,
    "a text of 2^62 bytes": start() + value("a", 8, text("", 1 << 62)),
    "a name of 2^62 bytes": start() + text("", 1 << 62),
    "an array of 2^62 numbers": start() + value("a", 9, array(4, 1 << 62)),
    "an array of 2^40 texts": start() + value("a", 9, array(8, 1 << 40)),
    "an array of arrays": start() + value("a", 9, array(9, 1, array(9, 1) * 1000)),
    "a type that doesn't exist": start() + value("a", 77, b"\0" * 8),
    "an array of no type": start() + value("a", 9, array(77, 1, b"\0" * 8)),
    "alignment 0": start() + value("general.alignment", 4, struct.pack("<I", 0)),
    "alignment 3": start() + value("general.alignment", 4, struct.pack("<I", 3)),
    "alignment a text": start() + value("general.alignment", 8, text("x")),
    "a name that isn't UTF-8": start() + value("a", 8, text(b"\xff\xfe")),
    "a tensor of no type": ONE + tensor(kind=99) + b"\0" * 64,
    "a tensor of 2^31 axes": ONE + tensor(axes=1 << 31) + b"\0" * 64,
    "a tensor of 2^120 elements": ONE + tensor(shape=(1 << 60, 1 << 60)) + b"\0" * 64,
    "a tensor outside": ONE + tensor(offset=1 << 50) + b"\0" * 64,
    "a tensor that isn't aligned": ONE + tensor(offset=1) + b"\0" * 64,
    "half a block": ONE + tensor(shape=(5,), kind=8) + b"\0" * 640,
    "nothing": b"GGUF",
    "colours in a name": ONE + tensor(name="\x1b[31m\n\x1b]8;;http://x\x07", kind=99) + b"\0" * 64,
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lie.gguf"
    file.write_bytes(LIES[name])
    for command in (["read", file, "--prompt", "the head"], ["cost", file]):
        with time_limit(60):
            code, out, err = call(monkeypatch, capsys, *command)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert "is truncated or damaged; download or copy it again" in err
        assert err.rstrip("\n").isprintable()


def test_what_the_table_of_contents_holds(tmp_path: Path) -> None:
    small_gguf(tmp_path / "small.gguf")
    header = read_gguf_header(tmp_path / "small.gguf")
    assert header.values["llama.block_count"] == 1 and header.tensors == 12
    assert header.elements == 3 * 16 * 2 + 16 * 3 + 16 * 16 * 2 + 8 * 16 * 2 + 24 * 16 * 3
    assert "tokenizer.ggml.tokens" not in header.values  # an array


@pytest.mark.parametrize(
    ("key", "number"),
    [
        ("block_count", 10**6),
        ("block_count", 4_000_000_000),
        ("attention.head_count", 0),
        ("attention.head_count", 4_000_000_000),
        ("embedding_length", 4_000_000_000),
        ("embedding_length", 0),
        ("feed_forward_length", 4_000_000_000),
        ("vocab_size", 4_000_000_000),
    ],
)
def test_numbers_that_the_tensors_dont_have(
    key: str,
    number: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "small.gguf"
    small_gguf(file)
    content = file.read_bytes()
    place = content.index(f"llama.{key}".encode()) + len(f"llama.{key}") + 4
    file.write_bytes(content[:place] + struct.pack("<I", number) + content[place + 4 :])
    with time_limit(60):
        code, out, err = call(monkeypatch, capsys, "read", file, "--prompt", "ab")
    assert (code, out, err.count("\n")) == (2, "", 1), err


@pytest.mark.parametrize("architecture", ["\x1b]8;;http://evil\x07x", "\x1b[31mred\n", "a" * 10**6])
def test_an_architecture_is_printed_harmless(
    architecture: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small_gguf(tmp_path / "small.gguf", architecture)
    for command in (
        ["read", tmp_path / "small.gguf", "--prompt", "ab"],
        ["cost", tmp_path / "small.gguf"],
    ):
        code, out, err = call(monkeypatch, capsys, *command)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert err.rstrip("\n").isprintable() and len(err) < 3_200
