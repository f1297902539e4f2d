"""Two real checkpoints, read and compared with transformers' own eager attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

import multihead
from families import Batch, Family, real_outputs, twin
from oracles.compare import differences
from oracles.statistics import MASSES

pytestmark = pytest.mark.models

SENTENCES = (
    "The cat sat on the mat, and the dog sat on the cat.",
    "Attention is a weighted sum.",
    (
        "In the beginning there was one head; in the end there were twelve heads, and each head"
        " read the other heads."
    ),
    "No.",
)
STORY = """The old harbour of Marnstad had two lights. The first light stood on the pier, and the second light stood on
the hill behind the church. Every evening Captain Holm walked from the pier to the hill, lit the second light, and
walked back to the pier to light the first light. "One light tells you where the harbour is," Captain Holm used to say,
"and two lights tell you how to come in." When Captain Holm died, the council of Marnstad lit one light only, and in
the first autumn storm the ship of the council, coming home"""


@pytest.fixture(scope="module")
def minilm(minilm_dir: Path) -> tuple[Family, Any, list[Batch], frozenset[int]]:
    model = tf.AutoModel.from_pretrained(minilm_dir).eval()
    tokenizer = tf.AutoTokenizer.from_pretrained(minilm_dir)
    parts = (SENTENCES[:3], SENTENCES[3:])
    batches = [dict(tokenizer(list(part), return_tensors="pt", padding=True)) for part in parts]
    assert not batches[0]["attention_mask"].all()
    family = Family("minilm", lambda: model, "<parent>.output.dense", "encoder")
    return family, model, batches, frozenset({tokenizer.cls_token_id, tokenizer.sep_token_id})


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> tuple[Family, Any, list[Batch], frozenset[int]]:
    given = dict(gguf_file=smollm2_gguf.name)
    model = tf.AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, dtype=torch.float32, **given
    ).eval()
    tokenizer = tf.AutoTokenizer.from_pretrained(smollm2_gguf.parent, **given)
    ids = tokenizer(STORY, return_tensors="pt")["input_ids"]
    assert 120 <= ids.shape[1] <= 160
    commas = frozenset(
        tokenizer.convert_tokens_to_ids([",", "."])
    )  # the text has no special token: these stand in
    return Family("smollm2", lambda: model, "o_proj"), model, [{"input_ids": ids}], commas


@pytest.mark.parametrize("name", ["minilm", pytest.param("smollm2", marks=pytest.mark.slow)])
def test_real_model(name: str, request: pytest.FixtureRequest) -> None:
    family, model, batches, special = request.getfixturevalue(name)
    table = multihead.read(model, batches, special_ids=set(special), probe=False)
    found = differences(table, twin(family, model, batches, special))
    assert not found, "\n".join([f"{len(found)} differences", *found[:20]])
    assert len(table.rows()) == {"minilm": 6 * 12, "smollm2": 30 * 9}[name]
    assert all(
        (table.count(mass) > 0).all() for mass in MASSES if (name, mass) != ("smollm2", "next")
    )
    for batch in batches:
        plain = real_outputs(model, batch)
        with multihead.reading(model, verify=False):  # this test compares, not the reading itself
            under_reading = real_outputs(model, batch)
        np.testing.assert_allclose(under_reading, plain, rtol=0, atol=1e-4 * np.abs(plain).max())
