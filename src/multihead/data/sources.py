"""Texts from files, folders, JSON lines, standard input and strings, one at a time: they are never
all in memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .. import models
from ..errors import MultiheadError
from .documents import (
    FIELDS,
    PAIR,
    Document,
    Example,
    is_conversation,
    require_messages,
    take_row,
    words_of,
)

__all__ = ["ENDINGS", "Documents", "builtin_text", "describe_sources", "read_text", "require_pairs"]

ENDINGS = (".jsonl", ".md", ".rst", ".text", ".txt")  # of the files that are taken from a folder
SURROGATE = "contains an unpaired surrogate, which is no valid UTF-8; correct the file"
PAIR_FORM = '{"source": "...", "target": "..."}'
OTHER_FIELD = "rename it in the file, or give its name as field (--field of multihead read)"
JSON_TYPES = {
    str: "a text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


class Documents:
    """The texts of some sources, in order: one a file, one a line of `.jsonl`. Each iteration reads
    the sources again.

    Args:
        sources: text files, folders (their files that end in `ENDINGS`, also in folders inside,
            sorted by path, hidden ones left out), or "-" for standard input.
        field: the name of the text in each JSON line, or of its conversation (a list of
            messages with "role" and "content"); by default "text" (a "label" stays with it), and
            "messages" in lines without one, or "source" in those that have a "target" too. If
            given, standard input is JSON lines too.
        argument: the name of the user's argument that gave the sources, for error messages.
        pairs: whether each line has to have a "source" and a "target".

    Raises:
        FileNotFoundError: no such file or folder.
        MultiheadError: a folder without text files, no source, standard input twice; while
            iterating, a file that is empty or not UTF-8, a line that isn't JSON or has no such
            field. Empty files of a folder and empty lines are left out.

    >>> from pathlib import Path
    >>> import multihead.models
    >>> folder = Path(multihead.models.__file__).parent / "builtin"
    >>> [len(text) > 1000 for text in Documents([folder / "text.txt"])]
    [True]
    """

    def __init__(
        self,
        sources: Iterable[str | Path],
        *,
        field: str | None = None,
        argument: str = "text",
        pairs: bool = False,
    ) -> None:
        self.field, self.argument, self.pairs = field, argument, pairs
        # None is standard input; with each file, whether it was named or is one of a folder.
        self.files: list[tuple[Path | None, bool]] = []
        self.left_out = 0  # empty texts of the last iteration
        for source in sources:
            self.files += _files_of(source, argument)
        if not self.files:
            raise MultiheadError(
                f"{argument}=[] names no source; give at least one file or folder, or - for"
                " standard input"
            )
        if self.files.count((None, True)) > 1:
            raise MultiheadError(f"{argument}='-' is given twice: standard input can be read once")

    def __iter__(self) -> Iterator[Document]:
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
                yield read_text("-" if path is None else path, argument=self.argument)

    def _lines(self, file: Iterable[bytes], name: str) -> Iterator[Document]:
        """The texts of JSON lines."""
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"{self.argument}={name!r}, line {number:,}"
            text = self._text_in(line, "utf-8-sig" if number == 1 else "utf-8", place)
            if words_of(text).strip():
                yield text
            else:
                self.left_out += 1

    def _text_in(self, line: bytes, encoding: str, place: str) -> Document:
        field = self.field or FIELDS[0]
        try:
            entry = json.loads(line.decode(encoding))
        except (ValueError, RecursionError) as error:
            raise MultiheadError(
                f"{place} isn't JSON ({error}); expected an object in each line, such as "
                + (PAIR_FORM if self.pairs else f'{{"{field}": "..."}}')
            ) from error
        row = take_row(entry) if self.field is None else None
        if isinstance(row, Example):
            if not all(is_utf8(x) for x in (row, row.target or "")):
                raise MultiheadError(f"{place} {SURROGATE}")
            if not self.pairs or row.target is not None:
                return row
        if self.pairs:
            found = _describe(entry)
            named = [name for name in PAIR if isinstance(entry, dict) and name in entry]
            if len(named) == len(PAIR):
                kinds = (JSON_TYPES.get(type(entry[name]), "null") for name in PAIR)
                found = " and ".join(f"{k} under {n!r}" for n, k in zip(PAIR, kinds, strict=True))
            raise MultiheadError(f"{place} has {found}; expected {PAIR_FORM} in each line")
        if self.field is None and isinstance(entry, dict):
            field = next((name for name in FIELDS if name in entry), field)
        text: Any = entry.get(field) if isinstance(entry, dict) else None
        is_text = isinstance(text, str) or is_conversation(text)
        if isinstance(entry, dict) and field in entry and not is_text:
            raise MultiheadError(
                f"{place} has {JSON_TYPES.get(type(text), 'null')} under {field!r}, not a text"
                f" or a list of messages; {OTHER_FIELD}"
            )
        if not is_text:
            raise MultiheadError(
                f"{place} has no text under {field!r}, but {_describe(entry)}; {OTHER_FIELD}"
            )
        if not isinstance(text, str):
            require_messages(text, f"{place}: {field}")
        if not is_utf8(words_of(text)):
            raise MultiheadError(f"{place}: the text under {field!r} {SURROGATE}")
        document: Document = text
        return document


def _files_of(source: str | Path, argument: str) -> list[tuple[Path | None, bool]]:
    if source == "":  # an unset variable of the shell; as a path it is the current folder
        raise MultiheadError(
            f"{argument}='' is empty; give a file, a folder, or . for the current one"
        )
    if source == "-":
        return [(None, True)]
    path = Path(source).expanduser()
    if not path.exists():
        raise _no_such_file(source, argument)
    if not path.is_dir():
        return [(path, True)]
    files = sorted(
        file
        for file in path.rglob("*")
        if file.suffix.lower() in ENDINGS
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not files:
        raise MultiheadError(
            f"{argument}={str(source)!r} is a folder without text files: expected files in it that"
            f" end in {', '.join(ENDINGS)}; files with other endings are given one by one"
        )
    return [(file, False) for file in files]


def require_pairs(path: Path) -> Path:
    """The path of JSON lines that each have a source and a target; raises for another file.

    Raises:
        FileNotFoundError: no such file.
        MultiheadError: not `.jsonl`, no line, or one without both.
    """
    if path.suffix.lower() != ".jsonl":
        raise MultiheadError(f"pairs='{path}': expected JSON lines, a name that ends in .jsonl")
    if not sum(1 for _ in Documents([path], argument="pairs", pairs=True)):
        raise MultiheadError(f"pairs='{path}' has no line; give at least two, better a hundred")
    return path


def builtin_text() -> str:
    """The text that comes with the built-in model.

    Raises:
        OSError: the installed package lacks it.

    >>> len(builtin_text().split()) > 50
    True
    """
    return (Path(models.__file__).parent / "builtin" / "text.txt").read_text(encoding="utf-8")


def read_text(
    source: str | Path | None = None, *, prompt: str | None = None, argument: str = "text"
) -> str:
    """The text in a UTF-8 file, on standard input (`source` "-"), or `prompt` itself.

    Args:
        argument: the name of the user's argument that gave `source`, for error messages.

    Raises:
        FileNotFoundError: no such file.
        MultiheadError: empty, not UTF-8, a folder, or not exactly one of the two arguments.

    >>> read_text(prompt="the cat")
    'the cat'
    """
    if (source is None) == (prompt is None):
        raise MultiheadError(f"text={source!r} and prompt={prompt!r}: give exactly one of them")
    if prompt is not None:
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise MultiheadError(
                f"prompt={prompt!r} isn't UTF-8 text (at character {error.start}); check your"
                " terminal's encoding, or put the text into a UTF-8 file and give it as text"
            ) from error
        return require_words(prompt, f"prompt={prompt!r}")
    name = f"{argument}={str(source)!r}"
    if source == "-":
        content = sys.stdin.buffer.read()
        name += " (standard input)"
    else:
        path = Path(str(source)).expanduser()
        if path.is_dir():
            raise MultiheadError(f"{name} is a folder; give a text file in it")
        if not path.exists():
            raise _no_such_file(source, argument)
        content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")  # without the byte order mark that some editors write
    except UnicodeDecodeError as error:
        raise MultiheadError(
            f"{name} is not UTF-8 text: byte {error.start:,} is 0x{content[error.start]:02x}. If it"
            " is text in another encoding, convert it, for instance: iconv -f latin1 -t utf8 OLD >"
            " NEW"
        ) from error
    if "\0" in text:
        raise MultiheadError(
            f"{name} is not text: byte {content.index(0):,} is 0. Give plain text in UTF-8."
        )
    return require_words(text, name)


def require_words(text: str, name: str) -> str:
    """The text, or an error where it has no words; `name` names it in the message."""
    if not text.strip():
        raise MultiheadError(f"{name} is empty; give a text with at least one word")
    return text


def _describe(entry: Any) -> str:
    """The names in an object of JSON; of anything else its kind."""
    if isinstance(entry, dict):
        return f"the names {', '.join(map(repr, entry))}" if entry else "an empty object"
    return JSON_TYPES.get(type(entry), "null")


def is_utf8(text: str) -> bool:
    """Whether the text can be written as UTF-8: it has no unpaired surrogate."""
    return text.encode("utf-8", "replace").decode() == text


def describe_sources(sources: Sequence[str | Path], opening: str) -> str:
    """A name for the texts in a table: their sources, and the beginning of the first text.

    >>> describe_sources(["a.txt", "-"], "the  cat")
    'a.txt, standard input: the cat'
    """
    shown = [("standard input" if source == "-" else str(source)) for source in sources[:3]]
    name = ", ".join(shown) + (f" and {len(sources) - 3:,} more" if len(sources) > 3 else "")
    start = " ".join(opening[:200].split())
    return f"{name}: {start[:60]}…" if len(start) > 60 else f"{name}: {start}"


def _no_such_file(source: object, argument: str) -> FileNotFoundError:
    prompt = ", or the text itself as prompt" if argument == "text" else ""
    expected = f"a text file, or - for standard input{prompt}"
    if argument == "pairs":
        expected = "a file of JSON lines"
    return FileNotFoundError(f"{argument}={str(source)!r}: there is no such file; give {expected}")
