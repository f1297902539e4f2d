"""The list of built-in statistics, the names of columns, and what a reading is asked for."""

from __future__ import annotations

import pytest

from multihead.reader.statistics import (
    columns,
    describe,
    is_relation,
    list_statistics,
    resolve_statistics,
    statistics_table,
)
from multihead.reader.statistics.base import RESERVED, Statistic
from multihead.reader.statistics.columns import BUILT_IN, PROBED, REQUESTABLE, is_description
from multihead.reader.statistics.masses import Mass
from multihead.reader.statistics.on_request import Nearest


def test_every_statistic_describes_itself() -> None:
    listed = list_statistics()
    names = [s.name for s in listed]
    assert len(set(names)) == len(names) and not RESERVED & set(names)
    for s in listed:
        assert s.formula and s.meaning and s.queries and s.cost, s.name
        low, high = s.range
        assert low is None or high is None or low < high, s.name
        assert is_description(s.to_dict()), s.name
        assert s.name in statistics_table() and s.formula in statistics_table()
        assert s.is_mass == isinstance(s, Mass), s.name


def test_every_built_in_statistic_is_measured_by_one_method() -> None:
    """But `logit`, which the residual stream measures, and those that wrap or watch passes."""
    for c in (*BUILT_IN, *REQUESTABLE.values()):
        s = c()
        methods = [m for m in (*s.methods, "run_pass") if s.implements(m)]
        assert len(methods) == 1 or s.name in ("logit", "effect_mean", "nearest"), (s.name, methods)


def test_columns() -> None:
    listed = columns()
    assert listed[:4] == ["entropy", "entropy_ratio", "confidence", "distance"]
    assert listed[4:7] == ["previous", "contribution:previous", "even:previous"]
    assert {f"probe:{name}" for name in PROBED} <= set(listed)
    assert len(listed) == len(set(listed))
    more = columns(["relation:nsubj", "contribution:class:x", "class:x", "entropy"])
    assert more == [*listed, "class:x", "contribution:class:x", "relation:nsubj"]


@pytest.mark.parametrize(
    ("column", "name", "formula"),
    [
        ("even:previous", "previous", "mass at i - 1"),
        ("contribution:class:x", "class:x", "mass on tokens of the class x"),
        ("relation:det", "relation:det", "how often the word that the dependent reads most is"),
        (
            "relation:^det",
            "relation:^det",
            "how often the word that the head reads most is its dep",
        ),
        ("anything", "anything", "user-defined"),
    ],
)
def test_describe(column: str, name: str, formula: str) -> None:
    found = describe(column)
    assert found.name == name
    assert found.formula.startswith(formula)


@pytest.mark.parametrize(
    ("column", "expected"),
    [("relation:nsubj", True), ("relation:^nsubj:pass", True), ("relation:X", False), ("x", False)],
)
def test_is_relation(column: str, expected: bool) -> None:
    assert is_relation(column) == expected


def test_resolve() -> None:
    assert [s.name for s in resolve_statistics()] == [c.name for c in BUILT_IN]
    nearest = Nearest(rows=7)
    chosen = resolve_statistics(["effect", nearest, "effect"])
    assert [s.name for s in chosen[len(BUILT_IN) :]] == ["effect", "nearest"]
    assert chosen[-1] is nearest
    assert resolve_statistics()[0] is not resolve_statistics()[0], "state is of one reading"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("coping", "statistics='coping': did you mean 'copying'"),
        ("entropy", "statistics='entropy': is always measured"),
        ("class:x", "expected some of copying, importance"),
    ],
)
def test_unknown_names(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        resolve_statistics(name)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, True),
        ({"formula": "f", "low": 0, "top": None, "mass": True}, True),
        ({"low": "0"}, False),
        ({"mass": "yes"}, False),
        ([], False),
    ],
)
def test_is_description(facts: object, expected: bool) -> None:
    assert is_description(facts) == expected


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ((0.0, 1.0), "0..1"),
        ((0.0, None), "0 or more"),
        ((None, 2.0), "2 or less"),
        ((None, None), "any number"),
    ],
)
def test_range_text(limits: tuple[float | None, float | None], text: str) -> None:
    s = Statistic()
    s.range = limits
    assert s.range_text == text
