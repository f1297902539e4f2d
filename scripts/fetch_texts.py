#!/usr/bin/env python3
"""Fetches the texts on which pruning is measured into models/texts/, unless they are there already.

- `novels/`: Jane Austen's six, one file each, from Debian's package r-cran-janeaustenr (apt-get and
  dpkg-deb, without root).
- `lee/pairs.jsonl`: 50 news texts, each pair of them with how alike people found the two (Lee,
  Pincombe and Welsh, 2005), as `multihead.pruning.similarity` reads it; `lee/background.jsonl`: 300
  other texts, to rank heads on. Both from the test data of PyPI's gensim, of which nothing is
  installed.

Another folder: `fetch_texts.py FOLDER`.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

NOVELS = (
    "emma",
    "mansfieldpark",
    "northangerabbey",
    "persuasion",
    "prideprejudice",
    "sensesensibility",
)
PACKAGE = "r-cran-janeaustenr"
GENSIM = "gensim==4.4.0"
# Only its data is wanted, so one wheel serves every machine.
WHEEL = [
    "--only-binary=:all:",
    "--platform",
    "manylinux_2_24_x86_64",
    "--python-version",
    "3.11",
    "--implementation",
    "cp",
]


def main() -> int:
    folder = Path(
        sys.argv[1]
        if len(sys.argv) > 1
        else Path(__file__).resolve().parents[1] / "models" / "texts"
    )
    for names, fetch in (
        ([f"novels/{name}.txt" for name in NOVELS], novels),
        (["lee/pairs.jsonl", "lee/background.jsonl"], lee),
    ):
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            found = within(fetch)
            for name in missing:
                write(folder / name, found[name])
        for name in names:
            path = folder / name
            print(
                f"{path}: {path.stat().st_size:,} bytes,"
                f" {'fetched' if name in missing else 'there already'}"
            )
    return 0


def within(fetch: Callable[[Path], dict[str, str]]) -> dict[str, str]:
    with tempfile.TemporaryDirectory(prefix="fetching-") as scratch:
        return fetch(Path(scratch))


def write(path: Path, text: str) -> None:
    """Beside the target, then renamed: a fetch that is killed leaves no half text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetching-") as beside:
        part = Path(beside) / path.name
        part.write_bytes(text.encode())
        os.replace(part, path)


def run(command: list[str], hint: str, folder: Path) -> bytes:
    try:
        return subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE).stdout
    except FileNotFoundError:
        sys.exit(f"fetch_texts: there is no {command[0]} on this machine; {hint}")
    except subprocess.CalledProcessError:
        sys.exit(f"fetch_texts: {' '.join(command[:4])} failed (its message is above); {hint}")


def novels(scratch: Path) -> dict[str, str]:
    hint = (
        f"without Debian's {PACKAGE}, or without network, copy models/texts/novels from a machine"
        " that has it."
    )
    run(["apt-get", "-q", "download", PACKAGE], hint, scratch)
    (package,) = scratch.glob("*.deb")
    with tarfile.open(
        fileobj=io.BytesIO(run(["dpkg-deb", "--fsys-tarfile", str(package)], hint, scratch))
    ) as archive:
        index, data = (
            archive.extractfile(f"./usr/lib/R/site-library/janeaustenr/data/Rdata.{end}").read()  # type: ignore[union-attr]
            for end in ("rdx", "rdb")
        )
    found = {}
    for name, (start, length) in R(gzip.decompress(index)).read()["variables"].items():
        # R's store of what is loaded when it is asked for: the size unpacked, then zlib.
        lines = R(zlib.decompress(data[start + 4 : start + length])).read()
        found[f"novels/{name}.txt"] = "\n".join(lines) + "\n"
    return found


class R:
    """What R wrote with serialize (its XDR form): numbers, texts and lists of them, with names
    where they have any.
    """

    def __init__(self, data: bytes) -> None:
        if data[:2] != b"X\n":
            sys.exit(
                f"fetch_texts: R's data begins with {data[:2]!r}; expected its XDR form, b'X\\n'"
            )
        self.data, self.at = data, 2
        version, *_ = self.integers(3)
        if version >= 3:
            self.bytes(*self.integers(1))  # the encoding that R ran under; every text says its own
        self.symbols: list[Any] = []

    def bytes(self, length: int) -> bytes:
        self.at += length
        return self.data[self.at - length : self.at]

    def integers(self, number: int) -> list[int]:
        found = self.bytes(4 * number)
        return [
            int.from_bytes(found[n : n + 4], "big", signed=True) for n in range(0, len(found), 4)
        ]

    def read(self) -> Any:
        (flags,) = self.integers(1)
        kind = flags & 255
        value: Any
        if kind == 254:  # nothing
            return None
        if kind == 255:  # a symbol that was there before
            return self.symbols[(flags >> 8) - 1]
        if kind == 1:  # a symbol
            self.symbols.append(self.read())
            return self.symbols[-1]
        if kind == 2:  # a list of pairs: here the attributes
            found = {}
            while kind == 2:
                name = self.read() if flags & 1024 else None
                found[name] = self.read()
                (flags,) = self.integers(1)
                kind = flags & 255
            return found
        (length,) = self.integers(1)
        if kind == 9:  # one text; of length -1: none
            return (
                None
                if length < 0
                else self.bytes(length).decode("latin-1" if flags & (4 << 12) else "utf-8")
            )
        if kind in (10, 13):
            value = self.integers(length)
        elif kind in (16, 19):
            value = [self.read() for _ in range(length)]
        else:
            sys.exit(
                f"fetch_texts: R's data holds something of kind {kind}, which isn't expected among"
                " texts"
            )
        names = (self.read() if flags & 512 else {}).get("names")
        return dict(zip(names, value)) if names else value


def lee(scratch: Path) -> dict[str, str]:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--disable-pip-version-check",
        "--quiet",
        "--no-deps",
        *WHEEL,
        GENSIM,
    ]
    run(
        [*command, "--dest", str(scratch)],
        "without network, copy models/texts/lee from a machine that has it.",
        scratch,
    )
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        texts, background, scores = (
            archive.read(f"gensim/test/test_data/{name}").decode("latin-1").splitlines()
            for name in ("lee.cor", "lee_background.cor", "similarities0-1.txt")
        )
    rows = [[float(score) for score in row.split()] for row in scores]
    if [len(row) for row in rows] != [len(texts)] * len(texts):
        sys.exit(
            f"fetch_texts: {len(texts)} texts and scores of {len(rows)} in {GENSIM}; expected a"
            " score for each pair"
        )
    pairs = [
        {"a": texts[i], "b": texts[j], "score": rows[i][j]}
        for i in range(len(texts))
        for j in range(i + 1, len(texts))
    ]
    return {
        "lee/pairs.jsonl": json_lines(pairs),
        "lee/background.jsonl": json_lines([{"text": text} for text in background]),
    }


def json_lines(entries: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)


if __name__ == "__main__":
    sys.exit(main())
