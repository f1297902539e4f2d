"""The page of a check: as a file, and in a browser without a network."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import multihead
from checks.samples import Separate
from multihead.checks.finding import Finding
from multihead.checks.report import CallWeights, Report
from multihead.report.checked import BUDGET, render_check, write_check_page
from report.test_head_view import weights
from report.test_page import Parsed

HOSTILE = "</script><script>alert(1)</script>\u202e<img src=x>"


def make_report(*calls: CallWeights, **parts: Any) -> Report:
    return Report("Attention", "x with [B, L, D]", read_calls=lambda: list(calls), **parts)


def wrong_report(text: str = "It is 1.", heads: int = 2) -> Report:
    changed = weights(heads)
    changed[:, 1:, 2] = changed[:, 1:, 2].flip(-1)
    finding = Finding(f"a bug{text}", text, text, text, ["the definition", text])
    causal = weights(heads).tril()
    return make_report(
        CallWeights(f"with its inputs alone{text}", changed, weights(heads)),
        CallWeights("with a mask", causal, causal),
        CallWeights("with padding", None, causal, f"no values{text}"),
        CallWeights("with is_causal=True", causal, None, "", f"no definition{text}"),
        findings=[finding],
        passed=[text],
        skipped={text: text},
        unjudged=[text],
        notes=[text],
        known=[Finding("known", text, text, text, known=text)],
    )


def text_of(page: str) -> str:
    body = page.split("<body>")[1].split('<script type="application/json"')[0]
    return " ".join(re.sub(r"<[^>]*>", " ", body).split())


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({}, ["right", "all held", "Exit code 0"]),
        ({"findings": [Finding("a bug", "!", "?", "there")]}, ["wrong", "a bug", "Exit code 1"]),
        ({"unjudged": ["the scale"]}, ["partly judged", "the scale", "Exit code 3"]),
    ],
)
def test_the_verdict_and_what_it_is_made_of(parts: dict[str, Any], words: list[str]) -> None:
    text = text_of(render_check(make_report(**parts)))
    assert all(word in text for word in words), text
    assert ("What is wrong" in text) == ("findings" in parts)
    assert "The report has no weights." in text


def test_every_part_of_a_report_is_on_the_page() -> None:
    report = multihead.check(Separate(scale=1.0))
    text = text_of(render_check(report)).replace("&#39;", "'")
    [finding] = report.findings
    for piece in (
        *(finding.message, finding.example, finding.look, finding.certainty),
        *(report.called, *report.passed, *report.notes),
        "finite outputs : Finite inputs give finite outputs.",
        *(part for pair in report.skipped.items() for part in pair),
        *(f"Called {call.call}" for call in report.calls),
        "4 of 4 heads differ from the definition",
        "Queries read earlier tokens and the token itself",
        *("A as read out", "A of the definition", "difference"),
    ):
        assert " ".join(piece.split()) in text, piece
    assert "They differ first at query 0, key 0" in text
    assert text.count("head 0 . They differ first at query") == len(report.calls)


def test_a_right_one_has_equal_tables() -> None:
    page = render_check(multihead.check(Separate()))
    assert "Equal to the definition&#39;s in all heads and calls" in page
    assert ' first"' not in page and "differ" not in text_of(page).replace(
        "difference", ""
    ).replace("first place where they differ", "")


def test_it_is_one_file_whose_own_script_and_style_alone_may_run() -> None:
    page = render_check(wrong_report())
    parsed = Parsed(page)
    assert "default-src 'none'" in page and "unsafe" not in page
    ids = [a["id"] for _, a in parsed.tags if "id" in a]
    assert len(ids) == len(set(ids))
    for tag, attributes in parsed.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form")
        assert not {"src", "style", "srcset"} & set(attributes)
        assert not any(name.startswith("on") for name in attributes)
        assert attributes.get("href", "#")[0] == "#"
        assert attributes.get("href", "#")[1:] in {"", *ids}
    own = "".join(parsed.blocks["style"] + parsed.blocks["script"])
    assert not re.search(r"url\(|@import|https?:|fetch\(|innerHTML|eval\(", own)


def test_what_comes_from_outside_is_text() -> None:
    report = wrong_report(HOSTILE)
    report.name = report.called = HOSTILE
    page = render_check(report)
    tags = [tag for tag, _ in Parsed(page).tags]
    assert tags.count("script") == 2 and "img" not in tags
    assert "\u202e" not in page
    assert page.count("&lt;/script&gt;&lt;script&gt;alert(1)") > 15


def test_numbers_of_the_data_are_those_that_were_read_out() -> None:
    report = wrong_report()
    data = Parsed(render_check(report)).data
    shown = torch.tensor(data["call0-head1"]["read"], dtype=torch.float64)
    assert report.weights is not None
    torch.testing.assert_close(shown, report.weights[0, 1], rtol=1e-5, atol=1e-9)
    assert data["call2-head0"]["read"] is None and data["call3-head1"]["expected"] is None


def test_a_large_report_stays_within_its_budget_and_keeps_what_differs() -> None:
    a, b = weights(64, 16), weights(64, 16)
    a[0, 60, 3, 3] += 0.1
    report = make_report(*(CallWeights(f"in way {n}", a, b) for n in range(3)))
    page = render_check(report)
    assert 0.8 * BUDGET < len(page.encode()) <= BUDGET
    data = Parsed(page).data
    assert all(f"call{n}-head60" in data for n in range(3)) and 20 < len(data) < 100
    assert page.count("left out to keep the page within 1 MB") == 3 * 64 - len(data)


def test_a_call_of_which_nothing_is_known_has_the_reason_instead_of_tables() -> None:
    page = render_check(make_report(CallWeights("alone", None, None, "no values", "no values")))
    assert text_of(page).count("Not read out: no values.") == 2  # at the top, and in its place
    assert "Head 0" not in page and "<table" not in page


def test_a_readout_that_fails_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from multihead.checks import run

    def fail(*args: Any, **options: Any) -> None:
        raise KeyError("odd <b>")

    monkeypatch.setattr(run, "read_calls", fail)
    report = multihead.check(Separate())
    assert report.ok and report.weights is None
    assert "reading out its weights failed (KeyError: &#39;odd &lt;b&gt;&#39;)" in render_check(
        report
    )


def test_it_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(multihead.MultiheadError, match=r"folder .* doesn't exist"):
        write_check_page(tmp_path / "no" / "page.html", make_report())
    write_check_page(tmp_path / "page.html", make_report(), title="Mine")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert "<h1>Mine</h1>" in (tmp_path / "page.html").read_text("utf-8")


# ---- in a browser


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`show(report, **context)` opens the page; no request, error or dialog may be seen."""
    trouble: list[str] = []
    contexts = []

    def opened(report: Report, at: str = "", **options: Any) -> Any:
        write_check_page(tmp_path / "page.html", report)
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        contexts.append(context)
        context.set_offline(True)
        page = context.new_page()
        page.on("request", lambda r: None if r.url.startswith("file:") else trouble.append(r.url))
        page.on("console", lambda m: trouble.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: trouble.append(str(e)))
        page.on("dialog", lambda d: (trouble.append(d.message), d.dismiss()))
        page.goto((tmp_path / "page.html").as_uri() + at)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert trouble == []


