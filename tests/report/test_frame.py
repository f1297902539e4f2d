"""The frame that all pages share."""

from __future__ import annotations

import json

from multihead.report.frame import Frame, as_json, read_web_file
from report.test_page import Parsed

HOSTILE = "</script><script>alert(1)</script>"


def frame(title: str = "a title", style: str = "") -> Frame:
    return Frame(
        "check.html.jinja",
        ("common.js",),
        style=style,
        title=title,
        verdict={"style": "good", "mark": "", "name": "", "summary": "", "code": 0},
        **dict.fromkeys(("called", "weights", "budget"), ""),
        **dict.fromkeys(("sections", "findings", "before", "after", "calls", "places"), ()),
        levels=24,
        small=12,
    )


def test_the_size_is_that_of_the_page_without_its_data() -> None:
    data = {"a": [1.5, None], "b": HOSTILE}
    page = frame().render(data)
    assert len(page.encode()) == frame().size + len(as_json(data).encode())
    assert Parsed(page).data == data


def test_further_style_is_allowed_by_the_policy_and_comes_after_that_of_all_pages() -> None:
    [style] = Parsed(frame(style=".more{color:red}").render({})).blocks["style"]
    assert style == read_web_file("page.css") + ".more{color:red}"


def test_what_comes_from_outside_is_escaped() -> None:
    page = frame(title=HOSTILE).render({"b": HOSTILE})
    assert page.count("<script") == 2 and HOSTILE not in page
    assert json.loads(as_json({"b": HOSTILE})) == {"b": HOSTILE}
