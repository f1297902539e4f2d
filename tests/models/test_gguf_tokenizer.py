"""The fields that describe a tokenizer in a GGUF file."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers as tf
from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers

from multihead.models.gguf_tokenizer import SPLITS, tokenizer_fields
from tiny_tokenizers import byte_fallback, byte_level

LLAMA, QWEN = SPLITS
BYTES = pre_tokenizers.ByteLevel
DIGITS = pre_tokenizers.Digits(individual_digits=True)


def splitting(*rules: Any) -> Tokenizer:
    made = Tokenizer.from_str(byte_level().to_str())
    made.pre_tokenizer = pre_tokenizers.Sequence(list(rules))
    return made


def of(regex: str) -> list[Any]:
    bytes_alone = BYTES(add_prefix_space=False, use_regex=False)
    return [pre_tokenizers.Split(Regex(regex), behavior="isolated"), bytes_alone]


def fields(backend: Tokenizer, size: int = 300, **settings: Any) -> dict[str, Any]:
    made = tf.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", **settings
    )
    return tokenizer_fields(made, size)


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        (byte_level(), "gpt-2"),
        (splitting(DIGITS, BYTES(add_prefix_space=False)), "smollm"),
        (splitting(*of(LLAMA)), "llama-bpe"),
        (splitting(*of(QWEN)), "qwen2"),
    ],
)
def test_a_way_to_split_text_has_its_name(backend: Tokenizer, name: str) -> None:
    found = fields(backend)
    assert found["tokenizer.ggml.pre"] == name and found["tokenizer.ggml.model"] == "gpt2"
    assert len(found["tokenizer.ggml.tokens"]) == 300 and "he" in found["tokenizer.ggml.tokens"]
    assert "h e" in found["tokenizer.ggml.merges"]


@pytest.mark.parametrize(
    "backend",
    [
        splitting(*of(r"\p{L}+|\p{N}")),
        splitting(DIGITS, *of(LLAMA)),
        splitting(BYTES(add_prefix_space=True)),
        splitting(pre_tokenizers.Whitespace()),
    ],
)
def test_a_way_without_a_name_is_refused(backend: Tokenizer) -> None:
    with pytest.raises(
        ValueError, match=r"splits text by .* name in llama.cpp\. Start from a GGUF"
    ):
        fields(backend)


def test_kinds_of_tokens() -> None:
    backend = Tokenizer.from_str(byte_level().to_str())
    backend.add_tokens([AddedToken("<think>", special=False)])
    found = fields(backend, 310)
    size = backend.get_vocab_size()
    kinds = found["tokenizer.ggml.token_type"]
    assert kinds[:3] == [3, 3, 1] and kinds[size - 1] == 4 and set(kinds[size:]) == {5}
    assert found["tokenizer.ggml.tokens"][-1] == "[PAD309]"
    with pytest.raises(ValueError, match="tokens, its embedding 20 rows"):
        fields(backend, 20)


def test_scores_are_refused_where_merges_have_another_order() -> None:
    assert fields(byte_fallback(), 340, unk_token="<unk>")["tokenizer.ggml.scores"]
    content = json.loads(byte_fallback().to_str())
    merges = content["model"]["merges"]
    merges[0], merges[-1] = merges[-1], merges[0]
    with pytest.raises(ValueError, match="its merges aren't in the order of its tokens"):
        fields(Tokenizer.from_str(json.dumps(content)), 340, unk_token="<unk>")
