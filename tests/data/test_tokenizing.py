"""Texts to token ids, and how many of them a model takes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedTokenizerFast

from multihead.data.tokenizing import (
    Encoded,
    Encoder,
    count_special_tokens,
    max_positions,
    require_tokenizer,
    tokenize,
    truncate,
)

WORDS = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "c": 4, "?": 5}


def small_tokenizer(special: bool = True, **settings: Any) -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel(WORDS, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    if special:
        ends = [("<s>", 0), ("</s>", 1)]
        words.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", **settings)


# --- tokens ---


def test_text_without_tokens(minilm_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(minilm_dir)
    with pytest.raises(ValueError, match=r"texts\[3\]=.* gives no tokens"):
        tokenize("\u200b", 3, tokenizer)  # a space of no width: BERT drops it


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_text_is_cut_as_its_tokenizer_cuts_it(side: str) -> None:
    tokenizer = small_tokenizer(truncation_side=side)
    encoded = Encoder(tokenizer).encode("a b c", 0)
    for limit in (3, 4, 5, 6):
        want = tokenizer("a b c", truncation=True, max_length=limit)["input_ids"]
        assert truncate(encoded, limit, side) == want
    assert truncate(Encoded([2, 3, 4], 0, 0), 2, side) == {"right": [2, 3], "left": [3, 4]}[side]


# --- special tokens that are written in a text ---


@pytest.mark.parametrize(
    ("text", "ids", "repeated"),
    [
        ("a b", [0, 2, 3, 1], 0),
        ("<s> a b", [0, 2, 3, 1], 1),
        ("a b </s>", [0, 2, 3, 1], 1),
        ("<s>a b</s>", [0, 2, 3, 1], 1),
        ("a <s> b </s> c", [0, 2, 0, 3, 1, 4, 1], 0),
    ],
)
def test_special_tokens_are_set_once(text: str, ids: list[int], repeated: int) -> None:
    tokenizer = small_tokenizer(bos_token="<s>", eos_token="</s>")
    encoder = Encoder(tokenizer)
    assert encoder.encode(text, 0) == (ids, 1, 1) and encoder.repeated == repeated
    assert bool(encoder.notes()) == bool(repeated)
    assert tokenize(text, 0, tokenizer) == ids


def test_two_start_tokens_in_the_text_stay_two() -> None:
    """Of a text with them at its beginning only the tokenizer's own is left out."""
    tokenizer = small_tokenizer(bos_token="<s>", eos_token="</s>")
    assert tokenize("<s> <s> a", 0, tokenizer) == [0, 0, 2, 1]


def test_a_text_of_special_tokens_alone_has_no_tokens() -> None:
    with pytest.raises(ValueError, match="gives no tokens"):
        tokenize("<s>", 0, small_tokenizer(bos_token="<s>", eos_token="</s>"))


# --- conversations ---

ASK = [{"role": "user", "content": "a b"}]
CHAT = [*ASK, {"role": "assistant", "content": "c"}]
PLAIN = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
ANSWER = "{% if add_generation_prompt %}? {% endif %}"


@pytest.mark.parametrize(
    ("template", "ids", "ends"),
    [
        # the start token by its name, as text, and not at all
        ("{{ bos_token }}" + PLAIN, [0, 2, 3, 4], (1, 0)),
        ("<s>" + PLAIN, [0, 2, 3, 4], (1, 0)),
        (PLAIN, [2, 3, 4], (0, 0)),
        ("{{ bos_token }}" + PLAIN + "{{ eos_token }}", [0, 2, 3, 4, 1], (1, 1)),
        ("c c {{ bos_token }}" + PLAIN, [4, 4, 0, 2, 3, 4], (0, 0)),  # a system prompt before it
    ],
)
def test_a_conversation_is_read_as_its_template_writes_it(
    template: str, ids: list[int], ends: tuple[int, int]
) -> None:
    tokenizer = small_tokenizer(bos_token="<s>", eos_token="</s>", chat_template=template)
    encoder = Encoder(tokenizer)
    assert encoder.encode(CHAT, 0) == (ids, *ends) and not encoder.notes()
    assert tokenize(CHAT, 0, tokenizer) == ids
    want = tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=True)["input_ids"]
    assert ids == want


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
BY_PARTS = "{% for m in messages %}{% for p in m['content'] %}{{ p['text'] + ' c ' }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "ids"), [(PLAIN.replace(" + ' '", ""), [2, 3]), (BY_PARTS, [2, 4, 3, 4])]
)
def test_contents_in_parts_are_written_as_the_template_takes_them(
    template: str, ids: list[int]
) -> None:
    tokenizer = small_tokenizer(chat_template=template)
    assert Encoder(tokenizer).encode([{"role": "user", "content": PARTS}], 0).ids == ids


def test_contents_in_parts_among_others() -> None:
    template = "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}c{% endif %} {% endfor %}"
    mixed = [{"role": "user", "content": PARTS}, {"role": "assistant", "content": "b"}]
    tokenizer = small_tokenizer(chat_template=template)
    assert Encoder(tokenizer).encode(mixed, 0).ids == [4, 3]  # the template knows parts


