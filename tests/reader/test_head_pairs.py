"""Pairs of heads add up, save, and name the nearest head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import multihead
from multihead.reader.head_pairs import Pairs, find_nearest
from multihead.reader.table import Table, load_table
from small import IDS, llama


def read(model: Any, batches: list[Any], statistics: Any = "nearest") -> Table:
    return multihead.read(model, batches, probe=False, statistics=statistics)


def test_pairs_add_up_and_save(tmp_path: Path) -> None:
    model = llama()
    one, two = (read(model, [{"input_ids": IDS[n : n + 1]}]) for n in range(2))
    both, whole = one + two, read(model, [{"input_ids": IDS}])
    assert both.pairs is not None and whole.pairs is not None and one.pairs is not None
    np.testing.assert_allclose(both.pairs.sum, whole.pairs.sum, atol=1e-4)
    np.testing.assert_array_equal(both.pairs.rows, whole.pairs.rows)
    whole.save(tmp_path / "x.json")
    again = load_table(tmp_path / "x.json")
    assert again.pairs is not None and find_nearest(again) == find_nearest(whole)
    np.testing.assert_array_equal(again.pairs.sum, whole.pairs.sum)
    without = read(model, [{"input_ids": IDS}], statistics=())
    assert without.pairs is None and (without + one).pairs is one.pairs
    with pytest.raises(ValueError, match=r"has no pairs of heads; read with statistics="):
        find_nearest(without)


@pytest.mark.parametrize(
    "pairs",
    [
        3,
        {},
        {"sum": [0.1], "rows": [1]},
        {"sum": [-0.1] * 15, "rows": [1] * 15},
        {"sum": [float("nan")] * 15, "rows": [1] * 15},
        {"sum": [0.1] * 15, "rows": [1.5] * 15},
        {"sum": ["a"] * 15, "rows": [1] * 15},
        {"sum": [0] * 15, "rows": [10**400] * 15},
    ],
)
def test_a_file_with_wrong_pairs_is_refused(pairs: Any, tmp_path: Path) -> None:
    table = read(llama(), [{"input_ids": IDS}])
    table.save(tmp_path / "x.json")
    data = json.loads((tmp_path / "x.json").read_text())
    assert len(data["pairs"]["sum"]) == 15
    (tmp_path / "x.json").write_text(json.dumps(data | {"pairs": pairs}))
    with pytest.raises(ValueError, match=r"isn't a table of heads \(pairs (sum|rows) is"):
        load_table(tmp_path / "x.json")


def test_pairs_of_no_head() -> None:
    assert Pairs.from_json(Pairs.empty(0).to_json(), 0).sum.shape == (0, 0)
    assert find_nearest(Table([], pairs=Pairs.empty(0))) == []
    assert find_nearest(Table([], pairs=Pairs.empty(0)) + Table([])) == []
