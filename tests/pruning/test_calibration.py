"""Calibration batches: their sizes, and the loss that fits the model."""

from __future__ import annotations

import numpy as np
import transformers as tf

from data.test_tokenizing import small_tokenizer
from families import FAMILIES, model_of
from multihead.data.batch import IGNORED
from multihead.pruning.calibration import calibration_batches
from small import llama

BY_NAME = {family.name: family for family in FAMILIES}


def documents(number: int, words: int = 20) -> list[str]:
    draw = np.random.default_rng(0)
    return [" ".join(draw.choice(list("abc"), words)) for _ in range(number)]


def test_little_text_is_cut_into_shorter_windows() -> None:
    tokenizer = small_tokenizer(pad_token="c")
    _, batches = calibration_batches(llama(), documents(1, 126), tokenizer)
    lengths = [batch.inputs["input_ids"].shape for batch in batches]
    # 64 positions: three windows, fewer than the eight that are wanted, so shorter ones
    assert lengths == [(2, 16)] * 4 + [(1, 16)]
    _, long = calibration_batches(llama(), documents(1, 126), tokenizer, context=64)
    assert [tuple(batch.inputs["input_ids"].shape) for batch in long] == [(1, 64)] * 2 + [(1, 4)]


def test_a_causal_model_is_scored_on_next_tokens() -> None:
    tokenizer = small_tokenizer(pad_token="c")
    name, (batch, *_) = calibration_batches(llama(), documents(9), tokenizer)
    assert name == "token loss"
    assert batch.targets is not None
    ids, length = batch.inputs["input_ids"], batch.inputs["input_ids"].shape[1]
    scored = batch.targets != IGNORED
    assert scored[:, : length - 2].all() and not scored[:, length - 2 :].any()
    assert batch.targets[:, : length - 2].equal(ids[:, 1 : length - 1])


def test_a_masked_model_is_scored_on_masked_tokens() -> None:
    model = tf.BertForMaskedLM(model_of(BY_NAME["bert"]).config).eval()
    tokenizer = small_tokenizer(pad_token="c", mask_token="b")
    _, batches = calibration_batches(model, documents(9), tokenizer)
    for batch in batches:
        assert batch.targets is not None
        scored = batch.targets != IGNORED
        assert scored.any(1).all()
        assert (batch.inputs["input_ids"][scored] == tokenizer.mask_token_id).all()
