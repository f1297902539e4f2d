"""Tokenizers of the usual kinds, trained on a sentence: byte-level BPE, sentencepiece with byte
fallback, WordPiece, BPE with ends of words, and single bytes.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import transformers as tf
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

SENTENCE = "the cat and the dog and the cat unbelievably play the playing don't say 3.14"


@cache
def byte_level(size: int = 300) -> Tokenizer:
    """As GPT-2 and Llama 3 have it: characters outside of its training are several tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([SENTENCE], trainer)
    return made


@cache
def byte_fallback() -> Tokenizer:
    """As Llama 2, Mistral and Gemma have it: `▁` for spaces, `<0xF0>` for other bytes."""
    learned = Tokenizer(models.BPE(unk_token="<unk>"))
    learned.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=special, show_progress=False)
    learned.train_from_iterator([SENTENCE], trainer)
    state = json.loads(learned.to_str())
    vocabulary, merges = state["model"]["vocab"], [tuple(m) for m in state["model"]["merges"]]
    made = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    made.normalizer = learned.normalizer
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made


@cache
def word_pieces() -> Tokenizer:
    """As BERT has it: `##ing` continues a word, all in lower case."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=60,
        special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
        show_progress=False,
    )
    made.train_from_iterator([SENTENCE], trainer)
    return made


@cache
def ends_of_words() -> Tokenizer:
    """As CLIP has it: `cat</w>` ends a word."""
    made = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.BPEDecoder("</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=80,
        special_tokens=["<unk>", "<s>", "</s>"],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    made.train_from_iterator([SENTENCE], trainer)
    return made


def fast(made: Tokenizer, before: str = "<s>", after: str = "", **settings: Any) -> Any:
    """A transformers tokenizer that sets `before` and `after` around a text."""
    made = Tokenizer.from_str(made.to_str())
    ends = [(t, made.token_to_id(t)) for t in (before, after) if t]
    template = " ".join(filter(None, (before, "$A", after)))
    made.post_processor = TemplateProcessing(single=template, special_tokens=ends)
    if before == "[CLS]":
        settings = {
            "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]",
            "pad_token": "[PAD]", "mask_token": "[MASK]",
        } | settings  # fmt: skip
    else:
        settings = {"bos_token": "<s>", "eos_token": "</s>"} | settings
    return tf.PreTrainedTokenizerFast(tokenizer_object=made, **settings)


def every_kind() -> dict[str, Any]:
    return {
        "byte-level": fast(byte_level()),
        "byte-fallback": fast(byte_fallback()),
        "word-pieces": fast(word_pieces(), "[CLS]", "[SEP]"),
        "ends-of-words": fast(ends_of_words()),
        "bytes": tf.ByT5Tokenizer(),
    }
