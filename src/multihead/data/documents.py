"""From files, folders, JSON lines and standard input to documents, one after another: never all of
them in memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ..errors import MultiheadError
from .texts import no_such_file, read_text

__all__ = ["ENDINGS", "Documents"]

ENDINGS = (".jsonl", ".md", ".rst", ".text", ".txt")  # of the files that a folder is searched for


class Documents:
    """The texts in some sources, in their order: one a file, one a line of `.jsonl`. Each iteration
    reads them afresh.

    Args:
        sources: text files, folders (their files that end in `ENDINGS`, those of folders inside
            too, sorted by path, hidden ones left out), or "-" for standard input.
        field: the name in each JSON line under which its text stands, "text" unless given. Given,
            it makes standard input JSON lines too.

    Raises:
        FileNotFoundError: no such file or folder.
        ValueError: a folder without text files, no source, standard input twice; while iterating, a
            file that isn't UTF-8 or is empty, a line that isn't JSON or has no such field. Empty
            files of a folder and empty lines are left out.

    >>> from pathlib import Path
    >>> import multihead.models
    >>> [len(text) > 1000 for text in Documents([Path(multihead.models.__file__).parent / "builtin" / "text.txt"])]
    [True]
    """

    def __init__(self, sources: Iterable[str | Path], *, field: str | None = None) -> None:
        self.field = field
        self.files: list[
            tuple[Path | None, bool]
        ] = []  # None: standard input; whether it was named, not found in a folder
        self.left_out = 0  # empty ones, in the last iteration
        for source in sources:
            if (
                source == ""
            ):  # an unset variable of the shell; as a path it would be the current folder
                raise MultiheadError(
                    "text='' is empty; give a file, a folder, or . for the current one"
                )
            path = Path(source).expanduser()
            if source == "-":
                self.files.append((None, True))
            elif path.is_dir():
                found = sorted(
                    file
                    for file in path.rglob("*")
                    if file.suffix.lower() in ENDINGS
                    and file.is_file()
                    and not any(part.startswith(".") for part in file.relative_to(path).parts)
                )
                if not found:
                    raise MultiheadError(
                        f"text={str(source)!r} is a folder without text files: expected files in it"
                        f" that end in {', '.join(ENDINGS)}; files of other endings are given one"
                        " by one"
                    )
                self.files += [(file, False) for file in found]
            elif not path.exists():
                raise no_such_file(source)
            else:
                self.files.append((path, True))
        if not self.files:
            raise MultiheadError(
                "text=[] names no source; give at least one file or folder, or - for standard input"
            )
        if self.files.count((None, True)) > 1:
            raise MultiheadError("text='-' is given twice: standard input can be read once")

    def __iter__(self) -> Iterator[str]:
        self.left_out = 0
        for path, named in self.files:
            if path is None and self.field is not None:
                yield from self._lines(sys.stdin.buffer, "standard input")
            elif path is not None and path.suffix.lower() == ".jsonl":
                with path.open("rb") as file:
                    yield from self._lines(file, str(path))
            elif path is not None and not named and not path.read_bytes().strip():
                self.left_out += 1
            else:
                yield read_text("-" if path is None else path)

    def _lines(self, file: Iterable[bytes], name: str) -> Iterator[str]:
        field = self.field or "text"
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"text={name!r}, line {number:,}"
            try:
                entry = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:
                raise MultiheadError(
                    f"{place} isn't JSON ({error}); expected an object a line, such as "
                    f'{{"{field}": "..."}}'
                ) from error
            text = entry.get(field) if isinstance(entry, dict) else None
            if isinstance(entry, dict) and field in entry and not isinstance(text, str):
                kinds = {
                    int: "a number",
                    float: "a number",
                    bool: "true or false",
                    list: "a list",
                    dict: "an object",
                }
                raise MultiheadError(
                    f"{place} has {kinds.get(type(text), 'null')} under {field!r}, not a text; mend"
                    " the line, or give the name that holds the text as field (--field)"
                )
            if not isinstance(text, str):
                found = (
                    f"the names {', '.join(map(repr, entry))}"
                    if isinstance(entry, dict)
                    else f"a {type(entry).__name__}"
                )
                raise MultiheadError(
                    f"{place} has no text under {field!r}, but {found}; give the name that holds"
                    " the text as field (--field)"
                )
            if text.encode("utf-8", "replace").decode() != text:
                raise MultiheadError(
                    f"{place}: the text under {field!r} holds half a letter (a lone surrogate);"
                    " mend the file"
                )
            if text.strip():
                yield text
            else:
                self.left_out += 1


def named(sources: Sequence[str | Path], opening: str) -> str:
    """What the texts are called in a table: the sources, and how the first text begins."""
    shown = [("standard input" if source == "-" else str(source)) for source in sources[:3]]
    name = ", ".join(shown) + (f" and {len(sources) - 3:,} more" if len(sources) > 3 else "")
    start = " ".join(opening[:200].split())
    return f"{name}: {start[:60]}…" if len(start) > 60 else f"{name}: {start}"