def test_a_long_conversation_is_cut_later_without_a_warning_of_transformers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        tokenizer = small_tokenizer(chat_template=PLAIN, model_max_length=5)
        ids = Encoder(tokenizer).encode([{"role": "user", "content": "a b c a b c"}], 0).ids
    finally:
        logger.removeHandler(caplog.handler)
    assert len(ids) == 6 and not caplog.records


def test_a_conversation_that_is_continued_ends_with_the_beginning_of_an_answer() -> None:
    tokenizer = small_tokenizer(chat_template=PLAIN + ANSWER)
    assert Encoder(tokenizer).encode(ASK, 0).ids == [2, 3]
    assert Encoder(tokenizer, continued=True).encode(ASK, 0).ids == [2, 3, 5]
    assert Encoder(tokenizer, continued=True).encode(CHAT, 0).ids == [2, 3, 4]  # goes on from c


@pytest.mark.parametrize(
    ("messages", "template", "words"),
    [
        (ASK, None, r"texts\[3\] is a conversation, but the tokenizer has no chat_template"),
        (ASK, "{{ raise_exception('no users') }}", r"texts\[3\]: .* template .*no users"),
        (ASK, "{{ 1 + messages }}", r"doesn't take this conversation \(TypeError"),
        ([*ASK, "b"], PLAIN, r"texts\[3\]\[1\] is a str: expected a message"),
        ([*ASK, {"text": "b"}], PLAIN, r"texts\[3\]\[1\] is a dict with 'text': expected a mess"),
        ([{"role": "user", "content": ""}], PLAIN, r"texts\[3\] gives no tokens"),
        ([{"role": "user", "content": "\ud800"}], PLAIN, "contains an unpaired surrogate"),
    ],
)
def test_conversations_that_are_none(messages: Any, template: str | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tokenize(messages, 3, small_tokenizer(chat_template=template))


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ([1, 2], r"texts\[0\] is a list: .* token ids are given as model inputs"),
        (torch.tensor([1, 2]), "token ids are given as model inputs"),
        (b"a", "give texts.decode"),
        (["a"], "give the texts in one list"),
    ],
)
def test_what_is_no_text_is_named_with_what_to_give(item: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        tokenize(item, 0, small_tokenizer())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (" \n", r"texts[1]=' \n' is empty"),
        ("a \ud800", "texts[1]='a \\ud800' contains an unpaired surrogate"),
    ],
)
def test_texts_that_are_none(text: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        tokenize(text, 1, small_tokenizer())
    assert words in str(caught.value)


def test_bad_tokenizer_and_batch_size() -> None:
    with pytest.raises(ValueError, match="tokenizer=None: this model came without one"):
        require_tokenizer(None)
    with pytest.raises(ValueError, match="batch_size=0: expected at least 1"):
        require_tokenizer(small_tokenizer(), 0)


def test_special_tokens_before_and_after_a_text(minilm_dir: Path) -> None:
    assert count_special_tokens(small_tokenizer()) == (1, 1)
    assert count_special_tokens(small_tokenizer(special=False)) == (0, 0)
    assert count_special_tokens(AutoTokenizer.from_pretrained(minilm_dir)) == (1, 1)


# --- positions ---

SIZES: dict[str, Any] = dict(
    vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=1
)
TABLES = {
    "bert": SIZES, "electra": SIZES | {"embedding_size": 8}, "roberta": SIZES, "camembert": SIZES,
    "xlm-roberta": SIZES, "xlm-roberta-xl": SIZES, "roberta-prelayernorm": SIZES, "data2vec-text": SIZES,
    "ibert": SIZES, "mpnet": SIZES, "lilt": SIZES | {"hidden_size": 24},
    "xmod": SIZES | {"languages": ["en"], "default_language": "en"},
    "markuplm": SIZES, "layoutlmv3": SIZES | {"visual_embed": False, "coordinate_size": 2, "shape_size": 0},
    "luke": SIZES | {"entity_vocab_size": 5, "entity_emb_size": 8},
    "gpt2": dict(vocab_size=50, n_embd=8, n_layer=1, n_head=1, n_positions=12),
    "opt": SIZES | {"word_embed_proj_dim": 8, "ffn_dim": 8},
    "distilbert": dict(vocab_size=50, dim=8, n_layers=1, n_heads=1, hidden_dim=8),
}  # fmt: skip


@pytest.mark.parametrize("family", TABLES)
def test_number_of_positions_is_what_the_model_can_take(family: str) -> None:
    config = AutoConfig.for_model(family, **TABLES[family])
    if family != "gpt2":
        config.max_position_embeddings = 12
    config.intermediate_size = 8
    model = AutoModel.from_config(config).eval()
    limit = max_positions(config)
    assert limit is not None
    with torch.no_grad():
        model(input_ids=torch.full((1, limit), 7))
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=torch.full((1, limit + 1), 7))


def test_number_of_positions_from_config_and_tokenizer() -> None:
    long, short = small_tokenizer(), small_tokenizer(model_max_length=100)
    config = transformers.LlamaConfig(max_position_embeddings=200)
    assert max_positions(config) == max_positions(config, long) == 200
    assert max_positions(config, short) == 100
    endless = transformers.T5Config()
    assert max_positions(endless, long) is None
    assert max_positions(endless, short) == 100
    assert max_positions(transformers.XLNetConfig()) is None  # its config says -1
    assert max_positions(transformers.LlavaConfig(text_config=config)) == 200
