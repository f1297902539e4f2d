"""Reading sentence-transformers' models: the transformers model that they hold, on the texts that
they take.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

import multihead
from multihead.models import PassInputs, suspend
from multihead.reader.statistics import columns
from twins import as_before

TEXTS = ["The cat sat on the mat, and the cat sat.", "To be, or not to be.", "A short one."]


@pytest.fixture(scope="module")
def model(minilm_dir: Path) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Normalize, Pooling, Transformer

    inner = Transformer(str(minilm_dir))
    return SentenceTransformer(modules=[inner, Pooling(384), Normalize()], device="cpu").eval()


@pytest.fixture(scope="module")
def plain(minilm_dir: Path) -> Any:
    inner = AutoModel.from_pretrained(minilm_dir).eval()
    return multihead.read(inner, TEXTS, tokenizer=AutoTokenizer.from_pretrained(minilm_dir))


def same(table: Any, other: Any) -> None:
    assert [h.head for h in table.heads] == [h.head for h in other.heads]
    for column in columns():
        np.testing.assert_allclose(
            table.value(column), other.value(column), rtol=1e-5, atol=1e-7, err_msg=column
        )
        assert (table.count(column) == other.count(column)).all(), column


def test_texts_with_its_own_tokenizer(model: Any, plain: Any) -> None:
    before, want = as_before(model), model.encode(TEXTS)
    table = multihead.read(model, TEXTS)
    assert as_before(model) == before
    np.testing.assert_array_equal(model.encode(TEXTS), want)
    same(table, plain)
    assert (
        table.meta["documents"] == 3
        and table.meta["tokens"] == plain.meta["tokens"]
        and not table.meta["notes"]
    )


def test_encode_in_a_loop_of_ones_own(model: Any, plain: Any) -> None:
    want = model.encode(TEXTS)
    with multihead.reading(model, special_ids={101, 102}) as reading:
        np.testing.assert_allclose(model.encode(TEXTS), want, atol=1e-6)
    same(reading.table(), plain)


def test_features_in_a_loop_of_ones_own(model: Any, plain: Any) -> None:
    with torch.no_grad(), multihead.reading(model, special_ids={101, 102}) as reading:
        out = model(model.preprocess(TEXTS))
    assert out["sentence_embedding"].shape == (3, 384)
    same(reading.table(), plain)


def test_a_long_text_is_cut_and_said_so(model: Any) -> None:
    before, model.max_seq_length = model.max_seq_length, 64
    table = multihead.read(model, "word " * 400)
    model.max_seq_length = before
    assert "read the first 64" in table.meta["notes"][0] and table.meta["tokens"] == 64


def test_what_the_check_compares(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token and sentence embeddings, as it came and under reading: an attention that is off is
    caught.
    """
    from multihead.models import transformers as interface

    right = interface.AttentionCall
    changed = SimpleNamespace(lower=lambda *a, **kw: right.lower(*a, **kw)._replace(scale=0.9))
    monkeypatch.setattr(interface, "AttentionCall", changed)
    with pytest.raises(ValueError, match="gives another output under reading than before"):
        multihead.read(model, TEXTS)
    session = multihead.reading(model)
    with torch.no_grad(), session as reading:
        monkeypatch.setattr(interface, "AttentionCall", right)
        model(model.preprocess(TEXTS))
        batch = model.preprocess(TEXTS)
        with suspend(model):
            expected = reading.verifier.record(PassInputs(model, (batch,), {}))
        rows = {kept.name: len(kept.rows) for kept in expected.outputs}
        # of the rows of tokens those that are padding aren't compared
        assert rows == {
            "token_embeddings": int(batch["attention_mask"].sum()),
            "sentence_embedding": 3,
        }


def test_maps_and_heads(model: Any) -> None:
    found = multihead.read_maps(model, TEXTS[1], "L2.H3")
    assert found.tokens[0] == "[CLS]" and found.weights.shape == (len(found.tokens),) * 2
    plain = model.encode(TEXTS)
    with multihead.ablate_heads(model, ["L5.H1"]):
        off = model.encode(TEXTS)
    assert np.abs(off - plain).max() > 1e-3
    np.testing.assert_array_equal(model.encode(TEXTS), plain)


def ids_of(model: Any, run: Any) -> list[list[int]]:
    """The token ids of each text that the model inside is given, without padding."""
    seen: list[list[int]] = []

    def keep(module: Any, args: Any) -> None:
        seen.extend(row[row != 0].tolist() for row in args[0])

    # the model inside is called by its method forward, without its hooks
    words = model[0].auto_model.embeddings.word_embeddings
    handle = words.register_forward_pre_hook(keep)
    run()
    handle.remove()
    assert seen
    return sorted(map(list, {tuple(ids) for ids in seen}))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prompts": {"query": "Find what answers this: "}, "default_prompt_name": "query"},
        {"prompts": {"query": "Find what answers this: "}},  # none by default
        {"max_seq_length": 6},
        {"max_seq_length": 6, "side": "left"},
        {
            "max_seq_length": 9,
            "prompts": {"a": "passage: "},
            "default_prompt_name": "a",
            "side": "left",
        },
    ],
)
def test_a_reading_gets_the_tokens_that_encode_gets(
    minilm_dir: Path, settings: dict[str, Any]
) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    inner = Transformer(str(minilm_dir))
    prompts = {k: v for k, v in settings.items() if "prompt" in k}
    model = SentenceTransformer(modules=[inner, Pooling(384)], device="cpu", **prompts).eval()
    model.max_seq_length = settings.get("max_seq_length", 128)
    model.tokenizer.truncation_side = settings.get("side", "right")
    want = ids_of(model, lambda: model.encode(TEXTS))
    assert ids_of(model, lambda: multihead.read(model, TEXTS)) == want
    one = ids_of(model, lambda: model.encode(TEXTS[:1]))
    assert ids_of(model, lambda: multihead.read_maps(model, TEXTS[0], "L0.H0")) == one
    # another tokenizer than the model's own: its texts as they are
    other = AutoTokenizer.from_pretrained(minilm_dir)
    bare = other(TEXTS, truncation=True, max_length=model.max_seq_length)["input_ids"]
    assert ids_of(model, lambda: multihead.read(model, TEXTS, tokenizer=other)) == sorted(bare)


def test_embeddings_are_those_of_encode(minilm_dir: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    from multihead.pruning.similarity import embed

    parts = [Transformer(str(minilm_dir)), Pooling(384), Normalize()]
    model = SentenceTransformer(
        modules=parts, device="cpu", prompts={"q": "query: "}, default_prompt_name="q"
    )
    np.testing.assert_allclose(embed(model, TEXTS), model.encode(TEXTS), atol=1e-5)
