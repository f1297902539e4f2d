"""Alignment of a sentence's words with a model's tokens, by character offsets.

`word_ids()` doesn't replace it: the model has to read the sentence as its own tokenizer splits it,
and a list of words is split differently (spaces, "don't" as one piece).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from ..errors import MultiheadError
from .conllu import Sentence


@dataclass(frozen=True)
class AlignedSentence:
    """A sentence in tokens. Words with the same characters ("de" and "le" of "du") are one here."""

    ids: list[int]
    word_of: list[int]  # of each token, from 0; -1 for special tokens and bare spaces
    words: int
    # dependent, head, relation; without the root's, and those inside one word
    arcs: list[tuple[int, int, str]]


def align_words(sentence: Sentence, tokenizer: Any) -> AlignedSentence | None:
    """Align a sentence's tokens, special ones included, with its words; None where a word has no
    token.

    A token that covers two words belongs to the one that has most of its characters, the earlier of
    two with as many. So a token with the space before its word belongs to that word, and of "can"
    and "not" in one token one is without.
    """
    coded = tokenizer(sentence.text, return_offsets_mapping=True, verbose=False)
    spans = sorted({(word.start, word.stop) for word in sentence.words})
    owner = [-1] * len(sentence.text)
    for n, (start, stop) in enumerate(spans):
        owner[start:stop] = [n] * (stop - start)
    word_of = []
    for start, stop in coded["offset_mapping"]:  # 0 and 0 for special tokens
        characters = Counter(n for n in owner[start:stop] if n >= 0)
        word_of.append(characters.most_common(1)[0][0] if characters else -1)
    if len(set(word_of) - {-1}) < len(spans):
        return None
    number = {span: n for n, span in enumerate(spans)}
    places = [number[word.start, word.stop] for word in sentence.words]
    arcs = [
        (places[n], places[word.head - 1], word.deprel)
        for n, word in enumerate(sentence.words)
        if word.head
    ]
    return AlignedSentence(
        list(coded["input_ids"]), word_of, len(spans), [arc for arc in arcs if arc[0] != arc[1]]
    )


def require_offsets(tokenizer: Any) -> None:
    """Raise `MultiheadError` for a tokenizer without character offsets."""
    if tokenizer is None or isinstance(tokenizer, str) or not callable(tokenizer):
        raise MultiheadError(
            f"tokenizer={tokenizer!r}: words are aligned with a model's tokens by its own"
            " tokenizer; pass tokenizer=AutoTokenizer.from_pretrained(...)"
        )
    if not getattr(tokenizer, "is_fast", False):
        raise MultiheadError(
            f"tokenizer ({type(tokenizer).__name__}) has no character offsets (is_fast is False),"
            " so words can't be aligned with its tokens; expected a fast one: one with a"
            " tokenizer.json, which AutoTokenizer.from_pretrained gives where it can"
        )
