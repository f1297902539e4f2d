"""Reading what a model writes: cached step by step it is what one pass over prompt and new tokens
gives.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

import multihead
from data.test_tokenizing import small_tokenizer
from families import FAMILIES, model_of
from multihead.reader.generate import options_of
from multihead.reader.table import Table
from small import llama

TEXTS = ["a b c a b", "c", "b b a"]


def written(model: Any, tokenizer: Any, text: str, new: int, **options: Any) -> list[int]:
    """What the model writes behind one text by itself, up to its end."""
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=False,
        use_cache=False,
        pad_token_id=4,
        **options,
    )
    return out[0].tolist()


def same(got: Table, want: Table) -> None:
    assert got.columns == want.columns
    for column in want.columns:
        assert got.count(column).tolist() == want.count(column).tolist(), column
        assert got.value(column) == pytest.approx(
            want.value(column), rel=1e-5, abs=1e-5, nan_ok=True
        ), column
        assert got.error(column) == pytest.approx(
            want.error(column), rel=1e-3, abs=1e-5, nan_ok=True
        ), column


@pytest.mark.parametrize("ends", [False, True])
def test_steps_are_what_one_pass_over_the_same_tokens_gives(ends: bool) -> None:
    """Texts of three lengths in one batch, padded on the left; one of them comes to its end before
    the others.
    """
    model, tokenizer = llama(), small_tokenizer(pad_token="c")
    end: list[int] = []
    if ends:
        whole = [written(model, tokenizer, text, 7, eos_token_id=None) for text in TEXTS]
        end = [
            whole[0][len(tokenizer(TEXTS[0])["input_ids"]) + 2]
        ]  # what the first text's third new token is
    eos = {"eos_token_id": end or None}
    batches, lengths = [], []
    for text in TEXTS:
        ids = written(model, tokenizer, text, 7, **eos)
        start = len(tokenizer(text)["input_ids"])
        if end and end[0] in ids[start:]:
            ids = ids[: start + ids[start:].index(end[0]) + 1]
        batches.append(
            {"input_ids": torch.tensor([ids[:-1]])}
        )  # the last token is written, but never read
        lengths.append(len(ids) - 1 - start)
    assert len(set(lengths)) > 1 if ends else set(lengths) == {6}
    want = multihead.read(model, batches, special_ids={0, 1}, probe=False)
    got = multihead.read(
        model,
        TEXTS,
        tokenizer=tokenizer,
        special_ids={0, 1},
        generate={"max_new_tokens": 7} | eos,
        probe=False,
    )
    assert got.meta["tokens"] == want.meta["tokens"] and got.meta["documents"] == 3
    same(got, want)


def test_an_encoder_decoder_writes_too() -> None:
    body = model_of(next(f for f in FAMILIES if f.name == "t5"))
    torch.manual_seed(0)
    model = tf.T5ForConditionalGeneration(body.config).eval()
    model.load_state_dict(body.state_dict(), strict=False)
    tokenizer = small_tokenizer(pad_token="c")
    start = model.config.decoder_start_token_id
    inputs = [tokenizer(text, return_tensors="pt") for text in TEXTS]
    new = [
        model.generate(**i, max_new_tokens=5, do_sample=False, eos_token_id=None)[0] for i in inputs
    ]
    assert all(row[0] == start for row in new)
    batches = [
        {
            "input_ids": i["input_ids"],
            "attention_mask": i["attention_mask"],
            "decoder_input_ids": row[None, :-1],
            "decoder_attention_mask": torch.ones_like(row[None, :-1]),
        }
        for i, row in zip(inputs, new, strict=True)
    ]
    want = multihead.read(model, batches, special_ids={0, 1})
    got = multihead.read(
        model,
        TEXTS,
        tokenizer=tokenizer,
        special_ids={0, 1},
        generate={"max_new_tokens": 5, "eos_token_id": None},
    )
    assert got.meta["documents"] == 3
    same(got, want)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "gpt_oss", "bart", "llama4", "gpt_neox"])
def test_texts_of_several_lengths_are_exact_in_every_family(name: str) -> None:
    """Padded on the left where the model's positions allow it, else in batches of one length."""
    body = model_of(next(f for f in FAMILIES if f.name == name))
    torch.manual_seed(0)
    model = tf.MODEL_FOR_CAUSAL_LM_MAPPING[type(body.config)](body.config).eval()
    weights = {
        f"{model.base_model_prefix}.{key}": value for key, value in body.state_dict().items()
    } | body.state_dict()
    model.load_state_dict(weights, strict=False)
    tokenizer = small_tokenizer(pad_token="c")
    batches = [
        {"input_ids": torch.tensor([written(model, tokenizer, text, 5, eos_token_id=None)[:-1]])}
        for text in TEXTS
    ]
    want = multihead.read(model, batches, special_ids={0, 1}, probe=False)
    got = multihead.read(
        model,
        TEXTS,
        tokenizer=tokenizer,
        special_ids={0, 1},
        probe=False,
        generate={"max_new_tokens": 5, "eos_token_id": None},
    )
    same(got, want)


def causal_model(name: str) -> Any:
    """A small random causal model of a family."""
    torch.manual_seed(0)
    config = model_of(next(f for f in FAMILIES if f.name == name)).config
    return tf.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()


def without_cache(generate: dict[str, Any], model: Any, where: str) -> dict[str, Any]:
    """Turn the cache off in the call, or in the model's two configs."""
    if where == "call":
        return generate | {"use_cache": False}
    model.config.use_cache = model.generation_config.use_cache = False
    return generate


