"""Values that another projection computes than its name says; positions hide it from the search."""

from __future__ import annotations

import pytest

import multihead
from checks.mutation import build
from checks.operators import PUBLIC
from multihead.checks.finding import BugName


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("buckets", "q, k, v = (shape", "q, v, k = (shape"),
        ("buckets", "q, k, v = (shape", "v, k, q = (shape"),
        ("relative_values", "self.q_proj, self.k_proj", "self.k_proj, self.q_proj"),
        ("score_mod", "q, k, v = (", "q, v, k = ("),
    ],
)
def test_swapped_projections_are_named(name: str, old: str, new: str) -> None:
    source = (PUBLIC / f"{name}.py").read_text()
    before, _, code = source.partition("class ")
    assert old in code
    at = code.index(old, code.index("def forward"))
    changed = f"{before}class {code[:at]}{code[at:].replace(old, new, 1)}"
    report = multihead.check(build(name, changed))
    assert report.bugs == {BugName.PROJECTIONS}, report


def test_matrices_without_such_names_may_be_any() -> None:
    source = (PUBLIC / "buckets.py").read_text().replace("q, k, v = (shape", "q, v, k = (shape")
    for old, new in (("self.q", "self.a"), ("self.k", "self.b"), ("self.v", "self.c")):
        source = source.replace(f"{old},", f"{new},").replace(f"{old})", f"{new})")
    assert multihead.check(build("buckets", source)).verdict != "wrong"
