"""The page in a real browser, opened from disk with the network cut off."""

from __future__ import annotations

import os
import shutil
import warnings
from dataclasses import replace

import pytest

from multihead.data.token_text import TokenGroup
from multihead.report.page import write_page

pytestmark = pytest.mark.browser
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def unavailable(why):
    if os.environ.get("MULTIHEAD_REQUIRE_BROWSER") == "1":
        pytest.fail(f"MULTIHEAD_REQUIRE_BROWSER=1, but {why}")
    line = (
        f"!!! BROWSER TESTS SKIPPED: {why}. The page was NOT opened in a browser. Debian: apt-get"
        " install chromium"
    )
    warnings.warn(line, stacklevel=2)
    pytest.skip(line)


@pytest.fixture(scope="module")
def browser():
    path = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if path is None:
        unavailable("no Chromium on this machine")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        unavailable("the Python package playwright is missing")
    with sync_playwright() as play:
        opened = play.chromium.launch(executable_path=path, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def show(browser, tmp_path):
    """`show(table, maps, **context)` opens the page; afterwards no request, error or dialog may
    have been seen.
    """
    trouble, contexts = [], []

    def opened(table, maps=(), at="", by="token", **options):
        write_page(tmp_path / "page.html", table, maps, by=by)
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        contexts.append(context)
        context.set_offline(True)
        context.route(lambda url: not url.startswith("file:"), lambda route: route.abort())
        page = context.new_page()
        page.on(
            "request",
            lambda r: None if r.url.startswith("file:") else trouble.append(f"request {r.url}"),
        )
        page.on(
            "console",
            lambda m: (
                trouble.append(f"console {m.text}") if m.type in ("error", "warning") else None
            ),
        )
        page.on("pageerror", lambda e: trouble.append(f"error {e}"))
        page.on("dialog", lambda d: (trouble.append(f"dialog {d.message}"), d.dismiss()))
        page.goto((tmp_path / "page.html").as_uri() + at)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert trouble == []


def cell(page, label):
    return page.locator(f'.cell[aria-label^="{label}:"]')


def colours_of_map(page, name):
    """The number of different colours within the map itself, and a sum of them."""
    return page.evaluate(
        """(name) => {
        const canvas = document.getElementById(`map-${name}`);
        const {margin, cell} = view.panels.find((p) => p.name === name).layout, dots = devicePixelRatio;
        const size = view.text.tokens.length * cell * dots;
        const {data} = canvas.getContext("2d").getImageData(margin * dots, margin * dots, size, size);
        const seen = new Set(); let sum = 0;
        for (let i = 0; i < data.length; i += 4) {
            if (data[i + 3]) seen.add(data.slice(i, i + 3).join());
            sum = (sum * 31 + data[i] + data[i + 3]) % 1e9;
        }
        return [seen.size, sum];
    }""",
        name,
    )


def test_a_clicked_head_shows_its_two_maps(show, made):
    table = made.table(4, 8)
    page = show(table, made.maps(table, 32))
    before = {}
    for label in ("L2.H1", "L3.H6"):
        cell(page, label).click()
        assert page.locator("#head-title").inner_text() == f"Head {label}"
        assert cell(page, label).get_attribute("aria-selected") == "true"
        for name in ("weights", "contributions"):
            assert page.locator(f"#map-{name}").is_visible()
            colours, mark = colours_of_map(page, name)
            assert colours > 20
            assert before.get(name) != mark  # another head, another map
            before[name] = mark


def test_what_is_pointed_at_is_what_was_measured(show, made):
    table = made.table(2, 4)
    maps = made.maps(table, 24)
    page = show(table, maps)
    cell(page, "L1.H2").click()
    given = next(m for m in maps if m.head == "L1.H2")
    layout = page.evaluate("view.panels[1].layout")
    row, key = 20, 19

    def at(k):
        x, y = (layout["margin"] + (n + 0.5) * layout["cell"] for n in (k, row))
        return {"x": x, "y": y}

    page.locator("#map-contributions").hover(position=at(key))
    text = page.locator("#readout").inner_text()
    shown = [
        float(word)
        for word in text.replace(":", " ").split()
        if word.replace(".", "").isdigit() and "." in word
    ]
    assert f"Token {row} " in text
    assert f"attends to token {key} " in text
    assert given.tokens[key].strip() in text
    for value, measured in zip(shown, (given.weights, given.contributions)):
        assert value == pytest.approx(
            float(measured[row, key]), abs=0.004 * float(measured.max()) + 5e-4
        )
    page.locator("#map-contributions").hover(position=at(row + 1))
    assert "not allowed" in page.locator("#readout").inner_text()
    page.locator("#map-contributions").focus()
    page.keyboard.press("ArrowLeft")
    assert f"attends to token {row} " in page.locator("#readout").inner_text()


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (
            ["[CLS]", "the", "cat", "##s", "."],
            "[CLS] the cat##s .",
        ),  # WordPiece: no token holds a space
        (["<s>", "the", " cat", "s", "."], "<s>the cats."),
    ],
)
def test_words_below_a_map_stand_apart(show, made, words, shown):
    table = made.table(1, 2)
    maps = [
        replace(m, tokens=words, row_tokens=words)
        for m in made.maps(table, len(words), hostile=False)
    ]
    assert show(table, maps).locator(".strip").first.inner_text().replace("\u200b", "") == shown


