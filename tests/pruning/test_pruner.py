"""Scores, trials and surgery of one `Pruner` agree; what can't be pruned stays."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

import multihead
from data.test_tokenizing import small_tokenizer
from families import FAMILIES, model_of
from multihead.pruning.plan import Plan
from multihead.pruning.prune import prune
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


def test_michel_on_the_built_in_model() -> None:
    """Heads with the smallest |O_h . dL/dO_h| go: at 30% that costs less than random plans do,
    whatever stands in for them.
    """
    for compensate in ("none", "mean", "refit"):
        found = pruner().try_criteria(
            round(0.3 * pruner().num_heads), "any", ("taylor",), (compensate,)
        )
        taylor, random = (
            next(c for c in found if c.criterion == name) for name in ("taylor", "random")
        )
        assert taylor.loss < random.loss
        assert random.spread > 0


def test_compensation_helps() -> None:
    removed = pruner().make_plans(16, "any", "fisher")[0].by_site(pruner().sites)
    none, mean, refit = (
        pruner().loss(pruner().compensation(removed, how)) for how in ("none", "mean", "refit")
    )
    assert mean < none - 0.05 and refit < none - 0.05


def test_taps_and_surgery_give_the_same_loss() -> None:
    plan = pruner().make_plans(9, "even", "taylor_mean")[0]
    removed = plan.by_site(pruner().sites)
    expected = pruner().loss(pruner().compensation(removed, "refit"))
    smaller, _ = pruner().remove(plan, "refit")
    with torch.no_grad():
        pairs = [batch.loss(smaller) for batch in pruner().held_out]
    assert sum(float(a) for a, _ in pairs) / sum(b for _, b in pairs) == pytest.approx(
        expected, abs=1e-4
    )


def test_what_the_text_does_not_reach_stays_whole() -> None:
    """Text alone says nothing of the heads that look at pictures: once they scored 0 and went
    first, with NaN in their place.
    """
    tokenizer = multihead.load_builtin()[1]
    sizes: dict[str, Any] = {"intermediate_size": 40, "num_hidden_layers": 2}
    seeing = dict(
        hidden_size=40,
        num_attention_heads=5,
        image_size=12,
        patch_size=4,
        model_type="clip_vision_model",
        **sizes,
    )
    saying = dict(
        hidden_size=48,
        num_attention_heads=6,
        head_dim=8,
        vocab_size=len(tokenizer) + 1,
        model_type="llama",
        **sizes,
    )
    model = tf.LlavaForConditionalGeneration(
        tf.LlavaConfig(text_config=saying, vision_config=seeing, image_token_index=len(tokenizer))
    )
    pruned = prune(
        model,
        texts()[0],
        tokenizer=tokenizer,
        remove=8,
        criterion="taylor",
        context=64,
        tokens=1000,
    )
    assert (
        set(pruned.unprunable) == {"vision_tower.L0", "vision_tower.L1"}
        and len(pruned.plan.remove) == 8
    )
    assert not any(label.startswith("vision") for label in pruned.plan.remove)
    assert all(bool(p.isfinite().all()) for p in pruned.model.parameters())
    with pytest.raises(ValueError, match="the calibration text doesn't reach"):
        prune(
            model,
            texts()[0],
            tokenizer=tokenizer,
            remove=2,
            layers="vision_tower.L0",
            context=64,
            tokens=1000,
        )
    with pytest.raises(ValueError, match="the calibration text doesn't reach"):
        prune(
            model,
            texts()[0],
            tokenizer=tokenizer,
            remove=Plan(("vision_tower.L0.H1",)),
            context=64,
            tokens=1000,
        )


def test_sites_that_cannot_be_cut_stay_whole() -> None:
    """A norm over all heads in one layer keeps that layer as it is; the others are pruned."""
    model, tokenizer = multihead.load_builtin()
    model.model.layers[1].self_attn.q_norm = torch.nn.RMSNorm(192)
    found = Pruner(model, texts()[0], tokenizer=tokenizer, context=64, tokens=1000)
    assert found.num_heads == 24 and "q_norm normalises over all heads" in found.unprunable["L1"]
    assert not any(
        label.startswith("L1.") for label in found.make_plans(12, "any", "norm")[0].remove
    )
    with pytest.raises(ValueError, match="its q_norm normalises over all heads at once"):
        found.remove(Plan(("L1.H0",)), "none")


def test_encoders_are_scored_by_the_distance_from_their_outputs() -> None:
    model, tokenizer = model_of(next(f for f in FAMILIES if f.name == "bert")), small_tokenizer()
    draw = np.random.default_rng(0)
    texts = [" ".join(draw.choice(list("abc"), 20)) for _ in range(48)]
    scores = Pruner(model, texts, tokenizer=tokenizer).score(["fisher"]).by_site("fisher")
    assert all(float(value.min()) >= 0 and float(value.max()) > 0 for value in scores.values())
