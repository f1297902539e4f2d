"""Ready-made model inputs: tensors, arrays, lists, one sequence or several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import multihead
from multihead.data.ready import ready_inputs
from small import llama

IDS = [[1, 5, 9, 7, 5, 9]]
MASK = [[1, 1, 1, 1, 1, 1]]
TENSOR = torch.tensor(IDS)

FORMS: dict[str, Any] = {
    "lists": {"input_ids": IDS, "attention_mask": MASK},
    "flat lists": {"input_ids": IDS[0], "attention_mask": MASK[0]},
    "arrays": {"input_ids": np.array(IDS), "attention_mask": np.array(MASK)},
    "rows of arrays": {"input_ids": [np.array(IDS[0])], "attention_mask": MASK},
    "a flat array": {"input_ids": np.array(IDS[0]), "attention_mask": np.array(MASK[0])},
    "a flat tensor": {"input_ids": TENSOR[0], "attention_mask": torch.tensor(MASK[0])},
    "in a list": [{"input_ids": IDS}],
    "with flags": {"input_ids": IDS, "output_attentions": True, "return_dict": False},
    "lists of booleans": {"input_ids": IDS, "attention_mask": [[True] * 6]},
}


@pytest.mark.parametrize("form", FORMS)
def test_what_tokenizers_and_data_sets_give_is_a_batch(form: str) -> None:
    model = llama()
    table = multihead.read(model, FORMS[form])
    want = multihead.read(model, [{"input_ids": TENSOR}])
    assert table.meta["tokens"] == 6 and table.meta["documents"] == 1
    np.testing.assert_array_equal(table.value("entropy"), want.value("entropy"))
    found = multihead.read_maps(model, FORMS[form], "L0.H0")
    assert found.tokens == [str(i) for i in IDS[0]]


def test_the_encoding_of_a_tokenizer() -> None:
    model, tokenizer = multihead.load_builtin()
    for given in (tokenizer("the cat"), tokenizer(["the cat", "the dog"][:1])):
        inputs = ready_inputs(given, 0, model)
        assert inputs["input_ids"].shape == inputs["attention_mask"].shape == (1, 4)


def test_what_stays_as_it_is() -> None:
    picture = torch.zeros(1, 3, 4, 4)
    inputs = ready_inputs(
        {"input_ids": [5, 6, 7], "pixel_values": picture, "labels": torch.tensor(1), "names": ["a"], "n": None},
        0, llama(),
    )  # fmt: skip
    assert inputs["input_ids"].shape == (1, 3) and inputs["pixel_values"] is picture
    assert inputs["labels"].ndim == 0 and inputs["names"] == ["a"] and inputs["n"] is None


@pytest.mark.parametrize(
    ("batch", "error", "words"),
    [
        (
            {"input_ids": [[1, 2], [1, 2, 3]]}, ValueError,
            r"texts\[2\]\['input_ids'\] has sequences of 2 to 3 numbers, which make no tensor: give"
            r" them padded, as tokenizer\(texts, padding=True, return_tensors='pt'\) does",
        ),
        ({}, ValueError, r"texts\[2\] is an empty dict"),
        ({"input_ids": []}, ValueError, r"texts\[2\]\['input_ids'\] holds no token ids"),
        ({"input_ids": [[]]}, ValueError, r"texts\[2\]\['input_ids'\] holds no token ids"),
        ({"input_ids": ["a", "b"]}, ValueError, r"expected whole numbers, \[B, L\]"),
        ({"input_ids": [[0.5]]}, ValueError, r"expected whole numbers, \[B, L\]"),
        ({"prompt": "a"}, ValueError, r"texts\[2\] is a dict with 'prompt', and no model inputs"),
        (TENSOR, TypeError, r"texts\[2\] is a Tensor: expected a list of strings or of conversations"),
        (IDS[0], TypeError, r"dicts of model inputs such as \{'input_ids': torch.tensor\(\[\[1, 2"),
    ],
)  # fmt: skip
def test_what_is_no_batch(batch: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ready_inputs(batch, 2, llama())


def test_the_advice_for_ragged_lists_leads_somewhere(minilm_dir: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = (
        AutoModel.from_pretrained(minilm_dir),
        AutoTokenizer.from_pretrained(minilm_dir),
    )
    texts = ["the cat", "the cat and the dog"]
    with pytest.raises(ValueError, match="give them padded"):
        multihead.read(model, tokenizer(texts))
    want = multihead.read(model, texts, tokenizer=tokenizer)
    padded = tokenizer(texts, padding=True, return_tensors="pt")
    each = [tokenizer(text) for text in texts]
    for given in (padded, each):
        table = multihead.read(model, given, tokenizer=tokenizer)
        np.testing.assert_allclose(table.value("entropy"), want.value("entropy"), rtol=1e-5)


def test_a_model_of_sentence_transformers_takes_them(minilm_dir: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    model = SentenceTransformer(modules=[Transformer(str(minilm_dir)), Pooling(384)], device="cpu")
    given = dict(model.tokenizer("the cat", return_tensors="pt"))
    table = multihead.read(model, given)
    want = multihead.read(model, "the cat")
    np.testing.assert_allclose(table.value("entropy"), want.value("entropy"), rtol=1e-5)
    multihead.read_maps(model, given, "L0.H0")
