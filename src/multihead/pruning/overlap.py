"""Check that two sets of texts are disjoint: heads must not be scored on the text on which plans
are judged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..data.documents import Document, each_document, words_of
from ..data.sources import Documents
from ..errors import MultiheadError

__all__ = ["require_disjoint"]

PASSAGE = 50  # words that two texts share by copying, not by chance
SHOWN = 12  # words of a passage in the message
WHY = "heads scored on the text that they are judged on look better than they are"
# a letter of Chinese or Japanese is a word
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")
Texts = Documents | Document | Iterable[Document]


def require_disjoint(calibrate: Texts, evaluate: Texts) -> None:
    """Raise if texts to score heads on and texts to judge plans on overlap: the same file (under
    any name), the same document, or a passage of 50 words in both.

    Case, spaces and punctuation don't matter. The time is linear in the texts, of which `evaluate`
    is kept in memory.

    Args:
        calibrate, evaluate: `Documents`, or texts. Standard input can be read once only: give
            `list(documents)` of it.

    Raises:
        MultiheadError: names both places and the passage.

    >>> require_disjoint("a cat and a dog", "A cat, and a dog.")
    Traceback (most recent call last):
    ...
    multihead.errors.MultiheadError: calibrate[0] and evaluate[0] hold one document, 'a cat and a
    dog': heads scored ...
    """
    _require_other_files(calibrate, evaluate)
    kept = [(name, _words(text)) for name, text in _named_texts("evaluate", evaluate)]
    hashes = {value for _, words in kept for value in _window_hashes(words)}
    for name, text in _named_texts("calibrate", calibrate):
        words = _words(text)
        for start, value in enumerate(_window_hashes(words)):
            if value not in hashes:
                continue
            for other_name, other in kept:
                length = _shared_length(words, start, other)
                if length:
                    what = _describe(text, start, length, len(words) == len(other) == length)
                    raise MultiheadError(
                        f"{name} and {other_name} hold one {what}: {WHY}. Give other texts, or take"
                        " it out of one of them"
                    )


def _words(text: str) -> list[str]:
    return WORD.findall(text.casefold())


def _window_hashes(words: list[str]) -> Iterator[int]:
    """A hash of the passage that begins at each word; of a shorter text as a whole."""
    size = min(PASSAGE, len(words))
    for start in range(len(words) - size + 1 if size else 0):
        yield hash(tuple(words[start : start + size]))


def _shared_length(words: list[str], start: int, other: list[str]) -> int:
    """Length of the passage from `start` that `other` has too: at least 50 words, or the whole of
    both; else 0.
    """
    passage = words[start : start + PASSAGE]
    if len(passage) < PASSAGE:
        return len(words) if words == other else 0
    for begin in range(len(other) - PASSAGE + 1):
        if other[begin] == passage[0] and other[begin : begin + PASSAGE] == passage:
            pairs = list(zip(words[start:], other[begin:]))
            return next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return 0


def _describe(text: str, start: int, length: int, is_document: bool) -> str:
    matches = list(WORD.finditer(text))[start : start + min(length, SHOWN)]
    shown = " ".join(text[matches[0].start() : matches[-1].end()].split())
    shown += "…" if length > SHOWN else ""
    return f"document, {shown!r}" if is_document else f"passage of {length:,} words, {shown!r}"


def _require_other_files(calibrate: Any, evaluate: Any) -> None:
    files: dict[tuple[int, int], tuple[str, Path]] = {}
    for argument, documents in (("calibrate", calibrate), ("evaluate", evaluate)):
        for path, _ in documents.files if isinstance(documents, Documents) else ():
            if path is None:
                raise MultiheadError(
                    f"{argument} has standard input, which can be read once only: give"
                    " list(documents)"
                )
            stat = path.stat()
            first = files.setdefault((stat.st_dev, stat.st_ino), (argument, path))
            if first[0] != argument:
                raise MultiheadError(
                    f"calibrate='{first[1]}' and evaluate='{path}' are one file: {WHY}. Give"
                    " another one, or split this one in two"
                )


def _named_texts(argument: str, documents: Texts) -> Iterator[tuple[str, str]]:
    """Each text with the name of its place."""
    if not isinstance(documents, Documents):
        for number, text in enumerate(each_document(documents)):
            yield f"{argument}[{number}]", words_of(text)
        return
    for path, is_named in documents.files:
        assert path is not None
        has_several = path.suffix.lower() == ".jsonl"
        if is_named or path.read_bytes().strip():
            for number, text in enumerate(Documents([path], field=documents.field)):
                yield (
                    f"{argument}='{path}'" + (f" (text {number + 1:,})" if has_several else ""),
                    words_of(text),
                )
