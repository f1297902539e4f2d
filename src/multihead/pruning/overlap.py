"""Whether two texts are apart: heads must not be scored on the text that plans are judged on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.sources import Documents
from ..errors import MultiheadError

__all__ = ["different"]

Hashes = NDArray[np.uint64]
PASSAGE = 50  # words that two texts share by copying, not by chance
FACTOR = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
WHY = "heads scored on the text that they are judged on look better than they are"
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")


def different(
    calibrate: Documents | str | Iterable[str], evaluate: Documents | str | Iterable[str]
) -> None:
    """Refuses texts to score heads on and to judge plans on that aren't apart.

    Heads chosen on the text that they are judged on look better than they are. What is refused: the
    same file (under any name), the same document, a passage of 50 words that stands in both. Case,
    spaces and punctuation don't matter; a letter of Chinese or Japanese is a word. The time is
    linear in the texts, `evaluate` is held in memory.

    Args:
        calibrate, evaluate: `Documents`, or texts. Standard input can be read once only: give
            `list(documents)` of it.

    Raises:
        ValueError: naming both places and the passage.

    >>> different("a cat and a dog", "A cat, and a dog.")
    Traceback (most recent call last):
    ...
    multihead.errors.MultiheadError: calibrate[0] and evaluate[0] hold one document, 'a cat and a dog': heads scored ...
    """
    _different_files(calibrate, evaluate)
    held: list[tuple[str, str]] = []
    keys, places = [], []
    for name, text in _named("evaluate", evaluate):
        found = _passages(_word_hashes(text))
        keys.append(found)
        places.append(np.stack([np.full(len(found), len(held)), np.arange(len(found))], 1))
        held.append((name, text))
    if not sum(map(len, keys)):
        return
    order = np.argsort(all_keys := np.concatenate(keys), kind="stable")
    known, place = all_keys[order], np.concatenate(places)[order]
    for name, text in _named("calibrate", calibrate):
        mine = _passages(_word_hashes(text))
        at = np.searchsorted(known, mine).clip(max=len(known) - 1)
        for start in np.flatnonzero(known[at] == mine):
            other, begins = place[at[start]]
            same, passage = _shared(text, int(start), held[other][1], int(begins))
            if same:
                raise MultiheadError(
                    f"{name} and {held[other][0]} hold one {passage}: {WHY}. Give other texts, or"
                    " take it out of one of them"
                )


def _different_files(calibrate: Any, evaluate: Any) -> None:
    files: dict[tuple[int, int], tuple[str, Path]] = {}
    for argument, documents in (("calibrate", calibrate), ("evaluate", evaluate)):
        for path, _ in documents.files if isinstance(documents, Documents) else ():
            if path is None:
                raise MultiheadError(
                    f"{argument} has standard input, which can be read once only: give"
                    " list(documents)"
                )
            stat = path.stat()
            before = files.setdefault((stat.st_dev, stat.st_ino), (argument, path))
            if before[0] != argument:
                raise MultiheadError(
                    f"calibrate='{before[1]}' and evaluate='{path}' are one file: {WHY}. Give"
                    " another one, or split this one in two"
                )


def _named(argument: str, documents: Documents | str | Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each text with the name of its place."""
    if not isinstance(documents, Documents):
        for number, text in enumerate([documents] if isinstance(documents, str) else documents):
            yield f"{argument}[{number}]", text
        return
    for path, named in documents.files:
        assert path is not None
        several = path.suffix.lower() == ".jsonl"
        if named or path.read_bytes().strip():
            for number, text in enumerate(Documents([path], field=documents.field)):
                yield f"{argument}='{path}'" + (f" (text {number + 1:,})" if several else ""), text


def _word_hashes(text: str) -> Hashes:
    return np.array([hash(word) for word in WORD.findall(text.casefold())], np.int64).view(
        np.uint64
    )


def _passages(words: Hashes) -> Hashes:
    """A hash of the passage that begins at each word, modulo 2^64 (Karp and Rabin 1987); of a
    shorter text as a whole.
    """
    length = min(PASSAGE, len(words))
    if not length:
        return words
    factors = np.cumprod(np.full(len(words), FACTOR, np.uint64))
    back = np.cumprod(np.full(len(words), pow(FACTOR, -1, 2**64), np.uint64))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(words * factors)])
    return (sums[length:] - sums[:-length]) * back[: len(words) - length + 1]


def _shared(text: str, start: int, other: str, begins: int) -> tuple[bool, str]:
    """Whether the passages really are alike, how long they go on, and how they begin."""
    mine, theirs = (list(WORD.finditer(t)) for t in (text, other))
    same = 0
    for a, b in zip(mine[start:], theirs[begins:]):
        if a[0].casefold() != b[0].casefold():
            break
        same += 1
    whole = same == len(mine) == len(theirs)
    if not same or (same < PASSAGE and not whole):
        return False, ""
    end = mine[start + min(same, 12) - 1].end()
    shown = " ".join(text[mine[start].start() : end].split()) + ("…" if same > 12 else "")
    return True, f"document, {shown!r}" if whole else f"passage of {same:,} words, {shown!r}"
