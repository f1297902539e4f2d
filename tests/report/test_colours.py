"""Colours as rules of style: both schemes, and text that is legible on each."""

from __future__ import annotations

import re

from multihead.report.colours import LEVELS, colour_rules, level

RULE = re.compile(r"\.([abc])(\d+)\{background:#(\w{6});color:#(\w{6})\}")


def luminance(colour: str) -> float:
    linear = [(int(colour[n : n + 2], 16) / 255) ** 2.2 for n in (0, 2, 4)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_every_level_has_a_colour_and_text_of_some_contrast_in_both_schemes() -> None:
    light, dark = (RULE.findall(part) for part in colour_rules().split("@media"))
    assert {(letter, int(n)) for letter, n, *_ in light} == {
        (letter, n) for letter in "abc" for n in range(LEVELS + 1)
    }
    assert len(light) == len(dark) == 3 * (LEVELS + 1)
    for letter, n, background, text in (*light, *dark):
        a, b = sorted((luminance(background), luminance(text)))
        assert (b + 0.05) / (a + 0.05) > 3.5, (letter, n)
    weights = [luminance(background) for letter, _, background, _ in light if letter == "c"]
    assert weights == sorted(weights, reverse=True)


def test_levels_are_even_and_never_beyond_the_scale() -> None:
    assert [level(n / LEVELS) for n in range(LEVELS + 1)] == list(range(LEVELS + 1))
    assert level(-1.0) == 0 and level(7.0) == LEVELS
