"""The curve over shares of heads, measured and drawn."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path

import pytest
import transformers as tf

import multihead
from multihead.pruning import curve
from multihead.pruning.pruner import Pruner

DOCS = Path(__file__).parents[2] / "docs"


@cache
def texts() -> tuple[str, str]:
    """Two texts of some thousand words, to score on and to judge on."""
    return (DOCS / "attention.md").read_text(), (DOCS / "reading.md").read_text()[:20000]


@cache
def pruner() -> Pruner:
    model, tokenizer = multihead.load_builtin()
    return Pruner(model, texts()[0], tokenizer=tokenizer, context=64, tokens=6000)


def test_the_curve_is_measured_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(curve, "BATCHES", (1, 2))
    monkeypatch.setattr(curve, "TURNS", 1)
    points = curve.measure_curve(
        pruner(), "any", "fisher", "mean", lambda model: 3.0, shares=(0.01, 0.25, 0.5, 0.51)
    )
    assert [point.heads for point in points] == [
        32,
        24,
        16,
    ]  # a share of no head and one of the same heads are left out
    first, *rest = points
    for point in rest:
        left = point.heads / first.heads
        assert point.cache == left * first.cache  # every head has its own keys in this model
        assert point.parameters < first.parameters and point.arithmetic < first.arithmetic
        assert set(point.prefill) == set(point.step) == {1, 2}
    curve.save_curve(points, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    curve.save_curve(points, tmp_path / "curve.json")
    assert len(json.loads((tmp_path / "curve.json").read_text())) == 3
    assert sorted(os.listdir(tmp_path)) == ["curve.json", "curve.png"]


def test_a_curve_that_cannot_be_is_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    short = tf.GPT2LMHeadModel(
        tf.GPT2Config(n_embd=8, n_head=2, n_layer=1, n_positions=64, vocab_size=20)
    )
    with pytest.raises(
        ValueError, match="times are taken on 264 tokens, and the model has 64 positions"
    ):
        curve.require_curve(Path("a.json"), short)
    monkeypatch.setattr(curve, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="drawing needs matplotlib"):
        curve.require_curve(Path("a.png"), multihead.load_builtin()[0])
    curve.require_curve(Path("a.json"), multihead.load_builtin()[0])
