"""Texts and conversations, in the forms in which they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

import multihead
from multihead.data.documents import (
    each_document,
    encode_document,
    is_conversation,
    is_document,
    is_message,
    require_messages,
    several,
    take_row,
    words_of,
)
from multihead.data.windows import cut_texts

ASK = {"role": "user", "content": "the cat and the dog"}
CHAT = [ASK, {"role": "assistant", "content": "a cat and a dog"}]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}"

ONE: dict[str, Callable[[], Any]] = {
    "a list": lambda: CHAT,
    "a list of one": lambda: [CHAT],
    "a tuple": lambda: tuple(CHAT),
    "a generator of messages": lambda: iter(CHAT),
    "a generator of conversations": lambda: iter([CHAT]),
    "a row": lambda: {"messages": CHAT, "id": 5},
    "rows": lambda: [{"messages": CHAT}],
    "a generator of rows": lambda: iter([{"messages": CHAT}]),
    "a column": lambda: pd.Series([CHAT]),
}


@pytest.mark.parametrize("form", ONE)
def test_one_conversation(form: str) -> None:
    (document,) = each_document(ONE[form]())
    assert list(document) == CHAT


@pytest.mark.parametrize(
    "texts",
    [
        "a", ["a"], ("a",), np.array(["a"]), pd.Series(["a"]), iter(["a"]), {"text": "a"}, [{"text": "a"}],
        iter([{"text": "a", "label": 1}]),
    ],
)  # fmt: skip
def test_one_text(texts: Any) -> None:
    assert list(each_document(texts)) == ["a"]


def test_several_of_both_kinds_and_model_inputs() -> None:
    assert list(each_document(["a", CHAT, {"text": "b"}])) == ["a", CHAT, "b"]
    assert list(each_document(ASK)) == [[ASK]]
    inputs = {"input_ids": [[1, 2]]}
    assert several(inputs) == [inputs] and several([inputs, inputs]) == [inputs, inputs]
    assert several({"text": ["a", "b"], "label": [0, 1]}) == ["a", "b"]  # a slice of a data set
    assert several({"messages": [CHAT, [ASK]]}) == [CHAT, [ASK]]
    assert several({"text": [1, 2]}) == [{"text": [1, 2]}]
    assert list(several([])) == [] and list(several(iter([]))) == []


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (5, "texts is a int: expected a string"),
        (b"a", r"texts is bytes: expected a string; give texts.decode\(\)"),
        (
            pd.DataFrame({"prompt": ["a"], "n": [1]}),
            r"texts is a DataFrame with the columns 'prompt', 'n': .* texts\['prompt'\]",
        ),
    ],
)
def test_what_holds_no_texts(texts: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        several(texts)


def test_kinds() -> None:
    assert is_message(ASK) and not is_message({"role": 5}) and not is_message("user")
    assert is_conversation(CHAT) and not is_conversation([]) and not is_conversation("a")
    assert is_document("a") and is_document(CHAT) and not is_document({"input_ids": [1]})
    assert take_row({"text": 5}) == {"text": 5} and take_row(ASK) == ASK
    require_messages(CHAT, "texts[0]")
    with pytest.raises(ValueError, match=r"texts\[0\]\[1\] is a dict with 'content'"):
        require_messages([ASK, {"content": "a"}], "texts[0]")


def test_words_and_bytes() -> None:
    parts = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what"}]}]
    assert words_of("a b") == "a b" and words_of(CHAT) == "the cat and the dog\na cat and a dog"
    assert words_of(parts) == "what" and words_of([{"role": "assistant"}]) == ""
    documents = ["a", CHAT, CHAT[:1], [{"role": "system", "content": ASK["content"]}]]
    assert len(set(map(encode_document, documents))) == 4


# --- the verbs take them


@pytest.fixture(scope="module")
def chat() -> tuple[Any, Any]:
    model, tokenizer = multihead.load_builtin()
    tokenizer.chat_template = TEMPLATE
    return model, tokenizer


def written(tokenizer: Any) -> str:
    """The conversation as text, without the start token, which the tokenizer sets."""
    return tokenizer.apply_chat_template(CHAT, tokenize=False).removeprefix("<s>")


def test_a_reading_of_conversations(chat: tuple[Any, Any]) -> None:
    model, tokenizer = chat
    table = multihead.read(model, CHAT, tokenizer=tokenizer, probe=False)
    twin = multihead.read(model, written(tokenizer), tokenizer=tokenizer, probe=False)
    assert table.meta["documents"] == 1 and table.meta["tokens"] == twin.meta["tokens"]
    np.testing.assert_array_equal(table.value("entropy"), twin.value("entropy"))
    both = multihead.read(model, [CHAT, "a cat"], tokenizer=tokenizer, probe=False)
    assert both.meta["documents"] == 2
    found = multihead.read_maps(model, CHAT, "L0.H0", tokenizer=tokenizer)
    assert found.tokens.count("<s>") == 1


def test_a_text_with_the_start_token_is_read_with_one(chat: tuple[Any, Any]) -> None:
    model, tokenizer = chat
    text = "<s>" + written(tokenizer)
    table = multihead.read(model, text, tokenizer=tokenizer, probe=False)
    twin = multihead.read(model, CHAT, tokenizer=tokenizer, probe=False)
    np.testing.assert_array_equal(table.value("entropy"), twin.value("entropy"))
    assert "1 text holds special tokens that the tokenizer sets" in table.meta["notes"][0]
    assert twin.meta["notes"] == []


def test_conversations_in_windows_and_generated(chat: tuple[Any, Any]) -> None:
    model, tokenizer = chat
    table = multihead.read(model, [CHAT], tokenizer=tokenizer, context=8, probe=False)
    twin = multihead.read(model, written(tokenizer), tokenizer=tokenizer, context=8, probe=False)
    np.testing.assert_array_equal(table.value("entropy"), twin.value("entropy"))
    table = multihead.read(model, CHAT, tokenizer=tokenizer, generate=3, probe=False)
    assert table.meta["documents"] == 1


def test_conversations_to_prune_share_tune_and_evaluate_on(chat: tuple[Any, Any]) -> None:
    model, tokenizer = chat
    many = [CHAT, [ASK]] * 30
    assert [w.ids for w in cut_texts(model, [CHAT], tokenizer)] == [
        tokenizer(written(tokenizer))["input_ids"]
    ]
    losses = multihead.pruning.evaluate(model, many, tokenizer=tokenizer)
    assert len(losses.count) == 60 and losses.mean > 0
    one = multihead.pruning.evaluate(model, CHAT, tokenizer=tokenizer)
    assert len(one.count) == 1
    pruned = multihead.prune(model, many, tokenizer=tokenizer, remove="5%")
    assert pruned.model is not model
    shared = multihead.share(model, many, tokenizer=tokenizer, num_kv_heads=4)
    done = multihead.tune(shared.model, model, many, tokenizer=tokenizer, steps=1, context=8)
    assert len(done.losses) == 1


def test_conversations_are_compared_by_what_they_hold(chat: tuple[Any, Any]) -> None:
    from multihead.pruning.overlap import require_disjoint

    with pytest.raises(ValueError, match=r"calibrate\[0\] and evaluate\[1\] hold one document"):
        require_disjoint([CHAT], ["b", "the cat and the dog a cat and a dog"])
    require_disjoint([CHAT], [[ASK]])
