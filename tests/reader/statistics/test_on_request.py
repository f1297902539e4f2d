"""What is asked for beyond a pass, together with texts in windows, in pieces, by several runs: the
same numbers.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import multihead
from multihead.reader.table import Table

TEXTS = [
    "the cat sat on the mat, and the cat sat on 12 mats",
    "a dog",
    "it was the best of times, it was the worst of times " * 3,
]
TREES = Path(__file__).parents[2] / "fixtures" / "sentences.conllu"
ASKED = ("copying", "importance", "effect", "nearest")


def same(got: Table, want: Table, rel: float) -> None:
    assert got.columns == want.columns and got.meta == want.meta
    for column in want.columns:
        assert got.count(column).tolist() == want.count(column).tolist(), column
        assert got.value(column) == pytest.approx(
            want.value(column), rel=rel, abs=rel, nan_ok=True
        ), column
        assert got.error(column) == pytest.approx(
            want.error(column), rel=100 * rel, abs=max(10 * rel, 1e-7), nan_ok=True
        ), column
    assert got.pairs is not None and want.pairs is not None
    assert got.pairs.sum == pytest.approx(want.pairs.sum, rel=rel, abs=rel)


@pytest.fixture(scope="module")
def model() -> Any:
    return multihead.load_builtin()


@pytest.mark.parametrize(("context", "stride"), [(None, None), (16, 10)])
def test_batches_change_nothing(model: Any, context: int | None, stride: int | None) -> None:
    def read(batch_size: int) -> Table:
        return multihead.read(
            model[0],
            iter(TEXTS),
            tokenizer=model[1],
            batch_size=batch_size,
            context=context,
            stride=stride,
            statistics=ASKED,
            classes={"digits": r"\d"},
            probe=False,
        )

    table = read(4)
    same(read(1), table, 1e-4)
    assert {*ASKED, "class:digits", "contribution:class:digits"} <= {*table.columns}
    tokens = [len(model[1](text)["input_ids"]) for text in TEXTS]
    assert set(table.count("importance")) == {sum(tokens)} == {table.meta["tokens"]}
    assert table.sums["importance"][0, -1] == table.sums["effect"][0, -1] == len(TEXTS)
    assert set(table.count("effect")) <= {*range(sum(tokens) - len(TEXTS) + 1)}, (
        "a token of an overlap has one loss"
    )
    assert set((table + table).count("copying")) == {1}, "weights say the same twice"


def test_the_mean_is_over_all_texts(model: Any) -> None:
    """`effect_mean` is the loss by hand with `multihead.ablate_heads(mode="mean", over=...)`, however texts
    fall into batches.
    """
    import torch

    found = [
        multihead.read(
            model[0], TEXTS, tokenizer=model[1], batch_size=n, statistics="effect_mean", probe=False
        )
        for n in (1, 3)
    ]
    assert found[0].value("effect_mean") == pytest.approx(
        found[1].value("effect_mean"), rel=1e-4, abs=1e-5
    )
    assert found[0].error("effect_mean") == pytest.approx(
        found[1].error("effect_mean"), rel=1e-3, abs=1e-5
    )
    assert found[0].sums["effect_mean"][0, -1] == found[1].sums["effect_mean"][0, -1] == len(TEXTS)
    batches = [dict(model[1](text, return_tensors="pt")) for text in TEXTS]

    def loss() -> float:
        with torch.no_grad():
            logits = [model[0](**batch).logits for batch in batches]
        return sum(
            float(
                torch.nn.functional.cross_entropy(
                    x[0, :-1].double(), b["input_ids"][0, 1:], reduction="sum"
                )
            )
            for x, b in zip(logits, batches)
        )

    base, number = loss(), sum(batch["input_ids"].shape[1] - 1 for batch in batches)
    for n in (0, 13, 31):
        with multihead.ablate_heads(model[0], found[0].heads[n].head, mode="mean", over=batches):
            want = (loss() - base) / number
        assert found[0].value("effect_mean")[n] == pytest.approx(want, rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_a_reading_that_was_stopped_goes_on(model: Any, tmp_path: Path) -> None:
    """Copying, relations and the probe are measured once, whichever run comes to them."""
    asked: dict[str, Any] = dict(
        tokenizer=model[1],
        batch_size=1,
        statistics=ASKED,
        classes={"digits": r"\d"},
        relations=TREES,
    )
    want = multihead.read(model[0], TEXTS, **asked)
    for units in (1, 2):
        file, left = tmp_path / f"{units}", iter([False] * units)
        part = multihead.read(
            model[0], TEXTS, resume=file, stop=lambda left=left: next(left, True), **asked
        )
        assert "partial" in part.meta
        got = multihead.read(model[0], TEXTS, resume=file, **asked)
        same(got, want, 1e-12)
        assert "relation:all" in got.columns and set(got.count("copying")) == {1}
        assert "relations" not in got.reasons, "it names a file, not a column"
    with pytest.raises(ValueError, match="statistics"):
        multihead.read(
            model[0], TEXTS, resume=tmp_path / "2", **(asked | {"statistics": ["copying"]})
        )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"statistics": "effect_mean", "resume": "p"},
            "effect_mean.*resume.*mean is over all texts",
        ),
        ({"statistics": ["importance"], "generate": 3}, "importance.*generate=3.*given text"),
        ({"statistics": "coping"}, "did you mean 'copying'"),
        ({"classes": {"a b": "x"}}, "'a b' isn't a name"),
        ({"classes": {"a": "("}}, r"a='\(' isn't a regular expression"),
    ],
)
def test_what_cant_be_is_refused_before_anything_is_read(
    model: Any, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        multihead.read(model[0], TEXTS, tokenizer=model[1], **given)


def test_errors_over_documents_are_shown(model: Any, tmp_path: Path) -> None:
    table = multihead.read(model[0], TEXTS, tokenizer=model[1])
    table.save(tmp_path / "t.csv")
    rows = list(csv.DictReader((tmp_path / "t.csv").open()))
    for name in ("entropy", "contribution:previous", "logit"):
        assert [float(row[f"error:{name}"]) for row in rows] == pytest.approx(table.error(name))
    assert not any(c.startswith("error:") for c in table.rows()[0])
    header = next(line for line in str(table).splitlines() if line.startswith("head  "))
    assert "±" in header
    one = multihead.read(model[0], TEXTS[:1], tokenizer=model[1], probe=False)
    assert "±" not in str(one) and not np.isfinite(one.error("entropy")).any()
