"""CoNLL-U files: sentences of words, each with the word that it depends on and the name of that
relation.

The format is https://universaldependencies.org/format.html. Of its ten columns ID, FORM, HEAD,
DEPREL and SpaceAfter=No in MISC are read. What a file says wrongly is refused with the line: a
reading that takes a wrong tree for a right one gives numbers that look like any others.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, NoReturn

from ..errors import MultiheadError

COLUMNS = ("ID", "FORM", "LEMMA", "UPOS", "XPOS", "FEATS", "HEAD", "DEPREL", "DEPS", "MISC")
DEPREL = re.compile(
    r"(?!all\b)[a-z]+(:[a-z]+)*"
)  # "nsubj", "nsubj:pass"; "all" is what all of them together are called
NUMBER = re.compile(r"0|[1-9][0-9]{0,5}")
RANGE = re.compile(r"([1-9][0-9]{0,5})-([1-9][0-9]{0,5})")
EMPTY = re.compile(r"(0|[1-9][0-9]{0,5})\.([1-9][0-9]{0,5})")


@dataclass(frozen=True)
class Word:
    """A word of a sentence, and the letters `text[start:stop]` that it stands on.

    The words of a multiword token have letters of their own where their forms, joined, are the
    token ("do" and "n't" of "don't"); else each has all of it ("de" and "le" of "du").
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


class _Token(NamedTuple):
    """A multiword token whose words are still to come."""

    first: int  # number of its first word
    last: int
    line: int
    start: int  # where its letters begin
    misc: str


@dataclass
class _Open:
    """A sentence as its lines come in."""

    line: int
    given: str | None = None  # of "# text = "
    given_line: int = 0
    text: str = ""
    words: list[Word] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)  # of the words
    token: _Token | None = None  # around the next words
    empty: int = 0  # empty nodes since the last word