def test_a_hostile_token_is_text(show, made):
    table = made.table(2, 3, model=made.hostile, text=made.hostile, notes=[made.hostile])
    table.reasons["special"] = made.hostile
    page = show(table, made.maps(table, 16))
    assert page.locator(".strip").first.locator("button", has_text=made.hostile).count() == 1
    page.locator("#map-weights").focus()
    for _ in range(16):
        page.keyboard.press("ArrowUp")
    for _ in range(5):
        page.keyboard.press("ArrowDown")
    assert made.hostile in page.locator("#readout").inner_text()
    assert made.hostile in page.locator("#notes").inner_text()
    assert made.hostile in page.locator("#numbers").inner_text()
    assert page.locator("script").count() == 2


def test_sorting_and_filtering_keep_labels_with_their_numbers(show, made):
    table = made.table(4, 8)
    page = show(table)
    norms = dict(zip([h.head for h in table.heads], table.value("norm")))

    def shown():
        names = page.locator("#table thead th").all_inner_texts()
        at = [n.strip() for n in names].index("norm")
        cells = page.locator("#table tbody tr").evaluate_all(
            "(rows, at) => rows.map((r) => [r.children[0].textContent,"
            " r.children[at].textContent])",
            at,
        )
        return [(label, float(norm)) for label, norm in cells]

    for direction in ("descending", "ascending"):
        page.locator("#table").get_by_role("button", name="norm", exact=True).click()
        header = page.locator("#table th", has=page.get_by_role("button", name="norm", exact=True))
        assert header.get_attribute("aria-sort") == direction
        rows = shown()
        assert len(rows) == 32
        assert [v for _, v in rows] == sorted(
            (v for _, v in rows), reverse=direction == "descending"
        )
        for label, value in rows:
            assert value == pytest.approx(norms[label], abs=1e-3)
    for _ in range(2):  # heads without a role come last, either way
        page.locator("#table").get_by_role("button", name="score", exact=True).click()
        scores = page.locator("#table tbody td:nth-child(3)").all_inner_texts()
        assert scores[-1] == "–"
        assert scores[0] != "–"
    page.locator("#filter").select_option("previous")
    kept = {label for label, _ in shown()}
    assert kept == {row["head"] for row in table.rows() if "previous" in row["roles"]}
    page.locator("#table tbody button").first.click()
    first = page.locator("#table tbody tr").first
    assert first.get_attribute("aria-current") == "true"
    assert page.locator("#head-title").inner_text() == f"Head {first.locator('th').inner_text()}"
    page.locator("#filter").select_option("all heads")
    page.locator("#find").fill("l3.h")
    assert {label for label, _ in shown()} == {f"L3.H{n}" for n in range(8)}
    page.locator("#every").check()
    assert page.locator("#table thead th").count() == 8 + len(table.columns)


def test_another_statistic_recolours_the_grid_and_states_its_scale(show, made):
    table = made.table(4, 8)
    page = show(table)
    look = "[...document.querySelectorAll('.cell')].map((c) => c.style.backgroundColor)"
    by_role = page.evaluate(look)
    page.locator("#statistic").select_option("contribution:previous")
    by_mass = page.evaluate(look)
    assert by_role != by_mass
    assert len(set(by_mass)) > 8
    value = table.value("contribution:previous")
    best = table.heads[int(value.argmax())].head
    legend = page.locator("#legend").inner_text()
    assert f"to {value.max():.3f} ({best})" in legend
    assert "mass at i - 1" in legend
    options = page.locator("#statistic option").evaluate_all("(all) => all.map((o) => o.value)")
    assert set(table.columns) <= set(options)
    for option in options:
        page.locator("#statistic").select_option(option)
    page.locator("#statistic").select_option("share")
    assert (
        page.locator("#legend .scale").inner_text().startswith("−")
    )  # shares may be negative: a scale around zero


