"""Sums of heads: they add up in any order, and only where both are of one model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import multihead
from multihead.reader.sums import Head
from multihead.reader.table import Table
from small import IDS, llama

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
