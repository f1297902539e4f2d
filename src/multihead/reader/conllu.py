"""CoNLL-U files: sentences of words, each with its head and the dependency relation to it.

The format is https://universaldependencies.org/format.html. The `conllu` library parses the fields
of a row; of the ten columns ID, FORM, HEAD, DEPREL and SpaceAfter=No in MISC are used. It accepts
broken trees, so the numbering, the tree and the text of a sentence are checked here, and errors
name the line: a wrong tree would give results that look like any others.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from conllu.exceptions import ParseException
from conllu.parser import parse_comment_line, parse_line

from ..errors import MultiheadError
from ..io import read_regular_file

COLUMNS = ("ID", "FORM", "LEMMA", "UPOS", "XPOS", "FEATS", "HEAD", "DEPREL", "DEPS", "MISC")
FIELDS = [column.lower() for column in COLUMNS]
PARSED = ("id", "head", "misc")  # other fields stay as they are
# "nsubj", "nsubj:pass"; "all" is the name of all relations together
DEPREL = re.compile(r"(?!all\b)[a-z]+(:[a-z]+)*")


@dataclass(frozen=True)
class Word:
    """A word of a sentence, at the characters `text[start:stop]`.

    The words of a multiword token are at their own characters where their forms, joined, are the
    token ("do" and "n't" of "don't"); else each is at all of them ("de" and "le" of "du").
    """

    form: str
    head: int  # number of the word that it depends on, from 1; 0 for the root
    deprel: str
    start: int
    stop: int


@dataclass(frozen=True)
class Sentence:
    text: str
    words: tuple[Word, ...]
    line: int  # where it begins in the file, from 1


def read_conllu(path: str | os.PathLike[str]) -> list[Sentence]:
    """The sentences of a CoNLL-U file.

    Multiword tokens (1-2) give their words their characters; empty nodes (1.1) are skipped, as they
    have none. A tree must have one root and no cycle, and a `# text = ` comment must be what the
    words spell.

    Raises:
        FileNotFoundError: no such file.
        MultiheadError: not UTF-8, empty, or not CoNLL-U; names the file, the line, the value and
            what was expected.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"path={str(path)!r}: there is no such file; give a CoNLL-U file")
    if Path(path).is_dir():
        raise MultiheadError(f"path={str(path)!r} is a folder; give a CoNLL-U file in it")
    return parse_conllu(read_regular_file(path, f"path={str(path)!r}"), str(path))


def parse_conllu(content: bytes, name: str = "text") -> list[Sentence]:
    """The sentences of a CoNLL-U file's bytes; `name` is how an error refers to the file.

    >>> rows = "1 Cats _ _ _ _ 2 nsubj _ _", "2 sleep _ _ _ _ 0 root _ _"
    >>> tree = "".join(row.replace(" ", "\\t") + "\\n" for row in rows).encode()
    >>> [(word.form, word.head, word.deprel) for word in parse_conllu(tree)[0].words]
    [('Cats', 2, 'nsubj'), ('sleep', 0, 'root')]
    """
    try:
        text = content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise MultiheadError(
            f"{name}, line {number}: byte 0x{content[error.start]:02x} isn't UTF-8; convert the"
            " file, for instance: iconv -f latin1 -t utf8 OLD > NEW"
        ) from None
    sentences: list[Sentence] = []
    parser: _SentenceParser | None = None
    lines = text.split("\n")  # not splitlines: a form may contain what that takes for a line's end
    for number, line in enumerate([*lines, ""], 1):
        line = line.removesuffix("\r")
        if line:
            parser = parser or _SentenceParser(name, number)
            parser.read_line(number, line)
        elif parser is not None:
            sentences.append(parser.finish())
            parser = None
    if not sentences:
        raise MultiheadError(
            f"{name}, line {len(lines)}: the file ends without a sentence; expected CoNLL-U: ten"
            " columns a word, an empty line after each sentence"
        )
    return sentences


class _MultiwordToken(NamedTuple):
    """A multiword token whose words follow."""

    first: int  # number of its first word
    last: int
    line: int
    start: int  # of its characters
    space: str  # after it