def test_the_keyboard_walks_over_the_grid(show, made):
    table = made.table(3, 4, 2, stacks=("encoder.", "decoder.", "decoder.+cross"))
    page = show(table, made.maps(table, 12), at="#encoder.L2.H0")
    assert page.locator("#head-title").inner_text() == "Head encoder.L2.H0"
    assert page.locator('.cell[tabindex="0"]').count() == 1
    page.locator('.cell[tabindex="0"]').focus()
    for key, label in (
        ("ArrowRight", "encoder.L2.H1"),
        ("ArrowUp", "encoder.L1.H1"),
        ("ArrowUp", "encoder.L0.H1"),
        ("ArrowUp", "encoder.L0.H1"),
    ):
        page.keyboard.press(key)
        assert page.locator("#head-title").inner_text() == f"Head {label}"
        assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith(
            f"{label}:"
        )
    cell(page, "decoder.L1.cross.H3").click()
    numbers = page.locator("#numbers").inner_text()
    assert "queries and keys of cross-attention are not the same tokens" in numbers
    page.locator("#numbers").get_by_role("button", name="entropy", exact=True).click()
    assert "-sum_j A_ij log A_ij" in page.locator("#numbers tr.formula:not([hidden])").inner_text()


def test_a_head_without_a_map_says_how_to_get_one(show, made):
    table = made.table(2, 4)
    page = show(table, made.maps(table, 12, only={"L0.H0"}))
    assert page.locator("#map-weights").is_visible()
    cell(page, "L1.H3").click()
    assert 'multihead.read_maps(model, text, "L1.H3")' in page.locator("#maps").inner_text()
    assert page.locator("canvas.map").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_fits_its_window_in_both_schemes(show, made, width, scheme):
    table = made.table(6, 12, empty=())
    maps = made.maps(table, 64, causal=False)
    page = show(table, maps, viewport={"width": width, "height": 800}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    colours = page.evaluate(
        "((s) => [s.color, s.backgroundColor])(getComputedStyle(document.body))"
    )
    light = [sum(map(int, colour[4:-1].split(", "))) for colour in colours]
    assert (light[0] < light[1]) == (scheme == "light")
    assert colours_of_map(page, "weights")[0] > 20


@pytest.mark.parametrize("by", ["token", "word"])
def test_a_switch_merges_the_pieces_of_a_word(show, made, by):
    """Summed over keys, averaged over queries, as `HeadMap.by_word` does."""
    tokens = ["<s>", " ze", "bra", "s", " and", " a", " c", "at"]
    groups = [TokenGroup(0, 1, "<s>"), TokenGroup(1, 4, "zebras"), TokenGroup(4, 5, "and")]
    groups += [TokenGroup(5, 6, "a"), TokenGroup(6, 8, "cat")]
    table = made.table(1, 2)
    maps = [
        replace(m, tokens=tokens, row_tokens=tokens, words=groups, row_words=groups)
        for m in made.maps(table, len(tokens), hostile=False)
    ]
    page = show(table, maps, by=by)
    switch = page.locator("#by-word")
    assert switch.is_checked() == (by == "word")
    if by == "token":
        assert page.evaluate("view.text.tokens.length") == 8
        switch.check()
    assert page.evaluate("view.text.tokens") == ["<s>", "zebras", "and", "a", "cat"]
    label = page.locator("#head-title").inner_text().removeprefix("Head ")
    want = next(m for m in maps if m.head == label).by_word()
    got = page.evaluate("[...view.panels[0].values].map((v) => Number.isNaN(v) ? 0 : v)")
    assert got == pytest.approx(want.weights.ravel().tolist(), abs=0.02)
    assert page.locator(".strip").first.inner_text().replace("\u200b", "") == "<s> zebras and a cat"
    assert "Word " in page.locator("#readout").inner_text()
    switch.uncheck()
    assert "Token " in page.locator("#readout").inner_text()
    assert page.evaluate("view.text.tokens.length") == 8
