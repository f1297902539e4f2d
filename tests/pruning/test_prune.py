"""Pruning from beginning to end, on the built-in model: in Python, and by the command."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers as tf
from typer.testing import CliRunner

import multihead
from multihead.cli import app
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
        ({"remove": 1, "layers": ["²"]}, "layers: '²' names no layer"),
        ({"remove": 40}, "remove=40: expected a share such as 20%"),
        (
            {"remove": 1, "layers": ["9"]},
            "layers: '9' names no layer; expected labels, numbers or ranges of L0 to L3",
        ),
        ({"remove": Plan(("L0.H77",))}, r"head 'L0\.H77' doesn't exist; did you mean"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], words: str) -> None:
    model, tokenizer = multihead.load_builtin()
    with pytest.raises(ValueError, match=words):
        prune(model, texts()[0], tokenizer=tokenizer, **{"context": 64} | given)


# the command


def run(*args: Any) -> Any:
    return CliRunner().invoke(app, ["prune", *map(str, args)], catch_exceptions=True)


@pytest.fixture
def two_texts(tmp_path: Path) -> list[Any]:
    for name, text in zip(("calibrate", "evaluate"), texts(), strict=True):
        (tmp_path / f"{name}.txt").write_text(text)
    return ["--calibrate", tmp_path / "calibrate.txt", "--evaluate", tmp_path / "evaluate.txt"]


def test_the_command_writes_a_model_that_loads(tmp_path: Path, two_texts: list[Any]) -> None:
    done = run(
        "--remove",
        "30%",
        *two_texts,
        "--save",
        tmp_path / "smaller",
        "--json",
        tmp_path / "report.json",
        "--tokens",
        3000,
    )
    assert done.exit_code == 0, done.output + str(done.exception)
    assert (
        "random" in done.output
        and "<- chosen" in done.output
        and "10 of 32 heads removed" in done.output
    )
    assert "perplexity:" in done.output and "95% interval" in done.output
    assert "loaded it again in a fresh process: multihead.load loads it" in done.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["plan"]["remove"]) == 10 and report["heads"] == [32, 22]
    smaller = multihead.load(tmp_path / "smaller")
    assert sum(p.numel() for p in smaller.parameters()) == report["parameters"][1]
    assert Plan.load(tmp_path / "smaller" / "plan.json").remove == tuple(report["plan"]["remove"])
    again = run(
        tmp_path / "smaller", "--remove", "2", *two_texts, "--criterion", "norm", "--tokens", 1000
    )  # again
    assert again.exit_code == 0 and "2 of 22 heads" in again.output


def test_the_command_takes_a_plan(tmp_path: Path, two_texts: list[Any]) -> None:
    (tmp_path / "plan.json").write_text(
        '{"kind": "uniform", "remove": ["L0.H0", "L1.H1", "L2.H2", "L3.H3"]}'
    )
    plan = tmp_path / "plan.json"
    done = run("--plan", plan, *two_texts[:2], "--compensate", "none")
    assert done.exit_code == 0, done.exception
    assert "4 of 32 heads removed (uniform; criterion given" in done.output
    assert "plain transformers loads it" in done.output


def test_either_text_may_come_from_standard_input(tmp_path: Path, two_texts: list[Any]) -> None:
    for name, other, args in (
        ("evaluate", "calibrate", two_texts[:2]),
        ("calibrate", "evaluate", two_texts[2:]),
    ):
        command = [
            "prune",
            "--remove",
            "2",
            "--criterion",
            "norm",
            "--tokens",
            "600",
            f"--{name}",
            "-",
            *map(str, args),
        ]
        done = CliRunner().invoke(app, command, input=(tmp_path / f"{name}.txt").read_text())
        assert done.exit_code == 0 and "perplexity:" in done.output, done.exception
        same = CliRunner().invoke(app, command, input=(tmp_path / f"{other}.txt").read_text())
        assert same.exit_code and "hold one" in str(same.exception)


def test_how_to_judge_is_tried_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_texts: list[Any]
) -> None:
    monkeypatch.setattr(
        "multihead.pruning.job.prune", lambda *args, **kwargs: pytest.fail("work began")
    )
    _, tokenizer = multihead.load_builtin()
    encoder = tf.BertModel(
        tf.BertConfig(
            hidden_size=24,
            num_attention_heads=3,
            num_hidden_layers=2,
            intermediate_size=20,
            vocab_size=len(tokenizer),
        )
    )
    encoder.save_pretrained(tmp_path / "encoder")
    tokenizer.save_pretrained(tmp_path / "encoder")
    done = run(tmp_path / "encoder", "--remove", 2, *two_texts)
    assert done.exit_code and "similarity" in str(done.exception), done.exception


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--remove", "3"], "--calibrate is missing"),
        (["--remove", "3", "--calibrate", "-", "--evaluate", "-"], "standard input is one text"),
        (
            ["--remove", "3", "--calibrate", "TEXT", "--evaluate", "TEXT"],
            "heads scored on the text that they are judged on",
        ),
        (["--remove", "3", "--calibrate", "TEXT", "--evaluate", "COPY"], "hold one"),
        (["--remove", "3", "--calibrate", "TEXT", "--save", "FULL"], "there is something already"),
    ],
)
def test_the_command_refuses_in_words(
    tmp_path: Path, args: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {
        "TEXT": tmp_path / "text.txt",
        "COPY": tmp_path / "copy.txt",
        "OTHER": tmp_path / "other.txt",
        "FULL": tmp_path,
    }
    for name, half in (("TEXT", 0), ("COPY", 0), ("OTHER", 1)):
        places[name].write_text(texts()[half])
    monkeypatch.chdir(tmp_path)
    done = run(*[places.get(arg, arg) for arg in args])
    assert done.exit_code and words in str(done.exception)
    assert sorted(os.listdir(tmp_path)) == ["copy.txt", "other.txt", "text.txt"]


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
