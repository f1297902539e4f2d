"""Every known bug changes the output where it applies, and names only known findings."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from checks.seeds import SEEDS
from checks.test_definition import LATENT, projected, projected_latents
from multihead.checks import BUGS, Bug, Definition
from multihead.checks.definition import Projected, compute_definition
from multihead.checks.finding import BugName

NAMES = {value for name, value in vars(BugName).items() if not name.startswith("_")}
DEFINITIONS = [
    Definition(4, 4),
    Definition(4, 4, scale=1.0),
    Definition(4, 4, softcap=1.0),
    Definition(4, 4, rotary="half"),
    Definition(4, 2),
    LATENT,
]


def inputs_of(definition: Definition) -> Projected:
    if definition.latents is not None:
        return projected_latents()
    return projected(definition.num_kv_heads)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.description[:60])
def test_a_bug_changes_the_output(bug: Bug) -> None:
    allowed = torch.ones(5, 5).tril().bool()
    applied = 0
    for definition in DEFINITIONS:
        wrong = bug.put_into(definition)
        if wrong is None:
            continue
        inputs = inputs_of(definition)
        outs = (
            compute_definition(inputs, allowed, definition),
            compute_definition(inputs, allowed, wrong),
        )
        applied += not torch.allclose(*outs, atol=1e-3)
    assert applied, bug
    assert bug.name in NAMES and set(bug.explains) <= NAMES, bug
    assert bug.description.endswith(".") and bug.look


@pytest.mark.parametrize(
    "definition",
    [Definition(4, 4, rotary="half", softcap=1.0), replace(LATENT, softcap=1.0)],
    ids=["heads", "latents"],
)
def test_bugs_differ_from_each_other(definition: Definition) -> None:
    inputs, allowed = inputs_of(definition), torch.ones(5, 5).tril().bool()
    wrong = {
        bug.description: compute_definition(inputs, allowed, changed)
        for bug in BUGS
        if (changed := bug.put_into(definition))
    }
    for (one, out), (other, other_out) in itertools.combinations(wrong.items(), 2):
        assert not torch.allclose(out, other_out, equal_nan=True), (one, other)


def test_every_named_bug_is_put_into_some_code() -> None:
    """All but those that only follow from others or need `causal=True`."""
    exempt = {
        "mask ignored",
        "attends to future tokens",
        "weights don't sum to one",
        "mask doesn't hide keys",
        "weights don't depend on the input",
        "mask value doesn't fit float16",
        "bias by distance is wrong",
    }
    assert NAMES - {seed.bug for seed in SEEDS} == exempt
