"""From the words of a sentence to the tokens of a model: which token is a piece of which word."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from ..errors import MultiheadError
from .conllu import Sentence


@dataclass(frozen=True)
class Aligned:
    """A sentence in tokens. Words here are those with letters of their own: two that share theirs
    ("du") are one.
    """

    ids: list[int]
    word_of: list[int]  # of each token, from 0; -1 for special tokens and bare spaces
    words: int
    arcs: list[
        tuple[int, int, str]
    ]  # dependent, head, relation; without the root's, and those inside one word


def align(sentence: Sentence, tokenizer: Any) -> Aligned | None:
    """The sentence's tokens, special ones included, each with its word; None where a word is left
    without a token.

    A token that covers two words belongs to the one that has most letters of it, the earlier of two
    with as many. So a token with the space before its word belongs to that word, and of "can" and
    "not" in one token one is left without.
    """
    coded = tokenizer(sentence.text, return_offsets_mapping=True, verbose=False)
    spans = sorted({(word.start, word.stop) for word in sentence.words})
    owner = [-1] * len(sentence.text)
    for n, (start, stop) in enumerate(spans):
        owner[start:stop] = [n] * (stop - start)
    word_of = []
    for start, stop in coded[
        "offset_mapping"
    ]:  # of special tokens, which stand on no letter, 0 and 0
        letters = Counter(n for n in owner[start:stop] if n >= 0)
        word_of.append(letters.most_common(1)[0][0] if letters else -1)
    if len(set(word_of) - {-1}) < len(spans):
        return None
    number = {span: n for n, span in enumerate(spans)}
    places = [number[word.start, word.stop] for word in sentence.words]
    arcs = [
        (places[n], places[word.head - 1], word.deprel)
        for n, word in enumerate(sentence.words)
        if word.head
    ]
    return Aligned(
        list(coded["input_ids"]), word_of, len(spans), [arc for arc in arcs if arc[0] != arc[1]]
    )


def require_offsets(tokenizer: Any) -> None:
    """`ValueError` for a tokenizer that can't say which letters a token stands on."""
    if tokenizer is None or isinstance(tokenizer, str) or not callable(tokenizer):
        raise MultiheadError(
            f"tokenizer={tokenizer!r}: words are found in a model's tokens by its own tokenizer; "
            "pass tokenizer=AutoTokenizer.from_pretrained(...)"
        )
    if not getattr(tokenizer, "is_fast", False):
        raise MultiheadError(
            f"tokenizer ({type(tokenizer).__name__}) can't say which letters a token stands on"
            " (is_fast is False), so words aren't found in its tokens; expected a fast one: one"
            " with a tokenizer.json, which AutoTokenizer.from_pretrained gives where it can"
        )