def read_conllu(path: str | os.PathLike[str]) -> list[Sentence]:
    """The sentences of a CoNLL-U file.

    Multiword tokens (1-2) give their words the letters to stand on; empty nodes (1.1) are passed
    over, as no letters belong to them. A tree must have one root and no cycle, and `# text = `,
    where it is given, must be what the words say.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not UTF-8, empty, or not CoNLL-U; names the file, the line, the value and what
            was expected.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"path={str(path)!r}: there is no such file; give a CoNLL-U file")
    if Path(path).is_dir():
        raise MultiheadError(f"path={str(path)!r} is a folder; give a CoNLL-U file in it")
    return parse_conllu(Path(path).read_bytes(), str(path))


def parse_conllu(content: bytes, name: str = "text") -> list[Sentence]:
    """The sentences of a CoNLL-U file's bytes; `name` is what an error calls the file.

    >>> tree = b"1\\tCats\\t_\\t_\\t_\\t_\\t2\\tnsubj\\t_\\t_\\n2\\tsleep\\t_\\t_\\t_\\t_\\t0\\troot\\t_\\t_\\n"
    >>> [(word.form, word.head, word.deprel) for word in parse_conllu(tree)[0].words]
    [('Cats', 2, 'nsubj'), ('sleep', 0, 'root')]
    """
    try:
        text = content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        _refuse(
            name,
            content.count(b"\n", 0, error.start) + 1,
            f"byte 0x{content[error.start]:02x} isn't UTF-8; "
            "convert the file, for instance: iconv -f latin1 -t utf8 OLD > NEW",
        )
    found: list[Sentence] = []
    now: _Open | None = None
    number = 0
    for number, row in enumerate(
        text.split("\n"), 1
    ):  # not splitlines: a form may hold what that takes for a line's end
        line = row.removesuffix("\r")
        if not line:
            if now is not None:
                found.append(_close(name, now))
            now = None
            continue
        now = now or _Open(number)
        if line.startswith("#"):
            _comment(name, number, line, now)
        else:
            _row(name, number, line, now)
    if now is not None:
        found.append(_close(name, now))
    if not found:
        _refuse(
            name,
            number,
            "the file ends without a sentence; expected CoNLL-U: ten columns a word, an empty line"
            " after each sentence",
        )
    return found


def _refuse(name: str, line: int, what: str) -> NoReturn:
    raise MultiheadError(f"{name}, line {line}: {what}")


def _comment(name: str, number: int, line: str, now: _Open) -> None:
    if now.words or now.token:
        _refuse(
            name,
            number,
            f"the comment {_short(line)} stands among the words of a sentence; put comments before"
            " the first word, and an empty line between sentences",
        )
    key, equals, value = line[1:].partition("=")
    if key.strip() == "text" and equals:
        if now.given is not None:
            _refuse(
                name,
                number,
                f"text is given a second time, after line {now.given_line}; expected once a"
                " sentence, and an empty line between sentences",
            )
        now.given, now.given_line = value.strip(), number


def _row(name: str, number: int, line: str, now: _Open) -> None:
    """One word, multiword token or empty node."""
    fields = line.split("\t")
    if len(fields) != len(COLUMNS):
        why = (
            "; its columns stand apart by spaces, make them tabs"
            if len(line.split()) >= 10 and len(fields) == 1
            else ""
        )
        _refuse(
            name,
            number,
            f"{_short(line)} has {len(fields)} column{'s' * (len(fields) > 1)}, expected"
            f" {len(COLUMNS)} with a tab between: {' '.join(COLUMNS)}{why}",
        )
    for column, value in zip(COLUMNS, fields, strict=True):
        if value != value.strip() or not value:
            _refuse(
                name,
                number,
                f"{column} is {_short(value)}, expected something without spaces around it, or _"
                " for nothing",
            )
    id_, form, head, deprel, misc = fields[0], fields[1], fields[6], fields[7], fields[9]
    count = len(now.words)
    if match := EMPTY.fullmatch(id_):
        if (int(match[1]), int(match[2])) != (count, now.empty + 1):
            _refuse(
                name,
                number,
                f"ID is {id_!r} after word {count}, expected {count}.{now.empty + 1} for the next"
                " empty node",
            )
        now.empty += 1
    elif match := RANGE.fullmatch(id_):
        first, last = int(match[1]), int(match[2])
        if now.token is not None or first != count + 1 or last <= first:
            inside = f" inside the multiword token of line {now.token.line}" if now.token else ""
            _refuse(
                name,
                number,
                f"ID is {id_!r} after word {count}{inside}; expected a multiword token to begin at"
                " the next word, to hold two words or more, and to share none with another",
            )
        now.token = _Token(first, last, number, len(now.text), misc)
        now.text += form
    else:
        if id_ != str(count + 1):
            _refuse(
                name,
                number,
                f"ID is {_short(id_)}, expected {count + 1}: the words of a sentence are counted 1,"
                " 2, 3, with an empty line between sentences",
            )
        if not NUMBER.fullmatch(head):
            _refuse(
                name,
                number,
                f"HEAD is {_short(head)}, expected the number of the word that {_short(form)}"
                " depends on, or 0 for the root; relations can't be read from words without a"
                " tree",
            )
        if not DEPREL.fullmatch(deprel):
            _refuse(
                name,
                number,
                f"DEPREL is {_short(deprel)}, expected a relation in small letters, like nsubj or"
                " nsubj:pass",
            )
        if (head == "0") != (deprel.partition(":")[0] == "root"):
            _refuse(
                name,
                number,
                f"HEAD is {head} and DEPREL is {deprel!r}; expected root where HEAD is 0, and only"
                " there",
            )
        now.empty = 0
        now.lines.append(number)
        start = now.token.start if now.token else len(now.text)
        if now.token is None:
            now.text += form
        now.words.append(Word(form, int(head), deprel, start, len(now.text)))
        if now.token is None:
            now.text += _space(misc)
        elif len(now.words) == now.token.last:
            _share_letters(now, now.token)


def _share_letters(now: _Open, token: _Token) -> None:
    """The last word of a multiword token has come: each word its own letters, where the forms give
    them.
    """
    words = now.words[token.first - 1 :]
    if "".join(word.form for word in words) == now.text[token.start :]:
        start = token.start
        for n, word in enumerate(words, token.first - 1):
            now.words[n] = replace(word, start=start, stop=start + len(word.form))
            start += len(word.form)
    now.text += _space(token.misc)
    now.token = None


def _space(misc: str) -> str:
    return "" if "SpaceAfter=No" in misc.split("|") else " "


def _close(name: str, now: _Open) -> Sentence:
    """The sentence is whole: is it a tree, and does it say its text?"""
    if now.token is not None:
        _refuse(
            name,
            now.token.line,
            f"the multiword token ends with word {now.token.last}, but the sentence ends with word "
            f"{len(now.words)}; expected all its words after it",
        )
    count = len(now.words)
    if not count:
        _refuse(
            name,
            now.line,
            "a sentence without words; expected comments to stand before the first word of a"
            " sentence, without an empty line between",
        )
    for n, (word, line) in enumerate(zip(now.words, now.lines, strict=True), 1):
        if word.head > count or word.head == n:
            _refuse(
                name,
                line,
                f"HEAD is {word.head}, expected another word of the sentence, 1 to {count}, or 0"
                " for the root",
            )
    roots = [line for word, line in zip(now.words, now.lines, strict=True) if word.head == 0]
    if len(roots) > 1:
        _refuse(
            name,
            roots[1],
            f"HEAD is 0 as in line {roots[0]}; expected one root a sentence, and an empty line"
            " between sentences",
        )
    safe = {0}  # words from which the heads lead to the root
    for n, line in enumerate(now.lines, 1):
        path: dict[int, None] = {}  # in order, and found quickly
        here = n
        while here not in safe:
            if here in path:
                cycle = " -> ".join(map(str, [*list(path)[list(path).index(here) :][:20], here]))
                _refuse(
                    name,
                    line,
                    f"HEAD goes round in a circle ({cycle}); expected every word to lead to the"
                    " root, HEAD 0",
                )
            path[here] = None
            here = now.words[here - 1].head
        safe.update(path)
    text = now.text.rstrip(" ")
    if now.given is not None and now.given != text:
        at = next(
            (n for n, (a, b) in enumerate(zip(now.given, text)) if a != b),
            min(len(now.given), len(text)),
        )
        _refuse(
            name,
            now.given_line,
            f"text says {_short(now.given[at:])} where the words say {_short(text[at:])} (letter "
            f"{at + 1}); expected the same: check FORM, and SpaceAfter=No in MISC",
        )
    return Sentence(text, tuple(now.words), now.line)


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
