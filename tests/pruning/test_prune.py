"""Pruning from beginning to end, on the built-in model."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers as tf

import multihead
from multihead.models.site import find_sites
from multihead.pruning.losses import compare_losses, evaluate
from multihead.pruning.plan import Plan, select_sites
from multihead.pruning.prune import prune

DOCS = Path(__file__).parents[2] / "docs"


@cache
def texts() -> tuple[str, str]:
    """Two texts of some thousand words, to score on and to judge on."""
    return (DOCS / "attention.md").read_text(), (DOCS / "reading.md").read_text()[:20000]


def test_steps_and_seeds() -> None:
    model, tokenizer = multihead.load_builtin()
    found = [
        prune(
            model,
            texts()[0],
            tokenizer=tokenizer,
            remove=8,
            criterion="fisher",
            steps=steps,
            context=64,
            tokens=700,
        )
        for steps in (1, 3, 3)
    ]
    config = tf.LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=8,
        head_dim=4,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
    )
    grouped = prune(
        tf.LlamaForCausalLM(config),
        texts()[0],
        tokenizer=tokenizer,
        remove=8,
        kind="uniform",
        steps=5,
        criterion="norm",
        context=64,
        tokens=700,
    )
    assert grouped.num_heads == (
        16,
        8,
    )  # the first step's one or two heads are no plan of this kind
    assert found[1].plan == found[2].plan and len(found[1].plan.remove) == 8
    drawn = [
        prune(
            model,
            texts()[0],
            tokenizer=tokenizer,
            remove=8,
            criterion="random",
            seed=seed,
            context=64,
            tokens=700,
        ).plan
        for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_layers_and_measures() -> None:
    model, tokenizer = multihead.load_builtin()
    pruned = prune(
        model,
        texts()[0],
        tokenizer=tokenizer,
        remove=3,
        layers=["2-3"],
        criterion="norm",
        context=64,
        tokens=2000,
    )
    assert {label[:2] for label in pruned.plan.remove} <= {"L2", "L3"}
    sites = find_sites(model)
    assert [select_sites(sites, given) for given in ("2-3", "L1", 2)] == [
        sites[2:],
        sites[1:2],
        sites[2:3],
    ]  # one, not its letters
    with pytest.raises(TypeError, match="remove is a list: expected a share, a number or a Plan"):
        prune(model, texts()[0], tokenizer=tokenizer, remove=["L0.H1"])  # type: ignore[arg-type]
    before, after = (
        evaluate(m, texts()[1], tokenizer=tokenizer, context=64) for m in (model, pruned.model)
    )
    change = compare_losses(before, after)
    assert change.low <= change.mean <= change.high and change.documents > 1
    assert json.loads(json.dumps(pruned.to_json()))["heads"] == list(pruned.num_heads)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, r"remove=None, keep=None: give one of them"),
        ({"remove": 1, "keep": 1}, "give one of them"),
        ({"remove": 1, "kind": "odd"}, "kind='odd': expected one of any, even, groups, uniform"),
        (
            {"remove": 1, "compensate": "glue"},
            "compensate='glue': expected one of refit, mean, none",
        ),
        ({"remove": 1, "criterion": "luck"}, "criterion='luck': expected one of taylor"),
        ({"remove": 1, "steps": 0}, "steps=0: expected a whole number from 1 on"),
        ({"remove": 1, "context": 0}, "context=0"),
        ({"remove": 1, "steps": 1.5}, r"steps=1\.5: expected a whole number from 1 on"),
        (
            {"remove": 4, "kind": "uniform", "layers": [0]},
            "removes the same numbers from every layer, and L1 isn't pruned; give another",
        ),
        (
            {"remove": Plan(("L0.H1",)), "kind": "groups"},
            r"kind='groups' with a plan \(of kind 'any'\): the plan names the heads",
        ),
        ({"remove": Plan(("L0.H1",)), "criterion": "norm"}, "criterion='norm' with a plan"),
        ({"remove": Plan(("L0.H1",)), "steps": 2}, "steps=2 with a plan"),
        ({"remove": 1, "layers": ["²"]}, "layers='²' names no layer"),
        ({"remove": 40}, "remove=40: expected a share such as 20%"),
        (
            {"remove": 1, "layers": ["9"]},
            "layers='9' names no layer; expected labels, numbers or ranges of L0 to L3",
        ),
        ({"remove": Plan(("L0.H77",))}, r"head 'L0\.H77' doesn't exist; did you mean"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], words: str) -> None:
    model, tokenizer = multihead.load_builtin()
    with pytest.raises(ValueError, match=words):
        prune(model, texts()[0], tokenizer=tokenizer, **{"context": 64} | given)


@pytest.mark.parametrize(
    "command",
    [
        lambda model: prune(model, "a text", remove=1),
        lambda model: multihead.share(model, "a text", num_kv_heads=1),
    ],
)
def test_what_is_no_model_is_said(command: Any) -> None:
    with pytest.raises(TypeError, match="model"):
        command("a folder")