def cell(page: Any, head: str, table: int, row: int, key: int) -> Any:
    grid = page.locator(f"#{head} .matrix").nth(table)
    return grid.locator("tbody tr").nth(row).locator("td").nth(key)


def numbers_in(text: str) -> list[float]:
    return [float(n.replace("−", "-")) for n in re.findall(r"−?\d+(?:\.\d+)?", text)]


def values(report: Report, head: int, row: int, key: int) -> list[float]:
    read, expected = report.calls[0].weights, report.calls[0].expected
    assert isinstance(read, Tensor) and isinstance(expected, Tensor)
    a, b = float(read[0, head, row, key]), float(expected[0, head, row, key])
    return [row, key, a, b, a - b]


def test_pointer_and_arrow_keys_show_the_values(show: Callable[..., Any]) -> None:
    report = wrong_report(HOSTILE)
    page = show(report)
    readout = page.locator("#call0-head1 .readout")
    assert numbers_in(readout.inner_text()) == pytest.approx(values(report, 1, 2, 0), abs=1e-5)
    cell(page, "call0-head1", 0, 3, 4).hover()
    assert numbers_in(readout.inner_text()) == pytest.approx(values(report, 1, 3, 4), abs=1e-5)
    page.mouse.move(0, 0)
    page.locator('#call0-head1 td[tabindex="0"]').nth(1).focus()
    for key in ("ArrowLeft", "ArrowUp", "ArrowUp"):
        page.keyboard.press(key)
    assert numbers_in(readout.inner_text()) == pytest.approx(values(report, 1, 1, 3), abs=1e-5)
    assert page.locator("#call0-head1 td.here").count() == 3
    for _ in range(9):
        page.keyboard.press("ArrowUp")
    assert numbers_in(readout.inner_text())[:2] == [0, 3]
    assert page.locator('#call0-head1 td[tabindex="0"]').count() == 3


def test_a_link_opens_its_head(show: Callable[..., Any]) -> None:
    page = show(wrong_report(heads=8), at="#call1-head7")
    assert cell(page, "call1-head7", 0, 0, 0).is_visible()
    assert not cell(page, "call1-head6", 0, 0, 0).is_visible()
    page.locator('.chips a[href="#call1-head6"]').click()
    assert cell(page, "call1-head6", 0, 0, 0).is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_it_fits_its_window_in_both_schemes(
    show: Callable[..., Any], width: int, scheme: str
) -> None:
    viewport = {"width": width, "height": 800}
    page = show(wrong_report(HOSTILE), viewport=viewport, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    colours = page.evaluate(
        """[...document.querySelectorAll("#call0-head0 td")].map((c) =>
        getComputedStyle(c).backgroundColor)"""
    )
    assert len(set(colours)) > 5
    ink, paper = page.evaluate(
        "((s) => [s.color, s.backgroundColor])(getComputedStyle(document.body))"
    )
    light = [sum(map(int, colour[4:-1].split(", "))) for colour in (ink, paper)]
    assert (light[0] < light[1]) == (scheme == "light")


def test_without_a_script_the_tables_are_there(show: Callable[..., Any]) -> None:
    page = show(wrong_report(), java_script_enabled=False)
    read = cell(page, "call0-head1", 0, 2, 0)
    assert read.is_visible() and re.fullmatch(r"0\.\d\d", read.inner_text())
    assert not page.locator(".readout").first.is_visible()
    assert page.locator(".first").count() == 3
