"""`multihead.read`: texts and batches, the probe, and words for what can't be read."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import multihead
from families import FAMILIES, model_of
from small import IDS, llama


@pytest.fixture(scope="module")
def builtin() -> Any:
    return multihead.load_builtin()


def test_texts_are_what_their_ids_are(builtin: Any) -> None:
    model, tokenizer = builtin
    texts = ["It is a truth universally acknowledged.", "The cat and the cat and the dog."]
    together = multihead.read(model, texts, tokenizer=tokenizer)
    one_by_one = multihead.read(model, texts, tokenizer=tokenizer, batch_size=1)
    by_ids = multihead.read(
        model, [dict(tokenizer(t, return_tensors="pt")) for t in texts], special_ids={0, 1}
    )
    for other in (one_by_one, by_ids):
        assert other.meta["tokens"] == together.meta["tokens"] and other.meta["documents"] == 2
        for column in together.columns:
            if "probe" not in column:
                assert other.value(column) == pytest.approx(
                    together.value(column), rel=1e-4, abs=1e-5, nan_ok=True
                ), column


def test_a_column_of_a_data_frame_holds_texts(builtin: Any) -> None:
    import numpy as np
    import pandas as pd

    model, tokenizer = builtin
    texts = ["the cat and the dog", "a cat and a hat"]
    tables = [
        multihead.read(model, t, tokenizer=tokenizer)
        for t in (texts, tuple(texts), np.array(texts), pd.Series(texts))
    ]
    assert len({tuple(t.value("entropy")) for t in tables}) == 1


def test_a_text_beyond_the_positions_is_cut_with_a_note(builtin: Any) -> None:
    model, tokenizer = builtin
    table = multihead.read(
        model, "a long and winding road " * 400, tokenizer=tokenizer, probe=False
    )
    assert table.meta["tokens"] == model.config.max_position_embeddings
    assert any("read the first" in note for note in table.meta["notes"])


def test_a_model_inside_a_module_of_ones_own() -> None:
    """No config at the top, another signature, inputs by position: the sites inside are read all
    the same.
    """

    class Classifier(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = llama().model, torch.nn.Linear(24, 2)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(words).last_hidden_state[:, -1])

    table = multihead.read(Classifier(), [{"words": IDS}])
    want = multihead.read(llama().model, [{"input_ids": IDS}], probe=False)
    assert [h.site for h in table.heads] == [h.site for h in want.heads]
    assert [h.head for h in table.heads] == [h.head for h in want.heads]
    for column in want.columns:
        assert table.value(column) == pytest.approx(want.value(column), rel=1e-6, nan_ok=True), (
            column
        )


def test_an_encoder_decoder_reads_a_text_on_both_sides() -> None:
    family = next(f for f in FAMILIES if f.name == "t5")
    model = model_of(family)

    words = {
        word: 2 + n
        for n, word in enumerate(["so", "it", "is", "a", "text", "of", "words", "<pad>"])
    }
    tokenizer = tf.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words)), pad_token="<pad>"
    )
    tokenizer.backend_tokenizer.pre_tokenizer = Whitespace()
    table = multihead.read(model, "so it is a text of words", tokenizer=tokenizer)
    assert {h.head.rpartition(".")[0] for h in table.heads} == {
        "encoder.L0",
        "encoder.L1",
        "decoder.L0",
        "decoder.L0.cross",
        "decoder.L1",
        "decoder.L1.cross",
    }
    assert table.count("norm").tolist() == [7] * len(table.heads)
    assert any("both sides" in note for note in table.meta["notes"])


@pytest.mark.parametrize(
    ("texts", "options", "error", "words"),
    [
        ("", {"tokenizer": "builtin"}, ValueError, ["empty"]),
        ([], {"tokenizer": "builtin"}, ValueError, ["texts=[]", "at least one"]),
        (iter([]), {}, ValueError, ["texts is empty"]),
        ("text", {}, ValueError, ["tokenizer is None", "AutoTokenizer"]),
        ([IDS], {}, TypeError, ["texts[0] is a Tensor", "input_ids"]),
        ([{"input_ids": IDS}, 3], {}, TypeError, ["texts[1] is a int"]),
    ],
    ids=["empty", "none", "no batches", "no tokenizer", "tensor", "number"],
)
def test_words(
    builtin: Any, texts: Any, options: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    model, tokenizer = builtin
    options = {"tokenizer": tokenizer} if options else {}
    with pytest.raises(error) as caught:
        multihead.read(model, texts, **options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 2.5}, "batch_size=2.5: expected a whole number"),
        ({"batch_size": "2"}, "batch_size='2'"),
        ({"batch_size": None}, "batch_size=None"),
        ({"batch_size": True}, "batch_size=True"),
        ({"context": 10.5}, "context=10.5: expected a whole number"),
        ({"context": "9"}, "context='9'"),
        ({"context": True}, "context=True"),
        ({"context": 9, "stride": 2.5}, "stride=2.5: expected a whole number"),
        ({"statistics": 5}, "statistics=5: expected"),
        ({"special_ids": 5}, "special_ids=5: expected token ids"),
        ({"special_ids": "abc"}, "special_ids='abc': expected token ids"),
        ({"special_ids": ["a"]}, r"special_ids=\['a'\]"),
        ({"resume": 5}, "resume=5: expected"),
        ({"relations": 5}, "relations=5: expected"),
        ({"progress": 3}, "progress=3: expected"),
        ({"stop": 3}, "stop=3: expected"),
    ],
)
def test_arguments_of_another_type_are_named(
    builtin: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(TypeError, match=words):
        multihead.read(builtin[0], "a text", tokenizer=builtin[1], **options)


@pytest.mark.parametrize("name", ["resume", "relations"])
def test_files_that_cannot_be_are_named(builtin: Any, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='.*' is a folder; give"):
        multihead.read(builtin[0], "a text", tokenizer=builtin[1], **{name: tmp_path})
    if name == "relations":
        with pytest.raises(
            FileNotFoundError,
            match=r"relations='.*none': there is no such file; give a CoNLL-U file",
        ):
            multihead.read(builtin[0], "a text", tokenizer=builtin[1], relations=tmp_path / "none")


@pytest.mark.parametrize(
    ("model", "tokenizer", "words"),
    [
        ("folder", None, "model is a str: expected a model"),
        (None, None, "model is a NoneType"),
        ("builtin", "gpt2", "tokenizer='gpt2' is a str: expected a tokenizer"),
    ],
)
def test_the_wrong_thing_in_a_place(builtin: Any, model: Any, tokenizer: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        multihead.read(
            builtin[0] if model == "builtin" else model, "a text", tokenizer=tokenizer or builtin[1]
        )


def test_why_columns_are_empty() -> None:
    with multihead.reading(llama()) as reading, torch.no_grad():
        reading.model(IDS)
    reasons = reading.table().reasons
    assert reasons["next"] == "the model is causal: no query may read a later key"
    assert "multihead.read runs it" in reasons["probe:induction"]
    assert not any("probe" in key for key in multihead.read(llama(), [{"input_ids": IDS}]).reasons)


def test_a_model_of_pictures_says_that_it_takes_no_text(builtin: Any) -> None:
    vit = model_of(next(f for f in FAMILIES if f.name == "vit"))
    with pytest.raises(
        ValueError,
        match=r"ViT\w* takes pixel_values, not text; .*multihead\.read\(model, \[\{'pixel_values'",
    ):
        multihead.read(vit, "a text", tokenizer=builtin[1])


def _default_dtype() -> Any:
    @contextlib.contextmanager
    def mode() -> Any:
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)

    return mode()


@pytest.mark.parametrize(
    "mode",
    [
        lambda: torch.device("meta"),
        _default_dtype,
        torch.inference_mode,
        lambda: torch.profiler.profile(),
        lambda: torch.utils.flop_counter.FlopCounterMode(display=False),
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    ],
    ids=["default_device", "default_dtype", "inference", "profiler", "flops", "saved_tensors"],
)
def test_a_reading_depends_on_no_mode(mode: Any) -> None:
    """Neither where its indices are made, nor what it keeps, nor the kernels that it calls."""
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
    )
    model = tf.LlamaForCausalLM(config).eval()
    ids = torch.arange(300)[None] * 7 % 61  # enough work for the compiled kernels
    want = multihead.read(model, {"input_ids": ids})
    with mode():
        got = multihead.read(model, {"input_ids": ids})
    after = multihead.read(model, {"input_ids": ids})
    for column in want.columns:
        for table in (got, after):
            assert table.value(column) == pytest.approx(
                want.value(column), rel=1e-4, abs=1e-5, nan_ok=True
            ), column
