"""The page as a file: whole, within its budget, without any outside reference, and safe with any
text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from multihead.reader.console import text_table
from multihead.reader.maps import HeadMap
from multihead.report.page import BUDGET, render, write_page


class Parsed(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags, self.blocks, self._inside = [], {}, None
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag if tag in ("script", "style", "title", "h1") else None
        if tag == "script" and dict(attrs).get("type") == "application/json":
            self._inside = "data"

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, text):
        if self._inside:
            self.blocks.setdefault(self._inside, []).append(text)

    @property
    def data(self):
        return json.loads("".join(self.blocks["data"]))


def unpack(packed, lengths, keys):
    """The twin of `unpack` in maps.js."""
    data = np.frombuffer(base64.b64decode(packed[0]), np.uint8)
    values, at = np.zeros((len(lengths), keys)), 0
    for i, length in enumerate(lengths):
        values[i, :length] = (data[at : at + length] / 255.0) ** 2 * packed[1]
        at += length
    assert at == len(data)
    return values


def test_nothing_comes_from_outside_and_ids_are_unique(made):
    table = made.table(2, 4)
    page = render(table, made.maps(table, 16))
    parsed = Parsed(page)
    ids = [a["id"] for _, a in parsed.tags if "id" in a]
    assert len(ids) == len(set(ids))
    refused = {"src", "href", "srcset", "data", "action", "background", "poster", "ping", "style"}
    assert not [
        (tag, a)
        for tag, a in parsed.tags
        if set(a) & refused or any(name.startswith("on") for name in a)
    ]
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & {
        tag for tag, _ in parsed.tags
    }
    own = "".join(parsed.blocks["style"] + parsed.blocks["script"])
    refused = (
        r"url\(|@import|https?:|//[a-z]|fetch\(|XMLHttpRequest|import\(|WebSocket|innerHTML|eval\("
    )
    assert not re.search(refused, own)


def test_only_the_pages_own_script_and_style_may_run(made):
    parsed = Parsed(render(made.table(2, 2)))
    policy = next(
        a["content"] for tag, a in parsed.tags if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        [text] = parsed.blocks[tag]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_a_hostile_token_arrives_as_text(made):
    table = made.table(2, 4, model=made.hostile, text=made.hostile, notes=[made.hostile])
    table.reasons["special"] = made.hostile
    parsed = Parsed(render(table, made.maps(table, 16), title=made.hostile))
    assert [tag for tag, _ in parsed.tags].count("script") == 2
    assert parsed.data["texts"][0]["tokens"][5] == made.hostile
    assert parsed.data["reasons"]["special"] == made.hostile
    assert parsed.blocks["h1"] == parsed.blocks["title"] == [made.hostile]


ODD = ["<!--<script>", "\u2028\u2029", "\ud800", "\x00", "&lt;", "]]>", "{{ 7 * 7 }}", '"\\']


@pytest.mark.parametrize("token", ODD)
def test_any_token_survives(made, token, tmp_path):
    table = made.table(1, 2)
    weights = np.ones((1, 1), np.float32)
    write_page(
        tmp_path / "page.html", table, [HeadMap("L0.H1", [token], [0], [token], weights, weights)]
    )
    assert Parsed((tmp_path / "page.html").read_text("utf-8")).data["texts"][0]["tokens"] == [token]


def test_thirty_layers_of_nine_heads_with_all_their_maps_fit(made):
    table = made.table(30, 9, 3, empty=())
    page = render(table, made.maps(table, 64))
    assert len(page.encode()) <= BUDGET == 3_000_000
    data = Parsed(page).data
    assert len(data["maps"]) == 270
    assert data["dropped"] == []


@pytest.mark.parametrize("budget", [400_000, 700_000])
def test_maps_beyond_the_budget_are_left_out_least_telling_first_and_named(made, budget):
    table = made.table(12, 8)
    page = render(table, made.maps(table, 64, causal=False), budget=budget)
    data = Parsed(page).data
    assert budget * 0.95 < len(page.encode()) <= budget
    kept, dropped = {int(n) for n in data["maps"]}, data["dropped"]
    assert kept
    assert dropped
    assert {table.heads[n].head for n in kept} | set(dropped) == {h.head for h in table.heads}
    place = {table.heads[n].head: at for at, n in enumerate(data["order"])}
    assert (
        max(place[table.heads[n].head] for n in kept if data["maps"][str(n)]["contributions"])
        <= min(place[label] for label in dropped) + 8
    )  # a map without contributions is half as large and may still fit


def test_numbers_on_the_page_are_the_tables(made):
    table = made.table(3, 4, stacks=("decoder.", "decoder.+cross"))
    data = Parsed(render(table)).data
    assert data["columns"] == table.columns
    for column in table.columns:
        shown = np.array([np.nan if v is None else v for v in data["values"][column]])
        np.testing.assert_allclose(shown, table.value(column), rtol=1e-3, equal_nan=True)
        np.testing.assert_array_equal(
            np.broadcast_to(data["counts"][column], len(table.heads)), table.count(column)
        )
    assert None in data["values"]["previous"]


def test_chosen_rows_of_a_longer_text(made):
    table, rng = made.table(1, 2), np.random.default_rng(0)
    rows, keys = [3, 40, 99], 100
    weights = np.tril(rng.random((100, 100)))[rows].astype(np.float32)
    words = [f"w{n}" for n in range(keys)]
    given = HeadMap("L0.H1", words, rows, [words[r] for r in rows], weights, None)
    entry = Parsed(render(table, [given])).data["maps"]["1"]
    assert entry["causal"]
    np.testing.assert_allclose(unpack(entry["weights"], [4, 41, 100], keys), weights, atol=0.004)


def test_a_page_is_written_whole_or_not_at_all(made, tmp_path):
    with pytest.raises(ValueError, match=r"folder .* doesn't exist"):
        write_page(tmp_path / "no" / "page.html", made.table(1, 2))
    write_page(tmp_path / "page.html", made.table(1, 2))
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_without_script_the_page_still_has_the_numbers(made):
    table = made.table(1, 2)
    plain = render(table).split("<noscript>")[1].split("</noscript>")[0]
    for line in text_table(table).splitlines():
        if line.startswith("L0."):
            assert line in plain
    assert "L0.H1" in plain


def test_baselines_carry_their_caveat(made):
    text = " ".join(render(made.table(1, 2)).split())
    assert "Weights are not effects" in text
    assert "<code>multihead.reader.read_rollout</code>, <code>read_mean_map</code>" in text
    assert "are made of weights alone" in text
