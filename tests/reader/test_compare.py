"""Two tables compared: differences with their errors, roles that changed, and heads that are in one
alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import multihead
from multihead.reader.sums import Head
from multihead.reader.table import Table

HEADS = [Head(f"L0.H{n}", "attn", 0, n, n, "self") for n in range(4)]


def table(heads: list[Head], documents: list[float], previous: float = 0.0) -> Table:
    found = Table(
        heads, meta={"model": "model", "tokens": 10 * len(documents), "documents": len(documents)}
    )
    steps = np.arange(len(heads)) / 10
    for value in documents:
        found.add("self", 0, x=value + steps, y=np.ones(len(heads)), rows=np.ones(len(heads)))
    for column, value in (("contribution:previous", previous), ("even:previous", 0.0)):
        found.add(
            column,
            0,
            x=np.where(steps == 0, value, 0),
            y=np.ones(len(heads)),
            rows=np.ones(len(heads)),
        )
    return found


def test_differences_errors_and_z() -> None:
    a, b = (
        table(HEADS, [0.1, 0.3]),
        table(HEADS[::-1], [0.5, 0.7, 0.6]),
    )  # the other way round: matched by label
    found = multihead.compare(a, b)
    rows = {row["head"]: row for row in found.rows() if row["column"] == "self"}
    assert list(rows) == ["L0.H0", "L0.H1", "L0.H2", "L0.H3"]  # the largest difference first
    error = np.hypot(np.std([0.1, 0.3], ddof=1) / 2**0.5, np.std([0.5, 0.7, 0.6], ddof=1) / 3**0.5)
    for n in range(4):
        row, difference = rows[f"L0.H{n}"], 0.6 + (3 - n) / 10 - 0.2 - n / 10
        assert row["difference"] == pytest.approx(difference) and row["b"] - row[
            "a"
        ] == pytest.approx(difference)
        assert row["error"] == pytest.approx(error) and row["z"] == pytest.approx(
            difference / error
        )


def test_without_an_error_there_is_no_z() -> None:
    row = next(
        r
        for r in multihead.compare(table(HEADS, [0.2]), table(HEADS, [0.4])).rows()
        if r["column"] == "self"
    )
    assert row["difference"] == pytest.approx(0.2) and row["error"] is None and row["z"] is None


def test_roles_that_changed() -> None:
    found = multihead.compare(table(HEADS, [0.2], previous=0.9), table(HEADS, [0.2]))
    assert found.roles == [{"head": "L0.H0", "a": ["previous"], "b": []}]
    assert "roles changed: 1 of 4 heads" in str(found) and "previous    mixed" in str(found)
    assert multihead.compare(table(HEADS, [0.2]), table(HEADS, [0.2])).roles == []


def test_heads_in_one_alone_are_named() -> None:
    found = multihead.compare(table(HEADS[:3], [0.2]), table(HEADS[1:], [0.2]))
    assert found.heads == ["L0.H1", "L0.H2"] and found.only == (["L0.H0"], ["L0.H3"])
    assert (
        "only in a  L0.H0" in str(found)
        and "only in b  L0.H3" in str(found)
        and "2 in both" in str(found)
    )


def test_columns_that_one_lacks_have_no_difference(tmp_path: Path) -> None:
    a, b = table(HEADS, [0.2]), table(HEADS, [0.4])
    b.add("next", 0, x=[0.1] * 4, y=[1.0] * 4, rows=[1] * 4)
    found = multihead.compare(a, b)
    rows = [row for row in found.rows() if row["column"] == "next"]
    assert len(rows) == 4 and all(
        row["a"] is None and row["difference"] is None and row["b"] == 0.1 for row in rows
    )
    assert "\nnext" not in str(found)
    found.save(tmp_path / "c.json")
    found.save(tmp_path / "c.csv")
    data = json.loads((tmp_path / "c.json").read_text())
    assert data["rows"] == found.rows() and data["only_a"] == [] and data["heads"] == found.heads
    assert (tmp_path / "c.csv").read_text().splitlines()[0] == "head,column,a,b,difference,error,z"
    frame = found.to_pandas()
    assert len(frame) == len(found.rows()) and np.isnan(frame[frame["column"] == "next"]["a"]).all()


def test_words(tmp_path: Path) -> None:
    a = table(HEADS, [0.2])
    with pytest.raises(TypeError, match="b is a str: expected a table"):
        multihead.compare(a, "b.json")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no head in common"):
        multihead.compare(a, Table([Head("L9.H9", "x", 9, 9, 0, "self")]))
    with pytest.raises(ValueError, match=r"expected a name that ends in \.json or \.csv"):
        multihead.compare(a, a).save(tmp_path / "c.txt")


def test_columns_that_somebody_asked_for_are_compared_too() -> None:
    """Classes and relations stand in no list of statistics; a column of one table alone has no
    difference.
    """
    model, tokenizer = multihead.load_builtin()
    a = multihead.read(
        model, "one 1 and 2", tokenizer=tokenizer, classes={"digits": r"\d"}, probe=False
    )
    b = multihead.read(
        model,
        "two 2 and 3 and 4",
        tokenizer=tokenizer,
        classes={"digits": r"\d", "and": "and"},
        probe=False,
    )
    rows = {(row["head"], row["column"]): row for row in multihead.compare(a, b).rows()}
    for column in ("class:digits", "contribution:class:digits"):
        want = b.value(column)[0] - a.value(column)[0]
        assert rows["L0.H0", column]["difference"] == pytest.approx(want)
    alone = rows["L0.H0", "class:and"]
    assert (
        alone["a"] is None
        and alone["b"] == pytest.approx(b.value("class:and")[0])
        and alone["difference"] is None
    )


def test_two_classes_of_one_name_have_no_difference() -> None:
    model, tokenizer = multihead.load_builtin()
    a, b = (
        multihead.read(
            model, "one 1 and 2", tokenizer=tokenizer, classes={"some": pattern}, probe=False
        )
        for pattern in (r"\d", "and")
    )
    rows = [row for row in multihead.compare(a, b).rows() if row["column"].endswith("class:some")]
    assert len(rows) == 3 * len(a.heads)
    assert all(
        row["difference"] is None
        and row["z"] is None
        and row["a"] is not None
        and row["b"] is not None
        for row in rows
    )
