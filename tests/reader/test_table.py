"""Tables: sums that add up, saved and loaded exactly, never half written, and words for what can't
be."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

import multihead
from multihead.reader.statistics import columns
from multihead.reader.statistics.columns import STATISTICS
from multihead.reader.sums import Head
from multihead.reader.table import Table
from small import IDS, llama
from user_statistics import Letters

HEADS = [Head(f"L0.H{n}", "attn", 0, n, n // 2, "self") for n in range(3)]


def table(documents: list[list[tuple[float, float, int]]], column: str = "self") -> Table:
    """One (x, y, rows) for each document and head."""
    found = Table(HEADS, meta={"documents": len(documents), "tokens": 7 * len(documents)})
    for document in documents:
        x, y, rows = zip(*document, strict=True)
        found.add(column, 0, x=x, y=y, rows=rows)
    return found


numbers = st.tuples(st.floats(0, 9), st.floats(0.1, 9), st.integers(1, 9))


documents = st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=1, max_size=4)


def test_saved_and_loaded_exactly(tmp_path: Path) -> None:
    found = table([[(1 / 3, 0.7, 2), (2 / 3, 0.9, 3), (0.1, 1.1, 4)]])
    found.reasons["attn next"] = "nothing comes after"
    found.save(tmp_path / "t.json")
    again = multihead.load_table(tmp_path / "t.json")
    assert (
        again.sums.keys() == found.sums.keys() and (again.sums["self"] == found.sums["self"]).all()
    )
    assert (again.heads, again.meta, again.reasons) == (found.heads, found.meta, found.reasons)
    assert again.rows() == found.rows()


def test_csv_holds_every_column(tmp_path: Path) -> None:
    table([[(1.0, 2.0, 2)] * 3]).save(tmp_path / "t.csv")
    head, *rows = (tmp_path / "t.csv").read_text().splitlines()
    assert head.split(",")[:6] == ["head", "site", "layer", "index", "group", "kind"]
    assert set(columns()) < set(head.split(",")) and len(rows) == 3
    assert rows[1].startswith("L0.H1,attn,0,1,0,self,")


def test_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        table([[(1.0, 1.0, 1)] * 3]).save(path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_pandas() -> None:
    frame = table([[(1.0, 2.0, 2)] * 3]).to_pandas()
    assert (
        frame["next"].isna().all()
        and frame["next"].dtype == float
        and len(frame.nlargest(1, "next")) == 1
    )
    assert frame.loc["L0.H2", "self"] == 0.5 and list(frame.index) == ["L0.H0", "L0.H1", "L0.H2"]


def test_shows_itself_in_a_notebook() -> None:
    html = table([[(1.0, 2.0, 2)] * 3])._repr_html_()
    assert "<table" in html and "L0.H1" in html


def test_words(tmp_path: Path) -> None:
    found = table([[(1.0, 1.0, 1)] * 3])
    with pytest.raises(KeyError, match="no statistic named 'entropi'; did you mean 'entropy'"):
        found.value("entropi")
    for kind in ("contribution", "even"):
        with pytest.raises(
            KeyError, match=f"{kind}:entropy'.*entropy is not a mass .*, so it has one column"
        ):
            found.value(f"{kind}:entropy")
    with pytest.raises(ValueError, match=r"expected a name that ends in \.json .* or \.csv"):
        found.save(tmp_path / "t.txt")
    with pytest.raises(ValueError, match=r"the folder .*nowhere.* doesn't exist"):
        found.save(tmp_path / "nowhere" / "t.json")
    with pytest.raises(
        ValueError, match=r"tables of 3 and 2 heads that are not the same \(L0\.H2\)"
    ):
        found + Table(HEADS[:2])
    for text in ("{", "[]", '{"format": "other"}', json.dumps({"a": 1})):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match=r"bad\.json.* isn't a table of heads"):
            multihead.load_table(tmp_path / "bad.json")
    found.save(tmp_path / "t.json")
    (tmp_path / "t.json").write_text(
        (tmp_path / "t.json").read_text().replace('"version": 1', '"version": 9')
    )
    with pytest.raises(ValueError, match="version 9, where this multihead reads version 1"):
        multihead.load_table(tmp_path / "t.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.pop("version"), "'version' is missing"),
        (lambda d: d.pop("heads"), "'heads' is missing"),
        (lambda d: d.update(meta=[1]), "meta is"),
        (lambda d: d["meta"].update(tokens="9"), "meta tokens is '9'"),
        (lambda d: d["meta"].update(documents="9"), "meta documents"),
        (lambda d: d["meta"].update(notes=5), "meta notes"),
        (lambda d: d["meta"].update(notes=[5]), "meta notes"),
        (lambda d: d.update(reasons={"a": 1}), "reasons"),
        (lambda d: d["heads"][0].update(more=1), "more"),
        (lambda d: d["heads"][0].update(head=5), "a head"),
        (lambda d: d["heads"][0].update(index=30_000_000), "a number of a head"),
        (lambda d: d["heads"][0].update(layer=-1), "a number of a head"),
        (lambda d: d["sums"].update({"a b": [[0] * 7] * 3}), "a column is 'a b'"),
        (lambda d: d["sums"].update(self=[[0] * 6] * 3), "sums self"),
        (lambda d: d["sums"].update(self=[["a"] * 7] * 3), "isn't a table"),
        (lambda d: d["sums"]["self"][0].__setitem__(0, float("nan")), "sums self"),
    ],
)
def test_a_file_from_anywhere_is_checked_part_by_part(
    tmp_path: Path, change: Any, words: str
) -> None:
    path = tmp_path / "t.json"
    table([[(1.0, 1.0, 1)] * 3]).save(path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"t\.json.* isn't a table of heads") as caught:
        multihead.load_table(path)
    assert words in str(caught.value), str(caught.value)


def test_nested_without_end(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("[" * 200_000)
    with pytest.raises(ValueError, match="isn't a table of heads"):
        multihead.load_table(tmp_path / "t.json")


def test_files_keep_their_mode_or_follow_the_umask(tmp_path: Path) -> None:
    found, old = table([[(1.0, 1.0, 1)] * 3]), os.umask(0o077)
    try:
        found.save(tmp_path / "new.json")
        (tmp_path / "old.json").write_text("")
        (tmp_path / "old.json").chmod(0o640)
        found.save(tmp_path / "old.json")
    finally:
        os.umask(old)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("new.json", "old.json")] == [
        0o600,
        0o640,
    ]


def test_every_statistic_says_what_it_is() -> None:
    for statistic in STATISTICS.values():
        assert statistic.formula and statistic.meaning and statistic.queries
    assert len(columns()) == len(set(columns()))


def test_a_table_of_the_earlier_version_loads_and_is_what_is_measured_today() -> None:
    """Written before statistics were classes: the same columns, numbers and pairs, bit for bit but
    for the six digits that the file keeps.
    """

    class Squares(multihead.Statistic):
        name, formula, meaning = "squares", "sum_j A_ij^2", "how concentrated the weights are"

        def rows(self, block: Any) -> Any:
            return block.weights.square().sum(-1)

    earlier = multihead.load_table(Path(__file__).parents[1] / "fixtures" / "earlier_table.json")
    today = multihead.read(
        llama(),
        [{"input_ids": IDS}],
        tokenizer=Letters(),
        statistics=[Squares(), "copying", "importance", "nearest"],
        classes={"even": "[02468]$"},
        probe=False,
    )
    assert earlier.columns == today.columns and "squares" in earlier.columns
    for column in today.columns:
        np.testing.assert_array_equal(earlier.count(column), today.count(column), err_msg=column)
        np.testing.assert_allclose(
            earlier.value(column), today.value(column), rtol=1e-4, atol=1e-5, err_msg=column
        )
    assert earlier.reasons.keys() - {"nearest"} == today.reasons.keys()
    assert [row["roles"] for row in earlier.rows()] == [row["roles"] for row in today.rows()]
    assert (earlier + today).count("squares").tolist() == [48] * 6
    assert "L0.H0" in str(earlier)


def test_a_table_of_the_first_edition_loads() -> None:
    """Written by commit bd4285e, with classes, relations, pairs and statistics on request."""
    folder = Path(__file__).parents[1] / "fixtures"
    found = multihead.load_table(folder / "table_of_the_first_edition.json")
    expected = json.loads(
        (folder / "table_of_the_first_edition_values.json").read_text(encoding="utf-8")
    )
    assert {"class:digits", "copying", "nearest", "relation:all"} <= set(found.columns)
    assert set(found.columns) == set(expected["values"])
    for column, values in expected["values"].items():
        wanted = [np.nan if value is None else value for value in values]
        np.testing.assert_allclose(found.value(column), wanted, rtol=1e-15, err_msg=column)
    rows = found.rows()
    assert [row["roles"] for row in rows] == expected["roles"]
    assert [row["resting"] for row in rows] == expected["resting"]
    assert multihead.Table.from_json(found.to_json()).to_json() == found.to_json()
