"""The probe: random tokens repeated once, without special tokens, the same every time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

import multihead
from multihead.reader.probe import draw_probe, takes_probe
from small import IDS, llama


@pytest.fixture(scope="module")
def builtin() -> Any:
    return multihead.load_builtin()


def test_the_probe_is_a_block_said_twice_without_special_tokens() -> None:
    model = llama()
    ids, select = draw_probe(model, special={1, 2})
    half = ids.shape[1] // 2
    assert (
        torch.equal(ids[:, :half], ids[:, half:])
        and not torch.isin(ids, torch.tensor([1, 2])).any()
    )
    assert all(
        len(set(row.tolist())) == half for row in ids
    )  # no token twice in a block: one right place for each row
    assert select.sum() == ids.numel() // 2 and not select[:, :half].any()
    assert torch.equal(draw_probe(model, special={1, 2})[0], ids)  # the same every time


def test_the_probe_starts_as_the_tokenizer_does(builtin: Any) -> None:
    model, tokenizer = builtin
    ids, _ = draw_probe(model, special={0, 1}, tokenizer=tokenizer)
    assert (ids[:, 0] == tokenizer.bos_token_id).all() and not (ids[:, 1:] <= 1).any()


def test_the_probe_runs_on_causal_text_models_only(minilm_dir: Any) -> None:
    assert multihead.read(llama(), [{"input_ids": IDS}]).count("probe:induction").all()
    model = tf.AutoModel.from_pretrained(minilm_dir)
    table = multihead.read(model, [{"input_ids": IDS}])
    assert not table.count("probe:induction").any()
    assert "causal models, and BertModel isn't" in table.reasons["probe:induction"]
    off = multihead.read(llama(), [{"input_ids": IDS}], probe=False)
    assert not off.count("probe:induction").any() and "turned off" in off.reasons["probe:induction"]


def test_which_models_take_it() -> None:
    assert takes_probe(llama())
    assert not takes_probe(torch.nn.TransformerEncoderLayer(8, 2))
