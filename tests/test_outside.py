"""Text from outside is one harmless line, or harmless lines, and never longer than asked."""

from __future__ import annotations

import traceback

import pytest

from multihead.errors import LONGEST, MultiheadError, ReadingError
from multihead.outside import clean, clean_exception, clean_lines

HOSTILE = {
    "colour": "\x1b[31mred",
    "CSI of one byte": "\x9b2J",
    "title": "\x1b]0;title\x07",
    "link": "\x1b]8;;http://evil\x1b\\here\x1b]8;;\x1b\\",
    "clipboard": "\x1b]52;c;ZXZpbA==\x07",
    "bell": "a\x07b",
    "backspace": "good\b\b\b\bevil",
    "carriage return": "good\revil",
    "direction": "abc\u202edcba\u2066x\u2069",
    "NUL": "a\x00b",
    "lines": "a\nb\u2028c\u2029d\x0be\x0cf\x85g",
    "zero width": "a\u200bb\ufeffc",
    "surrogate": "a\ud800b",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=list(HOSTILE))
def test_clean_text_is_one_printable_line(text: str) -> None:
    assert clean(text).isprintable() and len(clean(text)) == len(text)
    assert all(line.isprintable() for line in clean_lines(text).split("\n"))


def test_clean_leaves_one_line_without_control_characters() -> None:
    assert clean("a\nb\x1b[2J\x07") == "a b\ufffd[2J\ufffd"


def test_letters_of_all_scripts_and_joined_emoji_stay_whole() -> None:
    for text in (
        "naïve 日本語 עברית हिन्दी",
        "👩\u200d👩\u200d👧",
        "👍🏽",
        "می\u200cخواهم",
        "❤\ufe0f",
    ):
        assert clean(text) == text
        assert clean_lines(f"{text}\n{text}") == f"{text}\n{text}"


def test_the_middle_of_a_long_text_is_left_out() -> None:
    text = clean("begin " + "x" * 10_000_000 + " end", 100)
    assert len(text) < 120 and text.startswith("begin ") and text.endswith(" end")
    assert " more ... " in text
    assert clean("x" * 100, 100) == "x" * 100


def test_messages_of_errors_are_clean_and_short() -> None:
    for kind in (MultiheadError, ReadingError):
        error = kind("site \x1b[31m\nfails " + "x" * 10_000_000 + " take another")
        assert str(error).isprintable() and len(str(error)) < LONGEST
        assert str(error).startswith("site ") and str(error).endswith(" take another")


def test_a_traceback_shows_clean_causes() -> None:
    try:
        try:
            raise OSError(5, "\x1b]52;c;x\x07")
        except OSError as inner:
            raise KeyError("\x1b[31m") from inner
    except KeyError as outer:
        printed = "".join(traceback.format_exception(clean_exception(outer)))
    assert "\x1b" not in printed and "\x07" not in printed


def test_causes_that_go_in_a_circle_end() -> None:
    error = ValueError("\x1b")
    error.__cause__ = cause = ValueError("\x1b")
    cause.__cause__ = error
    assert str(clean_exception(error)) == "\ufffd"
