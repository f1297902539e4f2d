"""`colour_rules`: the colour scales of `page.css` as classes, for pages that need colours without a
script: a content policy that allows no style in the page allows none in an element either.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from .frame import read_web_file

LEVELS = 24  # of a scale: `c0` to `c24` from its lowest to its highest value
Colour = tuple[float, ...]


def colour_rules() -> str:
    """Rules of style: `.c0` to `.c24` on the ramp of weights, `.a0` to `.a24` above zero and `.b0`
    to `.b24` below zero on the scale of differences, in both colour schemes.

    >>> colour_rules().splitlines()[0]
    '.c0{background:#f3f8f4;color:#16181c}'
    """
    light, dark = (list(_classes(n)) for n in (0, 1))
    changed = "\n".join(rule for rule, other in zip(dark, light, strict=True) if rule != other)
    return "\n".join(light) + f"\n@media (prefers-color-scheme: dark){{\n{changed}\n}}\n"


def level(share: float) -> int:
    """The level of a share of the scale's highest value.

    >>> level(0.0), level(0.5), level(2.0)
    (0, 12, 24)
    """
    return round(LEVELS * min(1.0, max(0.0, share)))


def _classes(scheme: int) -> Iterable[str]:
    ramp, below, zero, above = (_stops(name, scheme) for name in ("ramp", "below", "zero", "above"))
    for letter, stops in {"c": ramp, "a": zero + above, "b": zero + below}.items():
        for n in range(LEVELS + 1):
            at = n / LEVELS * (len(stops) - 1)
            low = min(int(at), len(stops) - 2)
            yield _rule(f".{letter}{n}", _blend(stops[low], stops[low + 1], at - low))


def _stops(name: str, scheme: int) -> list[Colour]:
    """The colours of a variable of `page.css`, of the light scheme (0) or the dark one (1)."""
    found = re.findall(rf"--{name}: ([^;]+);", read_web_file("page.css"))[scheme]
    return [tuple(int(c[n : n + 2], 16) for n in (1, 3, 5)) for c in found.split(", ")]


def _blend(a: Colour, b: Colour, share: float) -> Colour:
    return tuple(x + (y - x) * share for x, y in zip(a, b, strict=True))


def _rule(selector: str, colour: Colour) -> str:
    """The background, and the colour of text that is legible on it."""
    r, g, b = ((value / 255) ** 2.2 for value in colour)
    ink = "#16181c" if 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.2 else "#f6f7f8"
    background = "".join(f"{round(value):02x}" for value in colour)
    return f"{selector}{{background:#{background};color:{ink}}}"
