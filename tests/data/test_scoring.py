"""Which loss a model has, and targets for it; tests/pruning/test_evaluate.py has its values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from data.test_tokenizing import small_tokenizer
from families import FAMILIES, model_of
from multihead.data.batch import IGNORED
from multihead.data.scoring import (
    OUTPUT_LOSS,
    NoLossError,
    find_loss,
    require_loss,
    scored_batch,
    vocab_size,
)
from multihead.data.windows import Window
from small import llama

BY_NAME = {family.name: family for family in FAMILIES}


def windows(*texts: str, **options: Any) -> list[Window]:
    tokenizer = small_tokenizer(**options)
    rows = [tokenizer(text)["input_ids"] for text in texts]
    return [Window(ids, 0, len(ids)) for ids in rows]


@pytest.mark.parametrize("special", [True, False])
def test_next_tokens_are_targets_but_special_ones_at_the_end(special: bool) -> None:
    tokenizer = small_tokenizer(special=special, pad_token="c")
    batch = scored_batch("token loss", tokenizer, windows("a b c", "b", special=special))
    assert batch.targets is not None
    expected = [[2, 3, 4, IGNORED, IGNORED], [3, IGNORED, IGNORED, IGNORED, IGNORED]]
    if not special:  # nothing comes before the first token
        expected = [[3, 4, IGNORED], [IGNORED] * 3]
    assert batch.targets.tolist() == expected
    assert batch.valid is not None and batch.valid.equal(batch.inputs["attention_mask"].bool())


def test_the_loss_of_a_model_is_found_out() -> None:
    tokenizer = small_tokenizer(pad_token="c")
    assert find_loss(llama(), tokenizer, windows("a b")) == "token loss"
    bert = model_of(BY_NAME["bert"])
    assert find_loss(bert, tokenizer, windows("a b")) == OUTPUT_LOSS
    with pytest.raises(NoLossError, match="BertModel has no head that predicts tokens"):
        require_loss(OUTPUT_LOSS, bert, None)
    require_loss(OUTPUT_LOSS, bert, bert)
    assert find_loss(model_of(BY_NAME["t5"]), tokenizer, windows("a b")) == OUTPUT_LOSS
    (labelled,) = (window._replace(label=1) for window in windows("a b"))
    assert find_loss(bert, tokenizer, [labelled]) == "loss on labels"
    with pytest.raises(
        ValueError, match="some texts have a label and others have none; give one with each"
    ):
        find_loss(bert, tokenizer, [labelled, *windows("a b")])
    (pair,) = (window._replace(target=[2, 3]) for window in windows("a b"))
    with pytest.raises(ValueError, match="LlamaForCausalLM is no encoder-decoder that generates"):
        find_loss(llama(), tokenizer, [pair])
    broken = llama()
    broken.model.embed_tokens.weight.data[2] = torch.inf
    with pytest.raises(ValueError, match="gives logits that are nan or infinite: expected finite"):
        find_loss(broken, tokenizer, windows("a b"))


def test_the_vocabulary_s_size() -> None:
    assert vocab_size(llama(), 7) == llama().config.vocab_size
    assert vocab_size(nn.Linear(2, 2), 7) == 7
