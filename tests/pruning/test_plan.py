"""Plans of each kind: what they take, what they may not, and the words of each refusal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from families import FAMILIES, batches_of, model_of
from multihead.models.site import find_sites
from multihead.pruning.plan import KINDS, Plan, count_to_remove, make_plans, query_groups
from multihead.pruning.surgery import remove_heads, survey_sites

BY_NAME = {family.name: family for family in FAMILIES}
SITES = find_sites(model_of(BY_NAME["llama"]))  # two layers of 3 groups of 2
NAMES = {site.name for site in SITES}


def scores(seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        site.name: torch.rand(site.num_heads, generator=draw, dtype=torch.float64) for site in SITES
    }


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 99), st.integers(1, 10), st.sampled_from(sorted(KINDS)))
def test_chosen_plans_are_what_their_kind_allows(seed: int, number: int, kind: str) -> None:
    refused, found = "", []
    try:
        found = make_plans(scores(seed), SITES, number, kind, NAMES)
    except ValueError as error:
        refused = str(error)
    if refused:
        assert kind != "any"
        assert "possible" in refused or "the nearest are" in refused
        return
    for plan in found:
        removed = plan.check(SITES, NAMES)
        taken = sum(map(len, removed.values()))
        assert abs(taken - number) <= {"any": 0, "even": 3, "groups": 1, "uniform": 1}[kind]
        assert 0 < taken < 12


def test_any_takes_the_lowest() -> None:
    values = scores(3)
    removed = make_plans(values, SITES, 4, "any", NAMES)[0].check(SITES, NAMES)
    gone = [float(values[name][h]) for name, heads in removed.items() for h in heads]
    left = [
        float(values[s.name][h])
        for s in SITES
        for h in range(6)
        if h not in removed.get(s.name, [])
    ]
    assert max(gone) < min(left)


def test_a_layer_keeps_a_head_where_its_family_needs_one() -> None:
    values = {SITES[0].name: torch.zeros(6), SITES[1].name: torch.ones(6)}
    removed = make_plans(values, SITES, 7, "any")[0].check(SITES, ())
    assert [len(removed[site.name]) for site in SITES] == [5, 2]
    assert (
        len(make_plans(values, SITES, 7, "any", NAMES)[0].check(SITES, NAMES)[SITES[0].name]) == 6
    )


def test_uniform_gives_all_ways_to_the_same_number() -> None:
    assert (
        len(make_plans(scores(0), SITES, 8, "uniform")) == 2
    )  # two of six heads: two groups of one, or one of two
    with pytest.raises(
        ValueError,
        match=(
            r"kind='uniform' can't leave 5 of 6 heads in each layer \(3 groups of 2\); the nearest "
            r"are "
            r"4 \(removing 33\.3%\)"
        ),
    ):
        make_plans(scores(0), SITES, 2, "uniform")


@pytest.mark.parametrize(
    ("kind", "remove", "words"),
    [
        (
            "groups",
            ["L0.H1"],
            r"kind='groups' removes whole groups, and L0\.H1 shares its key/value head with L0\.H0;"
            r" remove these too, or keep L0\.H1",
        ),
        (
            "even",
            ["L0.H1"],
            r"kind='even' leaves groups of one size, and L0 would keep 1, 2, 2 heads of its groups"
            r" of 2, 2, 2; keep 1 or 2 of each",
        ),
        (
            "uniform",
            ["L0.H0", "L0.H1"],
            r"leaves every layer the same numbers, and L0 would keep 4 heads in 2 groups, L1 6"
            r" in 3; keep 4 in 2 everywhere, or choose another kind",
        ),
        (
            "any",
            ["L0"],
            (
                r"removes all 6 heads of L0, without which a LlamaAttention can't run; keep at"
                r" least one of them, such as L0\.H0"
            ),
        ),
        ("any", ["L0", "L1"], "removes all heads of the model; keep at least one"),
        ("any", ["L0.H9"], r"head 'L0\.H9' doesn't exist; did you mean 'L0\.H\d'\?"),
    ],
)
def test_plans_that_cannot_be_say_what_could(kind: str, remove: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Plan(tuple(remove), kind).check(SITES, ())


def test_droppable_is_found_out() -> None:
    assert survey_sites(
        model_of(BY_NAME["llama"]), SITES, batches_of(BY_NAME["llama"], "none")[0]
    ) == (NAMES, NAMES)
    t5 = model_of(BY_NAME["t5"])
    sites = find_sites(t5)
    assert not survey_sites(t5, sites, batches_of(BY_NAME["t5"], "none")[0])[1]


def test_groups_of_a_pruned_site() -> None:
    model, batch = model_of(BY_NAME["llama"]), batches_of(BY_NAME["llama"], "none")[0]
    smaller = remove_heads(model, {SITES[0].name: [1, 4, 5]}, batch)
    assert query_groups(find_sites(smaller)[0]) == [[0], [1, 2]]


def test_labels_and_layers() -> None:
    assert Plan(("L1", "L0.H2", "L0.H0", "L0.H2")).by_site(SITES) == {
        SITES[0].name: [0, 2],
        SITES[1].name: [0, 1, 2, 3, 4, 5],
    }
    with pytest.raises(ValueError, match="kind='some': expected one of any, even, groups, uniform"):
        Plan(("L0.H0",), "some")


@pytest.mark.parametrize(
    ("given_", "keep", "number"),
    [
        ("20%", False, 54),
        (0.2, False, 54),
        ("54", False, 54),
        (54, False, 54),
        ("0.8", True, 54),
        ("80%", True, 54),
        ("216", True, 54),
    ],
)
def test_how_many(given_: str | float, keep: bool, number: int) -> None:
    assert count_to_remove(given_, 270, keep=keep) == number


@pytest.mark.parametrize(
    "given_", ["0", "100%", "270", "-3", "many", "", "0.0001", "inf", "-inf", "nan", "nan%", "2.6"]
)
def test_how_many_refuses(given_: str) -> None:
    with pytest.raises(
        ValueError, match=r"remove=.*: expected a share such as 20% or 0\.2, or a number of heads"
    ):
        count_to_remove(given_, 270)


def test_plan_files(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(Plan(("L0.H0", "L1.H1"), "even").to_json()))
    assert Plan.load(file) == Plan(("L0.H0", "L1.H1"), "even")
    file.write_text("{")
    with pytest.raises(ValueError, match="is not valid JSON"):
        Plan.load(file)
    file.write_text('{"remove": ["L0.H0", "L0.H0"]}')
    assert Plan.load(file).remove == ("L0.H0",)
    for odd, words in (
        ('{"remove": []}', '"remove" is empty'),
        ('{"remove": ["L0"], "kind": ["any"]}', r"kind=\['any'\]: expec"),
        ('{"remove": ["L0"], "kind": null}', "kind=None: expected"),
    ):
        file.write_text(odd)
        with pytest.raises(ValueError, match=words):
            Plan.load(file)
    file.write_text('{"remove": "L0.H0"}')
    with pytest.raises(ValueError, match=r'expected \{"remove": \[labels of heads'):
        Plan.load(file)
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        Plan.load(tmp_path / "none.json")
