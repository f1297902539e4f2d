"""User-defined statistics of each kind, from outside of the package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import multihead
from multihead.reader.statistics import Totals, columns, describe, resolve_statistics
from multihead.reader.statistics.columns import BUILT_IN, STATISTICS
from multihead.reader.table import load_table
from multihead.report.page import render
from small import IDS, llama
from user_statistics import Letters, statistic


def read(*statistics: Any, batch: Any = None, **options: Any) -> Any:
    model = options.pop("model", None) or llama()
    return multihead.read(
        model, [batch or {"input_ids": IDS}], probe=False, statistics=statistics, **options
    )


def thirds(block: Any) -> torch.Tensor:
    members = block.context.key_ids[:, block.keys] % 3 == 0
    return (block.weights * members[:, None, None]).sum(-1)


def test_a_class_of_keys_and_values_of_keys_agree() -> None:
    """A mass by weight is the mean of ones and zeros, over the queries that may read such a key."""
    table = read(
        statistic("mass", key_values=lambda context: context.key_ids % 3 == 0),
        statistic("mean", key_values=lambda context: (context.key_ids % 3 == 0).double()),
        statistic("whole", key_values=lambda context: (context.key_ids % 3 == 0).long()),
        statistic("row", rows=thirds),
    )
    total = table.value("mass") * table.count("mass")
    for name in ("mean", "whole", "row"):
        np.testing.assert_allclose(table.value(name) * table.count(name), total, rtol=1e-5)
        assert set(table.count(name).tolist()) == {24}
    assert table.count("mass").max() < 24
    assert {"contribution:mass", "even:mass"} <= set(table.columns)
    assert not {"contribution:mean", "contribution:row"} & set(table.columns)


def test_each_built_in_definition_is_what_the_kernels_compute() -> None:
    """The built-in `rows` statistics, measured by their own definition as if a user had written
    them: the kernels' numbers.
    """
    names = [name for name, s in STATISTICS.items() if s.implements("rows")]
    assert len(names) == 4
    padded = torch.ones_like(IDS)
    padded[0, :4] = 0
    again = [statistic(f"my_{name}", rows=STATISTICS[name].rows) for name in names]
    for batch in ({"input_ids": IDS}, {"input_ids": IDS, "attention_mask": padded}):
        table = read(*again, batch=batch)
        for name in names:
            np.testing.assert_allclose(
                table.value(f"my_{name}"), table.value(name), rtol=1e-5, err_msg=name
            )
            if name != "entropy_ratio" and "attention_mask" not in batch:
                np.testing.assert_array_equal(table.count(f"my_{name}"), table.count(name))


def test_update_statistics_see_what_the_heads_add() -> None:
    def norm(site: Any, heads: Any) -> torch.Tensor:
        by_head = heads.weight.unflatten(0, (site.num_heads, -1))
        return (heads.outputs @ by_head).norm(dim=-1)

    def dimension(site: Any, heads: Any) -> Totals:
        ones = heads.norms.new_ones(heads.norms.shape[:2])
        return Totals(ones * site.head_dim, ones, ones)

    def odd(site: Any, heads: Any) -> torch.Tensor:
        query = torch.arange(heads.norms.shape[-1])
        return heads.norms.where(query % 2 == 1, torch.nan)

    table = read(
        statistic("own_norm", update=norm),
        statistic("dimension", update=dimension),
        statistic("odd", update=odd),
        statistic("nowhere", update=lambda site, heads: None),
    )
    np.testing.assert_allclose(table.value("own_norm"), table.value("norm"), rtol=1e-5)
    assert set(table.value("dimension").tolist()) == {8}
    assert set(table.count("odd").tolist()) == {12}
    assert np.isnan(table.value("nowhere")).all() and table.reasons["nowhere"]


def test_finish_statistics_measure_the_model_itself() -> None:
    def spectral(run: Any) -> None:
        with run.aside():
            run.model(IDS)  # an extra pass, which isn't recorded
        for site in run.sites:
            weight, _ = site.out_weight()
            by_head = weight.detach().unflatten(0, (site.num_heads, -1))
            run.add(site, "spectral", torch.linalg.matrix_norm(by_head, 2))
        run.notes.append("spectral norms of W_O")

    model = llama()
    table = read(statistic("spectral", finish=spectral), model=model)
    own = model.model.layers[0].self_attn.o_proj.weight.T.reshape(3, 8, -1)
    want = torch.linalg.matrix_norm(own, 2).detach()
    np.testing.assert_allclose(table.value("spectral")[:3], want, rtol=1e-6)
    assert (
        table.count("norm").tolist() == [24] * 6 and "spectral norms of W_O" in table.meta["notes"]
    )


def test_run_pass_and_begin_are_called_around_every_pass() -> None:
    calls: list[str] = []

    class Wrapped(multihead.Statistic):
        name, formula, meaning = "wrapped", "f", "m"

        def begin(self, run: Any) -> None:
            calls.append("begin")

        def run_pass(self, run: Any, batch: Any, forward: Any) -> Any:
            calls.append(f"pass {len(batch['input_ids'])}")
            return forward(batch)

        def finish(self, run: Any) -> None:
            calls.append("finish")

    batches = [{"input_ids": IDS}, {"input_ids": IDS[:1]}]
    multihead.read(llama(), batches, probe=False, statistics=Wrapped())
    assert calls == ["begin", "pass 2", "finish", "pass 1"]


def test_a_reading_of_a_loop_measures_them_too() -> None:
    squares = statistic("squares", rows=lambda block: block.weights.square().sum(-1))
    with multihead.reading(llama(), statistics=squares) as reading, torch.no_grad():
        reading.model(IDS)
    np.testing.assert_allclose(
        reading.table().value("squares"), read(squares).value("squares"), rtol=1e-6
    )
    finishing = statistic(finish=lambda run: None)
    for refused in ("effect", finishing):
        with (
            pytest.raises(ValueError, match=r"multihead\.read measures it"),
            multihead.reading(llama(), statistics=refused),
        ):
            pass


def test_they_are_of_one_reading_alone() -> None:
    table = read(statistic("mine", rows=lambda block: block.weights.sum(-1)))
    np.testing.assert_allclose(table.value("mine"), 1, rtol=1e-6)
    assert "mine" not in {s.name for s in multihead.reader.list_statistics()}
    with pytest.raises(KeyError, match="mine"):
        read().value("mine")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("entropy", "taken; choose another$"),
        ("probe:x", "a word"),
        ("", "a word"),
        ("two words", "a word"),
        ("3x", "a word"),
        ("x" * 61, "up to 60"),
        (None, "a word"),
        ("head", "taken"),
        ("roles", "taken"),
        ("mine", "taken"),
    ],
)
def test_names(name: Any, words: str) -> None:
    def ones(block: Any) -> torch.Tensor:
        return block.weights.sum(-1)

    with pytest.raises(ValueError, match=words):
        read(statistic("mine", rows=ones), statistic(name, rows=ones))


@pytest.mark.parametrize(
    ("methods", "words"),
    [((), "no method that measures"), (("key_values", "rows"), "key_values and rows")],
)
def test_exactly_one_method(methods: tuple[str, ...], words: str) -> None:
    mine = statistic(**dict.fromkeys(methods, len))
    with pytest.raises(ValueError, match=rf"Mine implements {words}; expected exactly one of"):
        resolve_statistics(mine)


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        (
            {"key_values": lambda context: context.query_valid[:, :-1]},
            r"'mine': its key_values\(\) returned \[2, 11\], expected a tensor \[2, 12\] \[B, S\]",
        ),
        (
            {"key_values": lambda context: 1.0},
            r"'mine': its key_values\(\) returned float, expected a tensor",
        ),
        (
            {"key_values": lambda context: context.key_ids.double().log() * torch.nan},
            r"'mine': its key_values\(\) returned values that aren't finite",
        ),
        (
            {"rows": lambda block: block.weights},
            r"'mine': its rows\(\) returned \[2, 3, 12, 12\], expected a tensor \[2, 3, 12\]",
        ),
        ({"rows": lambda block: None}, r"'mine': its rows\(\) returned NoneType"),
        ({"rows": lambda block: block.weights.sum(-1) / 0}, "'mine': it is infinite.*NaN"),
        (
            {"update": lambda site, heads: heads.outputs},
            r"'mine': its update\(\) returned \[2, 3, 12, 8\], expected a tensor \[2, 3, 12\]",
        ),
        ({"update": lambda site, heads: heads.norms / 0}, "'mine': it is infinite.*NaN"),
        (
            {"finish": lambda run: run.add(run.sites[0], "mine", torch.ones(2))},
            r"mine: add\(\) got \[2\], expected a value for each head, \[3\]",
        ),
    ],
)
def test_its_values_are_checked_and_the_model_is_restored(methods: Any, words: str) -> None:
    model = llama()
    want = model(IDS).logits
    with pytest.raises(ValueError, match=words):
        read(statistic(**methods), model=model)
    assert torch.equal(model(IDS).logits, want)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    read(model=model)


def test_an_error_in_it_names_it() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        read(statistic(rows=lambda block: 1 / 0))
    assert caught.value.__notes__ == ["in rows() of the statistic 'mine', for queries 0 to 11"]


def test_queries_and_keys_where_it_does_not_exist() -> None:
    table = read(
        statistic("never", key_values=lambda context: None),
        statistic("nowhere", rows=lambda block: torch.full_like(block.weights[..., 0], torch.nan)),
        statistic("no_keys", key_values=lambda context: torch.zeros_like(context.key_valid)),
        # the block may be written to
        statistic("spoilt", rows=lambda block: block.weights.zero_().sum(-1)),
    )
    for name in ("never", "nowhere", "no_keys"):
        assert np.isnan(table.value(name)).all()
        assert not table.count(name).any()
        assert table.reasons[name]
    assert not table.value("spoilt").any()
    plain = read()
    for column in plain.columns:
        np.testing.assert_allclose(table.value(column), plain.value(column), rtol=1e-6)


def test_a_reason_of_its_own() -> None:
    class Mine(multihead.Statistic):
        name, formula, meaning = "mine", "f", "m"

        def key_values(self, context: Any) -> None:
            return None

        def why_missing(self, site: Any) -> str:
            return f"not of {site.kind}-attention"

    assert read(Mine()).reasons["mine"] == "not of self-attention"


ELSEWHERE = """
import sys, multihead
from multihead.report.page import render
table = multihead.load_table(sys.argv[1])
assert {"mass", "contribution:mass", "even:mass", "squares", "class:one.half"} <= set(table.columns), table.columns
page = render(table)
assert "squares" in table.rows()[0] and "sum_j A_ij^2" in page and "how concentrated" in page
print(table)
both = table + table
both.save(sys.argv[2])
"""


class Squares(multihead.Statistic):
    name, formula, meaning = "squares", "sum_j A_ij^2", "how concentrated the weights are"
    range = (0.0, 1.0)

    def rows(self, block: Any) -> torch.Tensor:
        return block.weights.square().sum(-1)


def test_a_table_is_read_where_its_statistics_are_not_known(tmp_path: Path) -> None:
    table = read(
        statistic("mass", key_values=lambda context: context.key_ids % 3 == 0),
        Squares(),
        tokenizer=Letters(),
        classes={"one.half": "[02468]$"},
    )
    table.save(tmp_path / "one.json")
    table.save(tmp_path / "one.csv")
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, tmp_path / "one.json", tmp_path / "two.json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "L0.H0" in done.stdout
    both = load_table(tmp_path / "two.json")
    for column in ("mass", "contribution:mass", "squares", "class:one.half"):
        np.testing.assert_array_equal(both.value(column), table.value(column))
        np.testing.assert_array_equal(both.count(column), 2 * table.count(column))
    declared = both.meta["statistics"]
    assert describe("squares", declared).range == (0, 1)
    assert describe("squares", declared).formula == "sum_j A_ij^2"
    assert describe("squares").formula == "user-defined"
    assert "squares" in (tmp_path / "one.csv").read_text().splitlines()[0]
    page = render(table)
    assert '"squares"' in page and json.dumps("class:one.half") in page
    added = table + read()  # one that has the column and one that lacks it
    np.testing.assert_array_equal(added.value("mass"), table.value("mass"))
    assert added.meta["statistics"].keys() == {"mass", "squares"}


@pytest.mark.parametrize(
    "declared", [3, {"squares": 3}, {"squares": {"formula": 3}}, {"x": {"low": "a"}}]
)
def test_a_file_with_wrong_descriptions_is_refused(declared: Any, tmp_path: Path) -> None:
    read(Squares()).save(tmp_path / "t.json")
    data = json.loads((tmp_path / "t.json").read_text())
    data["meta"]["statistics"] = declared
    (tmp_path / "t.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match="meta statistics"):
        load_table(tmp_path / "t.json")


def test_the_longest_names_save_and_load(tmp_path: Path) -> None:
    name = "x" * 60
    table = read(
        statistic(name, key_values=lambda context: context.key_ids % 3 == 0),
        tokenizer=Letters(),
        classes={name: "1"},
    )
    table.save(tmp_path / "t.json")
    assert load_table(tmp_path / "t.json").columns == table.columns


def test_blocks_report_their_queries_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def rows(block: Any) -> torch.Tensor:
        seen.append((block.rows, block.keys))
        size = block.rows.stop - block.rows.start, block.keys.stop - block.keys.start
        assert block.weights.shape[-2:] == size
        key = torch.arange(block.keys.start, block.keys.stop)
        return (block.weights * key.float()).sum(-1)

    ids = torch.randint(3, 50, (1, 60), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr("multihead.ops.backends.blocks.rows_per_block", lambda *_: 7)
    table = read(
        statistic("place", rows=rows),
        statistic(
            "place_",
            key_values=lambda context: torch.arange(context.key_ids.shape[1]).float()[None],
        ),
        batch={"input_ids": ids},
    )
    assert len(seen) > 10
    np.testing.assert_allclose(table.value("place"), table.value("place_"), rtol=1e-5)


def test_another_instance_of_a_built_in_class_replaces_it() -> None:
    from multihead.reader.statistics.updates import Received

    assert np.isnan(read().value("received")).all()
    assert read(Received(readers=3)).value("received").min() > 0
    assert len(resolve_statistics(Received(readers=3))) == len(BUILT_IN)


@pytest.mark.parametrize("statistics", [5, [5], [multihead.Statistic]])
def test_neither_a_name_nor_a_statistic(statistics: Any) -> None:
    with pytest.raises(TypeError, match="statistics"):
        multihead.read(llama(), [{"input_ids": IDS}], statistics=statistics)


def test_columns_of_user_defined_statistics_come_last() -> None:
    listed = columns(["zeta", "even:alpha", "alpha", "contribution:alpha", "class:x"])
    assert listed[-5:] == ["alpha", "contribution:alpha", "even:alpha", "class:x", "zeta"]
    assert len(listed) == len(set(listed))
