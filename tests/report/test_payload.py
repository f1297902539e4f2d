"""The data of a page: maps and numbers, rounded and packed within a budget."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from multihead.data.token_text import TokenGroup
from multihead.reader.maps import HeadMap
from multihead.report.frame import as_json
from multihead.report.page import render
from multihead.report.payload import blocks, pack, payload


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


def test_numbers_give_way_in_a_stated_order_and_then_it_refuses(made):
    table = made.table(12, 8)
    whole = payload(table, [], 10**7)
    assert whole["left_out"] == []
    assert whole["errors"]
    size = len(as_json(whole))
    without_errors = payload(table, [], size - 1)
    assert without_errors["left_out"] == ["errors"]
    least = payload(table, [], len(as_json(without_errors)) - 1)
    assert least["left_out"] == ["errors", "even"]
    assert not [c for c in least["columns"] if c.startswith("even:")]
    with pytest.raises(
        ValueError,
        match=r"budget=5000: the numbers of 96 heads alone take \d+ bytes; .*table\.save",
    ):
        payload(table, [], 5000)


@pytest.mark.parametrize("causal", [True, False])
def test_maps_on_the_page_are_the_maps(made, causal):
    table = made.table(2, 6)
    maps = made.maps(table, 17, causal=causal)
    data = Parsed(render(table, maps)).data
    assert len(data["texts"]) == 1
    for n, given in enumerate(maps):
        entry = data["maps"][str(n)]
        assert entry["causal"] == causal
        lengths = [i + 1 if causal else 17 for i in range(17)]
        for name in ("weights", "contributions"):
            values = getattr(given, name)
            if values is None:
                assert entry[name] is None
                continue
            shown = unpack(entry[name], lengths, 17)
            np.testing.assert_allclose(shown, values, atol=0.004 * values.max())


@pytest.mark.filterwarnings("error")
def test_an_empty_map_and_odd_numbers_pack():
    text, largest = pack(np.zeros((2, 3), np.float32), [3, 3])
    assert (base64.b64decode(text), largest) == (bytes(6), 0.0)
    text, largest = pack(np.array([[np.nan, -1.0, 2.0]], np.float32), [3])
    assert (list(base64.b64decode(text)), largest) == ([0, 0, 255], 2.0)


def test_stacks_are_blocks_of_their_own_and_pruned_heads_are_gaps(made):
    heads = made.heads(2, 4, 2, ("encoder.", "decoder.", "decoder.+cross"))
    del heads[1]
    found = blocks(heads)
    titles = [(b["title"], b["kind"]) for b in found]
    assert titles == [("encoder", "self"), ("decoder", "self"), ("decoder cross", "cross")]
    assert found[0]["rows"][0]["cells"] == [0, None, 1, 2]
    assert found[0]["groups"] == [0, 0, 1, 1]
    assert [row["label"] for row in found[2]["rows"]] == ["L0", "L1"]
    assert blocks(made.heads(1, 4))[0]["groups"] is None
    assert (
        blocks(made.heads(1, 4, 2) + [replace(h, site="b") for h in made.heads(1, 4, 1)])[0][
            "groups"
        ]
        is None
    )


def test_a_map_of_another_model_is_refused(made):
    table = made.table(1, 2)
    weights = np.ones((1, 1), np.float32)
    with pytest.raises(ValueError, match=r"no head 'L7.H7' in the table of 2 heads"):
        render(table, [HeadMap("L7.H7", ["a"], [0], ["a"], weights, None)])


def test_words_are_given_where_they_have_several_tokens(made):
    table = made.table(1, 2)
    groups = [TokenGroup(0, 1, "<s>"), TokenGroup(1, 3, "zebra"), TokenGroup(3, 6, "crossing")]
    maps = [
        replace(m, tokens=m.tokens[:5], weights=m.weights[:, :5], contributions=None)
        for m in made.maps(table, 6, hostile=False)
    ]
    bare = payload(table, maps, 10**7)["texts"][0]
    assert "words" not in bare
    single = [TokenGroup(n, n + 1, "x") for n in range(6)]
    one = [replace(m, words=single, row_words=single) for m in maps]
    assert "words" not in payload(table, one, 10**7)["texts"][0]
    split = [replace(m, words=groups, row_words=groups) for m in maps]
    data = payload(table, split, 10**7, by="word")
    assert data["by"] == "word"
    assert data["texts"][0]["words"] == [[0, 1, "<s>"], [1, 3, "zebra"], [3, 6, "crossing"]]
    assert data["texts"][0]["row_words"] == data["texts"][0]["words"]


def test_direction_marks_are_shown_and_other_texts_kept() -> None:
    marks = "\u061c\u200e\u200f\u202a\u202e\u2066\u2069"
    kept = ["\\u202e", "\\\\u202e", "\u200d", "שלום", "a\nb", "\\\n", "</script>"]
    text = as_json({"tokens": ["\\" + marks, *kept]})
    assert json.loads(text) == {"tokens": ["\\" + "\ufffd" * len(marks), *kept]}
    assert "<" not in text