@pytest.mark.parametrize("where", ["call", "config"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gpt_neox"])
def test_without_a_cache_each_token_counts_once(name: str, where: str) -> None:
    """Each pass is the whole text so far; the table is that of the steps with a cache."""
    model, tokenizer = causal_model(name), small_tokenizer(pad_token="c")
    options: dict[str, Any] = dict(tokenizer=tokenizer, special_ids={0, 1}, probe=False)
    options["classes"] = {"b": "b"}
    generate = {"max_new_tokens": 7, "eos_token_id": None}
    first = model.generate(torch.tensor([tokenizer(TEXTS[0])["input_ids"]]), **generate)[0]
    generate["eos_token_id"] = [int(first[-4])]  # the first text may end before the others
    want = multihead.read(model, TEXTS, generate=generate, **options)
    got = multihead.read(model, TEXTS, generate=without_cache(generate, model, where), **options)
    assert got.meta["documents"] == want.meta["documents"] == 3
    assert got.meta["tokens"] == want.meta["tokens"]
    same(got, want)


def test_an_encoder_decoder_without_a_cache() -> None:
    body = model_of(next(f for f in FAMILIES if f.name == "t5"))
    torch.manual_seed(0)
    model = tf.T5ForConditionalGeneration(body.config).eval()
    options: dict[str, Any] = dict(tokenizer=small_tokenizer(pad_token="c"), special_ids={0, 1})
    generate = {"max_new_tokens": 5, "eos_token_id": None}
    want = multihead.read(model, TEXTS, generate=generate, **options)
    got = multihead.read(model, TEXTS, generate=generate | {"use_cache": False}, **options)
    assert got.meta["documents"] == 3 and got.meta["tokens"] == want.meta["tokens"]
    same(got, want)


@pytest.mark.parametrize("own", [False, True], ids=["model.generate", "a loop"])
def test_a_loop_without_a_cache_is_one_document(own: bool) -> None:
    model, ids = llama(), torch.tensor([[0, 5, 6, 5], [0, 7, 5, 5]])
    options: dict[str, Any] = dict(max_new_tokens=5, do_sample=False, eos_token_id=None)
    options["attention_mask"] = torch.ones_like(ids)
    with multihead.reading(model) as cached:
        whole = model.generate(ids, pad_token_id=0, **options)
    with multihead.reading(model) as uncached, torch.no_grad():
        if own:
            for length in range(4, 9):
                model(whole[:, :length], use_cache=False)
        else:
            model.generate(ids, pad_token_id=0, use_cache=False, **options)
    got, want = uncached.table(), cached.table()
    assert got.meta["documents"] == want.meta["documents"] == 2
    assert got.meta["tokens"] == want.meta["tokens"] == 2 * (4 + 4)
    same(got, want)


def test_texts_that_begin_alike_stay_documents() -> None:
    """Each is the text before it with one token more, as in generation without a cache."""
    model, ids = llama(), torch.tensor([[0, 5, 6, 5, 7]])
    inputs = [{"input_ids": ids[:, :n]} for n in (3, 4, 5)]
    table = multihead.read(model, inputs, probe=False)
    assert table.meta["documents"] == 3 and table.meta["tokens"] == 12
    with multihead.reading(model) as session, torch.no_grad():
        for batch in inputs:
            model(**batch)
        model(ids[:, :3], use_cache=False)
        model(ids[:, [0, 2, 1, 3]], use_cache=False)  # one token more, after others
        model(ids, use_cache=False)
    assert session.table().meta["documents"] == 6 and session.table().meta["tokens"] == 24


def test_a_long_text_leaves_room_for_what_is_written() -> None:
    table = multihead.read(
        llama(),
        "a b c " * 40,
        tokenizer=small_tokenizer(pad_token="c", model_max_length=64),
        generate=10,
    )
    assert table.meta["tokens"] == 54 + 9 and any(
        "read the first 54" in note for note in table.meta["notes"]
    )


def test_a_cache_that_cannot_be_followed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from multihead.reader.tokens import Tokens

    monkeypatch.setattr(
        Tokens, "_key_ids", lambda self, given: (None, "lost") if given.past else (given.ids, "")
    )
    model = llama()
    with pytest.raises(
        multihead.errors.ReadingError, match="the cache of LlamaForCausalLM can't be followed"
    ):
        multihead.read(model, TEXTS, tokenizer=small_tokenizer(pad_token="c"), generate=3)
    assert not model._forward_hooks and not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("generate", "words"),
    [
        (0, "generate=0: expected a number of new tokens"),
        ("many", "expected a number"),
        ({"do_sample": True}, "max_new_tokens"),
        (100, "max_new_tokens=100 leaves no room"),
        (
            {"max_new_tokens": 4, "num_beams": 3},
            "num_beams=3 can't be read, since rows then change places",
        ),
        ({"max_new_tokens": 4, "num_return_sequences": 2}, "num_return_sequences=2"),
        ({"max_new_tokens": 4, "stop_strings": "a"}, "stop_strings='a'"),
    ],
)
def test_words(generate: Any, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        multihead.read(llama(), TEXTS, tokenizer=small_tokenizer(pad_token="c"), generate=generate)
    assert words in str(caught.value)


def test_a_model_that_cannot_write_says_so(minilm_dir: Any) -> None:
    with pytest.raises(
        ValueError, match=r"generate=5: BertModel can't generate text.*AutoModelForCausalLM"
    ):
        options_of(tf.AutoModel.from_pretrained(minilm_dir), 5, None)
