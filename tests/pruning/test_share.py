"""Sharing keys and values from beginning to end, by hand and by the command."""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import multihead
from families import FAMILIES, batches_of, model_of
from multihead.cli import app
from multihead.models.site import find_sites
from multihead.pruning.plan import Plan
from pruning.sharing import share_weights

DOCS = Path(__file__).parents[2] / "docs"


@cache
def texts() -> tuple[str, str]:
    return (DOCS / "attention.md").read_text(), (DOCS / "reading.md").read_text()[:12000]


@pytest.fixture
def two_texts(tmp_path: Path) -> list[Any]:
    for name, text in zip(("calibrate", "evaluate"), texts(), strict=True):
        (tmp_path / f"{name}.txt").write_text(text)
    return [
        "--calibrate",
        tmp_path / "calibrate.txt",
        "--evaluate",
        tmp_path / "evaluate.txt",
        "--tokens",
        2000,
    ]


def run(*args: Any) -> Any:
    return CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=True)


def test_sharing_leaves_a_plain_grouped_model(tmp_path: Path) -> None:
    model, tokenizer = multihead.load_builtin()
    merged = multihead.share(model, texts()[0], tokenizer=tokenizer, num_kv_heads=2, tokens=1000)
    assert merged.loads_in_transformers and merged.num_kv_heads == (32, 8)
    assert {site.slices().num_kv_heads for site in find_sites(merged.model)} == {2}
    assert merged.model.config.num_key_value_heads == 2 and model.config.num_key_value_heads == 8
    names = [site.head_label(h) for site in find_sites(merged.model) for h in range(site.num_heads)]
    assert sorted(names) == sorted(
        site.head_label(h) for site in find_sites(model) for h in range(8)
    )
    merged.model.save_pretrained(tmp_path / "it")
    plain = type(model).from_pretrained(tmp_path / "it")
    ids = tokenizer("Heads that share keys and values.", return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(
            plain(**ids).logits, merged.model(**ids).logits, rtol=0, atol=1e-4
        )


def test_methods_in_their_order() -> None:
    """Of the ways to share, fitted ones leave the layers nearer to what they were than pooling
    does.
    """
    model, tokenizer = multihead.load_builtin()
    errors = {}
    for method, refit in (("svd", True), ("aligned", False), ("mean", False)):
        merged = multihead.share(
            model,
            texts()[0],
            tokenizer=tokenizer,
            num_kv_heads=4,
            method=method,
            refit=refit,
            tokens=1500,
            layers=["1-2"],
        )
        assert set(merged.errors) == {"L1", "L2"} and not merged.loads_in_transformers
        errors[method] = sum(merged.errors.values())
    assert errors["svd"] < errors["aligned"] < errors["mean"]


def test_layers_are_the_sites_that_were_named() -> None:
    family = next(f for f in FAMILIES if f.name == "bart")
    model, batches = model_of(family), batches_of(family, "none")
    found = share_weights(model, 2, batches, layers=["decoder.L0.cross"], refit=False)
    assert [one.label for one in found] == ["decoder.L0.cross"]  # and not the encoder's layer 0


def test_heads_that_share_unevenly_are_not_shared_again() -> None:
    model, tokenizer = multihead.load_builtin()
    grouped = multihead.share(
        model, texts()[0], tokenizer=tokenizer, num_kv_heads=4, method="mean", tokens=500
    ).model
    uneven = multihead.prune(
        grouped,
        texts()[0],
        tokenizer=tokenizer,
        remove=Plan(("L1.H0",)),
        compensate="none",
        context=64,
        tokens=700,
    ).model
    share = partial(multihead.share, uneven, texts()[0], tokenizer=tokenizer, num_kv_heads=2)
    with pytest.raises(
        ValueError, match=r"share its key/value heads unevenly.*; share first and prune then"
    ):
        share(method="mean", tokens=500)
    found = share(method="mean", tokens=500, layers=["L0", "2-3"])
    assert set(found.errors) == {"L0", "L2", "L3"}


def test_the_command_shares_and_writes(tmp_path: Path, two_texts: list[Any]) -> None:
    done = run(
        "share",
        "--num-kv-heads",
        1,
        *two_texts,
        "--save",
        tmp_path / "smaller",
        "--json",
        tmp_path / "report.json",
    )
    assert done.exit_code == 0, done.output + str(done.exception)
    assert "32 key/value heads become 4" in done.output
    assert "plain transformers loads it" in done.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["evaluation"]["after"] > report["evaluation"]["before"]
    assert json.loads((tmp_path / "smaller" / "sharing.json").read_text())["key/value heads"] == [
        32,
        4,
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "calibrate.txt",
        "evaluate.txt",
        "report.json",
        "smaller",
    ]
    assert multihead.load(tmp_path / "smaller").config.num_key_value_heads == 1


def test_too_little_text_is_said() -> None:
    model, tokenizer = multihead.load_builtin()
    with pytest.raises(
        ValueError, match=r"texts holds \d tokens, too few to fit anything on; give at least 64"
    ):
        multihead.share(model, "Heads.", tokenizer=tokenizer, num_kv_heads=4)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "--num-kv-heads is missing: expected a number from 1 on"),
        (["--num-kv-heads", "0"], "--num-kv-heads 0: expected a number from 1 on"),
        (["--num-kv-heads", "3", "--calibrate", "TEXT"], "num_kv_heads=3"),
        (
            ["--num-kv-heads", "8", "--calibrate", "TEXT"],
            "every chosen layer has that many key/value heads already",
        ),
        (["--num-kv-heads", "2"], "--calibrate is missing"),
        (
            ["--num-kv-heads", "2", "--calibrate", "TEXT", "--tokens", "0"],
            "tokens=0: expected at least 1",
        ),
        (["--num-kv-heads", "2", "--calibrate", "TEXT", "--method", "glue"], "method='glue'"),
    ],
)
def test_the_command_refuses_in_words(tmp_path: Path, args: list[str], words: str) -> None:
    (tmp_path / "text.txt").write_text(texts()[0][:3000])
    done = run("share", *[tmp_path / "text.txt" if arg == "TEXT" else arg for arg in args])
    assert done.exit_code and words in str(done.exception), done.exception
