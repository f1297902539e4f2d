"""The fields of a GGUF file that describe a tokenizer, made from one of transformers.

llama.cpp knows a way to split text by its name alone, so only those of the families of Llama, Qwen
and SmolLM are here, found by their rules and not by the name of a model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import MultiheadError

__all__ = ["TEXTS", "tokenizer_fields"]

# what both tokenizers must split the same way, before a file is kept
TEXTS = (
    "The quick brown fox, it's said, doesn't jump.\n\n  Twice   indented\tlines!",
    "Ünïcödé — 漢字, эль, 🙂 (and such).",
    "def add(a, b):\n    return a + b  # (a; b)",
)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_START = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_END = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {f"{_START}\\p{{N}}{{1,3}}{_END}": "llama-bpe", f"{_START}\\p{{N}}{_END}": "qwen2"}


def tokenizer_fields(tokenizer: Any, vocab_size: int) -> dict[str, Any]:
    """The fields "tokenizer.*" of a GGUF file, by name.

    Args:
        tokenizer: a fast tokenizer, a BPE of bytes (GPT-2, Llama 3, Qwen, SmolLM) or of characters
            with bytes for the others (Llama 2, Mistral).
        vocab_size: rows of the embedding; ids without a token are called unused.

    Raises:
        MultiheadError: another kind, or one whose way to split text has no name in llama.cpp.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _cannot(f"{type(tokenizer).__name__} is not a fast tokenizer")
    parts = json.loads(backend.to_str())
    model = parts["model"]
    if model["type"] != "BPE":
        raise _cannot(f"its tokenizer is of the kind {model['type']}, expected BPE")
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    is_bytes = not model.get("byte_fallback")
    tokens, types = _tokens(parts, vocab_size, tokenizer.unk_token)
    fields: dict[str, Any] = {
        "ggml.model": "gpt2" if is_bytes else "llama",
        "ggml.pre": _split_name(parts["pre_tokenizer"]) if is_bytes else "default",
        "ggml.tokens": tokens,
        "ggml.token_type": types,
    }
    if is_bytes:
        fields["ggml.merges"] = [" ".join(merge) for merge in merges]
    else:
        places = [model["vocab"][a + b] for a, b in merges]
        if places != sorted(places):
            raise _cannot(
                "its merges aren't in the order of its tokens, which scores can't express"
            )
        fields["ggml.scores"] = [0.0 if t != NORMAL else -float(n) for n, t in enumerate(types)]
        fields["ggml.add_space_prefix"] = _has_space_prefix(parts)
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (number := getattr(tokenizer, f"{name}_token_id")) is not None:
            fields[f"ggml.{key}_token_id"] = number
    ids = tokenizer("a")["input_ids"]
    fields["ggml.add_bos_token"] = bool(ids) and ids[0] == tokenizer.bos_token_id
    fields["ggml.add_eos_token"] = bool(ids) and ids[-1] == tokenizer.eos_token_id
    if isinstance(tokenizer.chat_template, str):
        fields["chat_template"] = tokenizer.chat_template
    return {f"tokenizer.{name}": value for name, value in fields.items()}


def _tokens(
    parts: Mapping[str, Any], vocab_size: int, unknown: str | None
) -> tuple[list[str], list[int]]:
    vocab = dict(parts["model"]["vocab"])
    added = {entry["content"]: entry for entry in parts["added_tokens"]}
    vocab |= {content: entry["id"] for content, entry in added.items()}
    by_id = {number: token for token, number in vocab.items()}
    size = max(vocab_size, 1 + max(by_id, default=0))
    if size > vocab_size:
        raise _cannot(f"its tokenizer has {size:,} tokens, its embedding {vocab_size:,} rows")
    tokens = [by_id.get(number, f"[PAD{number}]") for number in range(size)]

    def kind(number: int, token: str) -> int:
        if number not in by_id:
            return UNUSED
        if token == unknown and parts["model"].get("byte_fallback"):
            return UNKNOWN
        if token in added:
            return CONTROL if added[token]["special"] else USER_DEFINED
        is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
        return BYTE if is_byte and parts["model"].get("byte_fallback") else NORMAL

    return tokens, [kind(number, token) for number, token in enumerate(tokens)]


def _split_name(rule: Any) -> str:
    """llama.cpp's name of the way in which a BPE of bytes splits text first."""
    rules = rule["pretokenizers"] if rule and rule["type"] == "Sequence" else [rule]
    kinds = [one and one["type"] for one in rules]
    last = rules[-1]
    if kinds[-1] != "ByteLevel" or last["add_prefix_space"]:
        raise _cannot(f"its tokenizer splits text by {kinds}, which has no name in llama.cpp")
    by_regex = last.get("use_regex", True)
    if kinds == ["ByteLevel"] and by_regex:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and by_regex and rules[0]["individual_digits"]:
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not by_regex:
        name = SPLITS.get(rules[0]["pattern"].get("Regex", ""))
        if name is not None:
            return name
    raise _cannot(f"its tokenizer splits text by {kinds}, in a way that has no name in llama.cpp")


def _has_space_prefix(parts: Mapping[str, Any]) -> bool:
    text = json.dumps([parts["normalizer"], parts["pre_tokenizer"]])
    return '"Prepend"' in text or '"prepend_scheme": "first"' in text or '"always"' in text


def _cannot(why: str) -> MultiheadError:
    return MultiheadError(
        f"a GGUF file of this model can't be written: {why}. Start from a GGUF file of the model,"
        " whose tokenizer is kept; or give --save a new folder, and convert that by llama.cpp's"
        " convert_hf_to_gguf.py"
    )
