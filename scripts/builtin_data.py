#!/usr/bin/env python
"""Fetches the text that the built-in model is trained on, and splits it into training and held-out
documents.

    python scripts/builtin_data.py --out runs/data

Three sources, all free to use:
- austen: the six novels of Jane Austen (public domain), a document a chapter, from Debian's
  r-cran-janeaustenr;
- docs: the sources of Python's documentation (PSF licence), a document a page, from Debian's
  python3.11-doc;
- docstrings: the docstrings of the standard library of the running Python (PSF licence), a document
  a module.

The packages are downloaded and unpacked below --out, never installed. The result is
`documents.jsonl`: one line a document with its source, name, split and text. Which documents are
held out follows from their names alone.
"""

import argparse
import ast
import json
import platform
import re
import struct
import subprocess
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("r-cran-janeaustenr", "python3.11-doc")
HELD_OUT = 20  # one document in so many
# Not library code, or (encodings) hundreds of generated tables.
NO_LIBRARY = {
    "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "turtledemo", "pydoc_data",
}  # fmt: skip


def fetch(out: Path) -> Path:
    """Downloads the packages with apt-get and unpacks them; answers the folder they are unpacked
    in.
    """
    root = out / "packages"
    root.mkdir(parents=True, exist_ok=True)
    if not any(root.glob("*.deb")):
        subprocess.run(["apt-get", "download", *PACKAGES], cwd=root, check=True)
    for package in root.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package.resolve(), root.resolve()], check=True)
    return root


def read_r_lines(path: Path) -> Iterator[list[str]]:
    """The character vectors in a lazy-load database of R: blocks of a length, four bytes, big
    endian, and a zlib stream that holds one object in R's XDR serialisation, of which only what a
    vector of strings uses is read here.
    """
    data, at = path.read_bytes(), 0
    while at < len(data):
        stream = zlib.decompressobj()
        block = stream.decompress(data[at + 4 :])
        at = len(data) - len(stream.unused_data)
        # "X\n", three versions, then (since version 3) the name of the encoding with its length
        # before it
        encoding_length = struct.unpack_from(">I", block, 14)[0]
        here = 18 + encoding_length
        kind, count = struct.unpack_from(">II", block, here)
        if kind & 0xFF != 16:
            raise ValueError(
                f"{path}: an object of R's type {kind & 0xFF}; expected 16, a vector of strings"
            )
        here += 8
        lines = []
        for _ in range(count):
            length = struct.unpack_from(">i", block, here + 4)[0]
            here += 8
            lines.append(block[here : here + length].decode())
            here += length
        yield lines


def chapters(lines: list[str]) -> Iterator[str]:
    """The chapters of a novel, the lines of each paragraph joined."""
    text = "\n".join(line.rstrip() for line in lines)
    for part in re.split(r"(?mi)^(?=chapter [0-9ivxlc]+\.?$)", text)[1:]:
        paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", part))
        yield "\n\n".join(paragraph for paragraph in paragraphs if paragraph) + "\n"


def docstrings(source: str) -> str:
    """The docstrings of a module, its classes and functions, each under its name."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, documented))
    found = ((getattr(node, "name", "module"), ast.get_docstring(node)) for node in nodes)
    return "\n".join(f"{name}\n\n{text}\n" for name, text in found if text)


def documents(root: Path) -> Iterator[tuple[str, str, str]]:
    """(source, name, text) of every document."""
    for novel in read_r_lines(root / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"):
        title = novel[0].strip().title()
        for number, text in enumerate(chapters(novel), 1):
            yield "austen", f"{title}, chapter {number}", text
    pages = root / "usr/share/doc/python3.11/html/_sources"
    for path in sorted(pages.rglob("*.rst.txt")):
        yield "docs", str(path.relative_to(pages)), path.read_text(encoding="utf-8")
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library)
        if not NO_LIBRARY & set(name.parts) and (
            text := docstrings(path.read_text(encoding="utf-8"))
        ):
            yield "docstrings", str(name), text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/data"))
    out = parser.parse_args().out
    root = fetch(out)
    sizes: dict[tuple[str, str], list[int]] = {}
    target = out / "documents.jsonl"
    part = target.with_suffix(".part")
    with part.open("w", encoding="utf-8") as file:
        for source, name, text in documents(root):
            split = "held-out" if zlib.crc32(name.encode()) % HELD_OUT == 0 else "train"
            file.write(
                json.dumps({"source": source, "name": name, "split": split, "text": text}) + "\n"
            )
            size = sizes.setdefault((source, split), [0, 0])
            size[0] += 1
            size[1] += len(text.encode())
    part.replace(target)
    print(f"{target} (Python {platform.python_version()})")
    for (source, split), (count, size_in_bytes) in sorted(sizes.items()):
        print(f"{source:12} {split:9} {count:5} documents {size_in_bytes / 1e6:7.2f} MB")


if __name__ == "__main__":
    main()
