"""CoNLL-U files and a small tokenizer that splits words into pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import transformers as tf

PIECES = [
    "<s>",
    "?",
    "</s>",
    "a",
    "b",
    "c",
    "d",
    "ab",
    "##a",
    "##b",
    "##c",
    "##d",
    "##cd",
    "##ab",
    ".",
    "ba",
    "dd",
]


def pieces(ends: bool = True) -> Any:
    """A WordPiece tokenizer of the 17 words that the families know."""
    made = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({p: n for n, p in enumerate(PIECES)}, unk_token="?")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>" if ends else "<s> $A", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="?"
    )


def write(path: Path, sentences: list[list[str]]) -> Path:
    """Rows of "ID FORM HEAD DEPREL [MISC]"."""
    blocks = []
    for rows in sentences:
        parts = [(row + " _").split()[:5] for row in rows]
        blocks.append(
            "".join(
                "\t".join([id_, form, "_", "_", "_", "_", head, deprel, "_", misc]) + "\n"
                for id_, form, head, deprel, misc in parts
            )
        )
    path.write_text("\n".join(blocks), encoding="utf-8")
    return path