class _SentenceParser:
    """One sentence, line by line."""

    def __init__(self, file: str, line: int) -> None:
        self.file, self.line = file, line
        self.text = ""
        self.words: list[Word] = []
        self.lines: list[int] = []  # of the words
        self.comment: tuple[str, int] | None = None  # "# text = " and its line
        self.token: _MultiwordToken | None = None
        self.empty_nodes = 0  # since the last word

    def require(self, condition: object, line: int, problem: str) -> None:
        if not condition:
            raise MultiheadError(f"{self.file}, line {line}: {problem}")

    def read_line(self, number: int, line: str) -> None:
        if line.startswith("#"):
            self._read_comment(number, line)
            return
        fields = line.split("\t")
        self._require_fields(number, line, fields)
        row = {name: _parse_field(name, value) for name, value in zip(FIELDS, fields, strict=True)}
        space = "" if (row["misc"] or {}).get("SpaceAfter") == "No" else " "
        count = len(self.words)
        match row["id"]:
            case (before, ".", node):
                self.require(
                    (before, node) == (count, self.empty_nodes + 1),
                    number,
                    f"ID is {fields[0]!r} after word {count}, expected"
                    f" {count}.{self.empty_nodes + 1} for the next empty node",
                )
                self.empty_nodes += 1
            case (first, _, last):
                inside = ""
                if self.token:
                    inside = f" inside the multiword token of line {self.token.line}"
                self.require(
                    self.token is None and count + 1 == first < last,
                    number,
                    f"ID is {fields[0]!r} after word {count}{inside}; expected a multiword token"
                    " to begin at the next word, to hold two words or more, and to share none"
                    " with another",
                )
                self.token = _MultiwordToken(first, last, number, len(self.text), space)
                self.text += row["form"]
            case id_:
                self.require(
                    id_ == count + 1,
                    number,
                    f"ID is {_shorten(fields[0])}, expected {count + 1}: the words of a sentence"
                    " are numbered 1, 2, 3, with an empty line between sentences",
                )
                self._read_word(number, row, fields[6], space)

    def _read_comment(self, number: int, line: str) -> None:
        self.require(
            not self.words and not self.token,
            number,
            f"the comment {_shorten(line)} is among the words of a sentence; put comments before"
            " the first word, and an empty line between sentences",
        )
        for key, value in parse_comment_line(line):
            if key == "text":
                before = self.comment[1] if self.comment else 0
                self.require(
                    not before,
                    number,
                    f"text is given a second time, after line {before}; expected once a sentence,"
                    " and an empty line between sentences",
                )
                self.comment = value or "", number

    def _require_fields(self, number: int, line: str, fields: list[str]) -> None:
        spaced = len(fields) == 1 and len(line.split()) >= 10
        self.require(
            len(fields) == len(COLUMNS),
            number,
            f"{_shorten(line)} has {len(fields)} column{'s' * (len(fields) > 1)}, expected"
            f" {len(COLUMNS)} with a tab between: {' '.join(COLUMNS)}"
            + ("; its columns are separated by spaces, use tabs" if spaced else ""),
        )
        for column, value in zip(COLUMNS, fields, strict=True):
            self.require(
                value == value.strip() != "",
                number,
                f"{column} is {_shorten(value)}, expected something without spaces around it,"
                " or _ for nothing",
            )

    def _read_word(self, number: int, row: dict[str, Any], head: str, space: str) -> None:
        form, deprel = row["form"], row["deprel"]
        self.require(
            isinstance(row["head"], int) and row["head"] >= 0,
            number,
            f"HEAD is {_shorten(head)}, expected the number of the word that {_shorten(form)}"
            " depends on, or 0 for the root; relations can't be read from words without a tree",
        )
        self.require(
            DEPREL.fullmatch(deprel),
            number,
            f"DEPREL is {_shorten(deprel)}, expected a relation in lower case, such as nsubj"
            " or nsubj:pass",
        )
        self.require(
            (head == "0") == (deprel.partition(":")[0] == "root"),
            number,
            f"HEAD is {head} and DEPREL is {deprel!r}; expected root where HEAD is 0,"
            " and only there",
        )
        self.empty_nodes = 0
        self.lines.append(number)
        start = self.token.start if self.token else len(self.text)
        if self.token is None:
            self.text += form
        self.words.append(Word(form, row["head"], deprel, start, len(self.text)))
        if self.token is None:
            self.text += space
        elif len(self.words) == self.token.last:
            self._close_token(self.token)

    def _close_token(self, token: _MultiwordToken) -> None:
        """Its last word was read: each word gets its own characters, if the forms spell them."""
        words = self.words[token.first - 1 :]
        if "".join(word.form for word in words) == self.text[token.start :]:
            start = token.start
            for n, word in enumerate(words, token.first - 1):
                self.words[n] = replace(word, start=start, stop=start + len(word.form))
                start += len(word.form)
        self.text += token.space
        self.token = None

    def finish(self) -> Sentence:
        """The sentence is complete: check that it is a tree, and its text."""
        count = len(self.words)
        if self.token is not None:
            self.require(
                False,
                self.token.line,
                f"the multiword token ends with word {self.token.last}, but the sentence ends with"
                f" word {count}; expected all its words after it",
            )
        self.require(
            count,
            self.line,
            "a sentence without words; expected comments before the first word of a sentence,"
            " without an empty line between",
        )
        self._require_tree()
        text = self.text.rstrip(" ")
        if self.comment is not None and self.comment[0] != text:
            given, line = self.comment
            same = [a == b for a, b in zip(given, text)]
            first = [*same, False].index(False)
            self.require(
                False,
                line,
                f"text has {_shorten(given[first:])} where the words have"
                f" {_shorten(text[first:])} (character {first + 1}); expected the same: check FORM,"
                " and SpaceAfter=No in MISC",
            )
        return Sentence(text, tuple(self.words), self.line)

    def _require_tree(self) -> None:
        count = len(self.words)
        roots = []
        for n, (word, line) in enumerate(zip(self.words, self.lines, strict=True), 1):
            self.require(
                word.head <= count and word.head != n,
                line,
                f"HEAD is {word.head}, expected another word of the sentence, 1 to {count},"
                " or 0 for the root",
            )
            roots += [line] if word.head == 0 else []
        if len(roots) > 1:
            self.require(
                False,
                roots[1],
                f"HEAD is 0 as in line {roots[0]}; expected one root a sentence, and an empty line"
                " between sentences",
            )
        rooted = {0}  # words from which the heads lead to the root
        for n, line in enumerate(self.lines, 1):
            path: dict[int, None] = {}  # an ordered set
            here = n
            while here not in rooted:
                if here in path:
                    cycle = list(path)[list(path).index(here) :][:20]
                    self.require(
                        False,
                        line,
                        f"HEAD leads round a cycle ({' -> '.join(map(str, [*cycle, here]))});"
                        " expected every word to lead to the root, HEAD 0",
                    )
                path[here] = None
                here = self.words[here - 1].head
            rooted.update(path)


def _parse_field(name: str, value: str) -> Any:
    """A field as the library parses it; None for what isn't one. ID is a number, (1, "-", 2) for a
    multiword token or (1, ".", 1) for an empty node.
    """
    if name not in PARSED:
        return value
    try:
        return parse_line(f"{value}\t", [name])[name]
    except (ParseException, ValueError):  # a number of thousands of digits is a ValueError
        return None


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
