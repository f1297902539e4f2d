"""Tables: sums that add up, saved and loaded exactly, never half written, and words for what can't
be.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import multihead
from multihead.reader.roles import THRESHOLD, assign_roles, is_resting
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


@given(documents, documents, documents)
def test_adding_is_associative_and_equals_one_table(a: list, b: list, c: list) -> None:
    whole = table(a + b + c)
    left, right = (table(a) + table(b)) + table(c), table(a) + (table(b) + table(c))
    for other in (left, right):
        assert other.value("self") == pytest.approx(whole.value("self"), rel=1e-12)
        assert other.error("self") == pytest.approx(
            whole.error("self"), rel=1e-6, abs=1e-6, nan_ok=True
        )
        assert (other.count("self") == whole.count("self")).all()
        assert other.meta["documents"] == len(a + b + c)


def test_sum_and_what_is_no_table() -> None:
    a = table([[(1.0, 1.0, 1)] * 3])
    assert sum([a, a]).count("self").tolist() == [2, 2, 2]
    with pytest.raises(TypeError, match="unsupported operand"):
        a + 1


def test_error_is_that_of_a_mean_over_documents() -> None:
    """With one row a document the standard error is the ordinary one: the deviation over the root
    of n.
    """
    values = [0.1, 0.4, 0.35, 0.8]
    found = table([[(v, 1.0, 1)] * 3 for v in values]).error("self")
    assert found == pytest.approx([np.std(values, ddof=1) / 2] * 3)
    assert np.isnan(table([[(0.5, 1.0, 1)] * 3]).error("self")).all()


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


def test_adding_keeps_what_is_still_true() -> None:
    a, b = table([[(1.0, 1.0, 1)] * 3]), table([[(1.0, 1.0, 1)] * 3], "duplicate")
    a.reasons = {"duplicate": "no copy", "attn duplicate": "no copy", "next": "nothing comes after"}
    probe = table([[(1.0, 2.0, 4)] * 3], "probe:induction")
    assert (a + b).reasons == {"next": "nothing comes after"}
    assert (probe + probe).count("probe:induction").tolist() == [
        4,
        4,
        4,
    ]  # the same probe twice is no more evidence
    assert (Table(HEADS) + a).value("self").tolist() == [1, 1, 1]


def fill(**values: float) -> Table:
    """A table of one head with these values."""
    found = Table(HEADS[:1])
    for name, value in values.items():
        found.add(name.replace("__", ":"), 0, x=[value * 100], y=[100], rows=[100])
    return found


def test_a_role_is_contribution_over_an_even_reading() -> None:
    assert assign_roles(fill(previous=0.9, contribution__previous=0.2, even__previous=0.1)) == [
        []
    ]  # by weight alone: no role
    assert assign_roles(
        fill(previous=0.1, contribution__previous=0.1 + THRESHOLD, even__previous=0.1)
    ) == [["previous"]]
    assert assign_roles(
        fill(contribution__self=0.9, even__self=0.1, contribution__first=0.99, even__first=0.05)
    ) == [["first", "self"]]


def test_induction_comes_only_from_the_probe() -> None:
    assert assign_roles(fill(contribution__induction=0.9, even__induction=0.0)) == [[]]
    assert assign_roles(fill(contribution__probe__induction=0.9, even__probe__induction=0.0)) == [
        ["induction"]
    ]


@pytest.mark.parametrize(
    ("first", "reach", "rests"), [(0.6, 0.2, True), (0.6, 0.9, False), (0.3, 0.2, False)]
)
def test_resting_takes_weight_on_the_first_key_and_little_read(
    first: float, reach: float, rests: bool
) -> None:
    assert is_resting(fill(first=first, reach=reach)).tolist() == [rests]
    assert is_resting(fill(special=first, reach=reach)).tolist() == [rests]


def test_every_statistic_says_what_it_is() -> None:
    for statistic in STATISTICS.values():
        assert statistic.formula and statistic.meaning and statistic.queries
    assert len(columns()) == len(set(columns()))


def test_several_documents_at_once_are_one_after_another() -> None:
    each = [
        [(1.0, 2.0, 3), (4.0, 5.0, 6), (7.0, 8.0, 9)],
        [(0.5, 1.0, 2), (0.25, 3.0, 4), (1.5, 2.5, 1)],
    ]
    want, got = table(each), Table(HEADS)
    x, y, rows = np.array(each).transpose(2, 0, 1)
    got.add("self", 0, x=x, y=y, rows=rows)
    assert got.sums["self"] == pytest.approx(want.sums["self"], rel=1e-15)


def test_two_classes_of_one_name_are_not_one(tmp_path: Path) -> None:
    model, tokenizer = multihead.load_builtin()
    a, b, c = (
        multihead.read(
            model, "one 1 and 2", tokenizer=tokenizer, classes={"some": pattern}, probe=False
        )
        for pattern in (r"\d", "and", r"\d")
    )
    a.save(tmp_path / "a.json")
    for left in (a, multihead.load_table(tmp_path / "a.json")):
        with pytest.raises(ValueError, match=r"class some.*'\\\\d' and 'and'.*name"):
            _ = left + b
        assert (left + c).count("class:some").tolist() == (2 * a.count("class:some")).tolist()
    other = multihead.read(
        model, "one 1 and 2", tokenizer=tokenizer, classes={"else": "and"}, probe=False
    )
    both = other + a
    assert both.count("class:some").tolist() == a.count("class:some").tolist()
    with pytest.raises(ValueError, match="class some"):
        _ = both + b


@pytest.mark.parametrize("change", [{"weights": True}, {"rms_norm_eps": 0.1}])
def test_tables_of_two_models_with_the_same_heads_do_not_add_up(
    change: dict[str, Any], tmp_path: Path
) -> None:
    def read(model: Any) -> Table:
        return multihead.read(model, [{"input_ids": IDS}], probe=False)

    other = llama(**{name: value for name, value in change.items() if name != "weights"})
    if "weights" in change:
        other.lm_head.weight.data += 1
    a, b = read(llama()), read(other)
    b.save(tmp_path / "b.json")
    for right in (b, multihead.load_table(tmp_path / "b.json")):
        with pytest.raises(ValueError, match=r"tables of two models.*add tables of one model only"):
            _ = a + right
    assert (a + read(llama())).meta["documents"] == 4
    assert (a + Table(a.heads)).meta["fingerprint"] == a.meta[
        "fingerprint"
    ]  # of a loop of one's own nothing is known


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
