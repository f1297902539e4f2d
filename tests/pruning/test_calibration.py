"""Calibration batches: their sizes, and the loss that fits the model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as tf

from data.test_tokenizing import small_tokenizer
from families import FAMILIES, model_of
from multihead.data.batch import IGNORED
from multihead.pruning.calibration import ContrastiveBatch, calibration_batches
from small import llama

BY_NAME = {family.name: family for family in FAMILIES}


def documents(number: int, words: int = 20) -> list[str]:
    draw = np.random.default_rng(0)
    return [" ".join(draw.choice(list("abc"), words)) for _ in range(number)]


def test_little_text_is_cut_into_shorter_windows() -> None:
    tokenizer = small_tokenizer(pad_token="c")
    batches = calibration_batches(llama(), documents(1, 126), tokenizer)
    lengths = [batch.inputs["input_ids"].shape for batch in batches]
    # 64 positions: three windows, fewer than the eight that are wanted, so shorter ones
    assert lengths == [(2, 16)] * 4 + [(1, 16)]
    long = calibration_batches(llama(), documents(1, 126), tokenizer, context=64)
    assert [tuple(batch.inputs["input_ids"].shape) for batch in long] == [(1, 64)] * 2 + [(1, 4)]


def test_a_causal_model_is_scored_on_next_tokens() -> None:
    tokenizer = small_tokenizer(pad_token="c")
    (batch, *_) = calibration_batches(llama(), documents(9), tokenizer)
    assert batch.targets is not None
    ids, length = batch.inputs["input_ids"], batch.inputs["input_ids"].shape[1]
    scored = batch.targets != IGNORED
    assert scored[:, : length - 2].all() and not scored[:, length - 2 :].any()
    assert batch.targets[:, : length - 2].equal(ids[:, 1 : length - 1])


def test_a_masked_model_is_scored_on_masked_tokens() -> None:
    model = tf.BertForMaskedLM(model_of(BY_NAME["bert"]).config).eval()
    tokenizer = small_tokenizer(pad_token="c", mask_token="b")
    batches = calibration_batches(model, documents(9), tokenizer)
    for batch in batches:
        assert batch.targets is not None
        scored = batch.targets != IGNORED
        assert scored.any(1).all()
        assert (batch.inputs["input_ids"][scored] == tokenizer.mask_token_id).all()


def test_a_contrastive_loss_against_a_loop() -> None:
    model, tokenizer = model_of(BY_NAME["bert"]), small_tokenizer(pad_token="c")
    (batch, *_) = calibration_batches(model, documents(20), tokenizer)
    assert isinstance(batch, ContrastiveBatch) and batch.document is not None
    assert batch.document.tolist() == [*range(16)] * 2
    with torch.no_grad():
        total, count = batch.loss(model)
        hidden = model(**batch.inputs)["last_hidden_state"].double()
    means = []
    for row, mask in zip(hidden, batch.inputs["attention_mask"]):
        mean = row[mask.bool()].mean(0)
        means.append(mean / mean.norm())
    expected = 0.0
    for n in range(16):
        for one, others in ((means[n], means[16:]), (means[16 + n], means[:16])):
            scores = torch.stack([one @ other for other in others]) / 0.05
            expected -= float(scores.log_softmax(0)[n]) / 2
    assert count == 16 and float(total) == pytest.approx(expected, rel=1e-4)


def test_an_encoder_needs_documents() -> None:
    model, tokenizer = model_of(BY_NAME["bert"]), small_tokenizer(pad_token="c")
    with pytest.raises(
        ValueError,
        match="has no head that predicts tokens, so its heads are scored by telling documents apart,"
        " and the calibration text has 1 of 8 tokens or more; give at least two",
    ):
        calibration_batches(model, "a b c a b c a", tokenizer)
