"""Mutants of right attention are wrong; the tool that makes them, and tells which are equivalent."""

from __future__ import annotations

import ast

import pytest

from checks.mutation import (
    CRASHES,
    EQUIVALENT,
    NAMES,
    PAGE,
    build,
    compare,
    draw,
    judge,
    judge_all,
    table,
)
from checks.operators import OPERATORS, PUBLIC, mutants


@pytest.mark.parametrize(
    ("operator", "before", "after"),
    [
        ("swap axes", "x.permute(0, 2, 1)", "x.permute(2, 0, 1)"),
        ("swap axes", "einsum('bid,bjd->bij', q, k)", "einsum('bid,bjd->bji', q, k)"),
        ("change transpose", "k.mT", "k"),
        ("drop factor", "a * scale", "a"),
        ("wrong scale", "n ** -0.5", "n ** 0.5"),
        ("shift mask", "m.tril(1)", "m.tril(1 + 1)"),
        ("shift mask", "i < j", "i <= j"),
        ("invert mask", "~mask", "mask"),
        ("drop mask", "s.masked_fill(m, -1)", "s"),
        ("hide by zero", "float('-inf')", "0.0"),
        ("change dim", "s.softmax(-1)", "s.softmax(-2)"),
        ("reuse projection", "(self.q(x), self.k(x))", "(self.q(x), self.q(x))"),
        ("drop term", "x + y", "x"),
        ("negate", "x + y", "x - y"),
        ("drop call", "self.norm(x)", "x"),
        ("pair heads", "k.repeat_interleave(2, 1)", "torch.cat([k] * 2, 1)"),
        ("keep dropout", "self.drop(x)", "torch.nn.functional.dropout(x, 0.1)"),
    ],
)
def test_each_operator(operator: str, before: str, after: str) -> None:
    node = ast.parse(before, mode="eval").body
    changed = [ast.unparse(ast.fix_missing_locations(n)) for n in OPERATORS[operator](node)]
    assert after in changed and before not in changed


def test_mutants_are_texts_that_differ() -> None:
    found = mutants("query_memory")
    texts = {mutant.source for mutant in found}
    original = ast.unparse(ast.parse((PUBLIC / "query_memory.py").read_text()))
    assert len(texts) == len(found) > 40 and original not in texts
    assert len({mutant.operator for mutant in found}) >= 9


def test_equivalence_is_that_of_outputs() -> None:
    source = (PUBLIC / "low_rank.py").read_text()

    def kind(old: str, new: str) -> str:
        assert old in source
        changed = build("low_rank", source.replace(old, new))
        return compare(build("low_rank", source), changed)

    assert kind("k.mT", "k.transpose(-2, -1)") == EQUIVALENT
    assert kind("k.mT * q.shape", "k.mT * k.shape") == EQUIVALENT
    assert kind("-0.5", "-0.4999") == ""
    assert kind("softmax(-1)", "softmax(-2)") == ""
    assert kind("k.mT", "k") == "can't run"


# Some of those that are drawn for the page: the file, the number of the draw, and the verdict.
SAMPLE = [
    ("alibi", 1, "wrong"),
    ("audio", 1, "wrong"),
    ("cache_object", 4, "wrong"),
    ("einops_context", 3, "wrong"),
    ("heads_third", 1, "wrong"),
    ("incremental", 2, "wrong"),
    ("layer_past", 1, "wrong"),
    ("low_rank", 1, "wrong"),
    ("multi_query", 3, "wrong"),
    ("null_key", 3, "wrong"),
    ("query_memory", 3, "wrong"),
    ("score_mod", 0, "wrong"),
    ("shared_linear", 2, "wrong"),
    ("sinks", 3, "wrong"),
    ("buckets", 2, "wrong"),
    ("post_norm", 3, "wrong"),
    ("talking_heads", 2, "wrong"),
    ("talking_heads", 4, "wrong"),
    ("heads_third", 0, EQUIVALENT),
    ("query_memory", 2, EQUIVALENT),
    ("segment_biases", 1, EQUIVALENT),
]


@pytest.mark.parametrize(("name", "number", "verdict"), SAMPLE)
def test_a_sample_of_mutants(name: str, number: int, verdict: str) -> None:
    result = judge(draw(name)[number])
    assert result.verdict == verdict, result


@pytest.mark.slow
def test_those_of_the_page() -> None:
    results = judge_all([mutant for name in NAMES for mutant in draw(name)])
    counted = [each for each in results if each.verdict not in (EQUIVALENT, CRASHES)]
    wrong = sum(each.verdict == "wrong" for each in counted)
    assert wrong >= 0.95 * len(counted) and len(counted) >= 120
    assert not [each for each in counted if each.verdict == "right"]
    equivalent = [each.found for each in results if each.verdict == EQUIVALENT]
    # A padding mask whose True means the opposite of its name gives the same outputs of its masks.
    assert not [found for found in equivalent if found[:6] == "wrong:" and "inverted" not in found]
    page = PAGE.read_text().splitlines()
    all_drawn = table(results, "file", lambda mutant: mutant.name).splitlines()[-1]
    assert page.count(all_drawn) == 2, "write it again: mutation.py --write"
