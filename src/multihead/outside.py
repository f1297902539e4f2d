"""Text from outside, such as names in a checkpoint or a table, made harmless before it is printed.

A terminal obeys what is printed on it: escape sequences recolour it, write to the clipboard or hide
a link, and direction marks reorder what a reader sees. Every message of an error and everything
that the command prints passes through `clean` or `clean_lines`.
"""

from __future__ import annotations

from typing import Any

__all__ = ["clean", "clean_exception", "clean_lines"]

JOINERS = "\u200c\u200d"  # they hold emoji and letters together, and do nothing else


def clean(text: Any, longest: int | None = None) -> str:
    """One line without control characters, escape sequences or direction marks, of at most
    `longest` characters: the middle of a longer text is left out.

    >>> clean("one\\ntwo \\x1b[2J")
    'one two �[2J'
    >>> clean("x" * 1000, 50)
    'xxxxxxxxxxxxxxxxxxxx ... 965 more ... xxxxxxxxxxxxxxx'
    """
    text = str(text)
    if longest is not None and len(text) > longest:
        first, last = longest * 2 // 5, longest * 3 // 10
        left_out = len(text) - first - last
        text = f"{text[:first]} ... {left_out:,} more ... {text[-last:]}"
    if text.isprintable():
        return text
    return "".join(map(_clean_character, text))


def clean_lines(text: Any) -> str:
    """The same for a text of several lines, which stay lines.

    >>> clean_lines("one\\n  two \\x1b[2J\\n")
    'one\\n  two �[2J\\n'
    """
    return "\n".join(map(clean, str(text).split("\n")))


def clean_exception(error: BaseException) -> BaseException:
    """The same exception, with the texts that it and its causes carry made harmless, so that its
    traceback can be printed.

    >>> clean_exception(ValueError("\\x1b[2J", 3))
    ValueError('�[2J', 3)
    """
    seen: set[int] = set()
    chain = [error]
    while chain:
        found = chain.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        texts = [clean_lines(a) if isinstance(a, str) else a for a in found.args]
        if texts != list(found.args):
            found.args = tuple(texts)
        if isinstance(found, OSError):  # which keeps them apart from its arguments
            for name in ("strerror", "filename", "filename2"):
                if isinstance(getattr(found, name), str):
                    setattr(found, name, clean_lines(getattr(found, name)))
        chain += [e for e in (found.__cause__, found.__context__) if e is not None]
    return error


def _clean_character(c: str) -> str:
    if c.isprintable() or c in JOINERS:
        return c
    return " " if c.isspace() else "\ufffd"
