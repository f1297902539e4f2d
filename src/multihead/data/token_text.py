"""Texts of tokens: whole characters where a tokenizer splits one into bytes, and whole words.

A byte-level tokenizer makes several tokens of one emoji, each of which decodes to U+FFFD. Labels
and classes of tokens show and match the character, maps by words show the word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import regex

__all__ = ["TokenGroup", "TokenText", "group_words"]

INCOMPLETE = "\ufffd"  # the decoded text of bytes that are no character
LONGEST = 16  # tokens in which bytes are looked for that make characters together
SPACES = ("\u2581", "\u0120")  # token strings of a single space
# The boundaries of Unicode's UAX 29: "don't" and "3.14" are words, each ideograph is one.
BOUNDARY = regex.compile(r"(?V1w)\b")


class TokenGroup(NamedTuple):
    """Tokens that make a character or a word together: those from `start` to before `stop`.

    >>> TokenGroup(2, 4, "playing").stop
    4
    """

    start: int
    stop: int
    text: str


class TokenText:
    """The texts of a tokenizer's tokens.

    Args:
        tokenizer: has `decode`; its added tokens, special ones among them, are words by themselves.

    >>> import multihead
    >>> _, tokenizer = multihead.load_builtin()
    >>> texts = TokenText(tokenizer)
    >>> ids = tokenizer("the cat")["input_ids"]
    >>> [group.text for group in texts.words(ids)]
    ['<s>', 'the', 'cat']
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.added = {
            *getattr(tokenizer, "all_special_ids", ()),
            *getattr(tokenizer, "added_tokens_decoder", ()),
        }
        self._decoded: dict[tuple[int, ...], str] = {}
        self._is_part: dict[int, bool] = {}

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some tokens; "" for ids that aren't the tokenizer's."""
        key = tuple(ids)
        if key not in self._decoded:
            kept = [i for i in key if i >= 0]
            try:
                text = self.tokenizer.decode(kept, clean_up_tokenization_spaces=False)
            except Exception:  # each library of tokenizers raises another for an unknown id
                text = ""
            self._decoded[key] = str(text) if kept else ""
        return self._decoded[key]

    def is_part(self, token: int) -> bool:
        """Whether a token is some bytes of a character, and no text by itself."""
        if token not in self._is_part:
            text = self.decode([token])
            self._is_part[token] = token not in self.added and (
                INCOMPLETE in text or (not text and self._string(token) not in ("", *SPACES))
            )
        return self._is_part[token]

    def characters(self, ids: Sequence[int]) -> list[TokenGroup]:
        """Each token by itself, but for those whose bytes make characters together."""
        groups, start = [], 0
        while start < len(ids):
            group = TokenGroup(start, start + 1, self.decode(ids[start : start + 1]))
            if self.is_part(ids[start]):
                group = self._complete(ids, start) or group
            groups.append(group)
            start = group.stop
        return groups

    def labels(self, ids: Sequence[int]) -> list[str]:
        """A text for each token; "😀 1/3" for the first of three that make a character, the id
        itself where it isn't the tokenizer's.
        """
        labels = []
        for start, stop, text in self.characters(ids):
            number = stop - start
            if number > 1:
                labels += [f"{text} {n}/{number}" for n in range(1, number + 1)]
            else:
                string = self._string(ids[start])
                labels.append(text or (" " if string in SPACES else string or str(ids[start])))
        return labels

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The texts of the tokens as they continue each other, which join to the text; tokens that
        make a character together are one piece.
        """
        return self._in_context(self.characters(ids), ids)

    def words(self, ids: Sequence[int]) -> list[TokenGroup]:
        """The words of a text, with its punctuation and white space; see `group_words`."""
        groups: list[TokenGroup] = []
        run: list[TokenGroup] = []
        for unit in self.characters(ids):
            if unit.stop == unit.start + 1 and (
                ids[unit.start] < 0 or ids[unit.start] in self.added
            ):
                groups += [*self._words_of(run, ids), unit]
                run = []
            else:
                run.append(unit)
        return groups + self._words_of(run, ids)

    # ----

    def _string(self, token: int) -> str:
        names = getattr(self.tokenizer, "convert_ids_to_tokens", None)
        try:
            return str((names and token >= 0 and names(token)) or "")
        except Exception:  # see decode
            return ""

    def _complete(self, ids: Sequence[int], start: int) -> TokenGroup | None:
        """The shortest group from `start` on that is whole characters."""
        for stop in range(start + 1, min(start + LONGEST, len(ids)) + 1):
            if not self.is_part(ids[stop - 1]):
                return None
            text = self.decode(ids[start:stop])
            if text and INCOMPLETE not in text:
                return TokenGroup(start, stop, text)
        return None

    def _in_context(self, run: Sequence[TokenGroup], ids: Sequence[int]) -> list[str]:
        """The text of each unit as it continues the one before it: with the space between them."""
        texts = []
        for n, (start, stop, text) in enumerate(run):
            if n:
                before = ids[run[n - 1].start : start]
                shorter, longer = self.decode(before), self.decode([*before, *ids[start:stop]])
                if longer.startswith(shorter):
                    text = longer[len(shorter) :]
            if not text and self._string(ids[start]) in SPACES:
                text = " "
            texts.append(text)
        return texts

    def _words_of(self, run: Sequence[TokenGroup], ids: Sequence[int]) -> list[TokenGroup]:
        texts = self._in_context(run, ids)
        words: list[int] = []  # of each character; -1 for white space
        for n, part in enumerate(BOUNDARY.split("".join(texts))):
            words += [-1 if part.isspace() else n] * len(part)
        owner, at = list[int](), 0  # the word of each unit; a negative number for none
        for n, text in enumerate(texts):
            inside = Counter(word for word in words[at : at + len(text)] if word >= 0)
            owner.append(inside.most_common(1)[0][0] if inside else -1 - n)
            at += len(text)
        for n in range(len(run) - 1, 0, -1):
            if texts[n - 1] == " " and owner[n] >= 0 and not texts[n][:1].isspace():
                owner[n - 1] = owner[n]  # the space before a word, in a token by itself
        groups: list[TokenGroup] = []
        for n, unit in enumerate(run):
            if n and owner[n] == owner[n - 1]:
                groups[-1] = TokenGroup(groups[-1].start, unit.stop, groups[-1].text + texts[n])
            else:
                groups.append(TokenGroup(unit.start, unit.stop, texts[n]))
        return [TokenGroup(a, b, text.strip() or text) for a, b, text in groups]


def group_words(ids: Sequence[int], tokenizer: Any) -> list[TokenGroup]:
    """The words that a text's tokens make, in order: every token is in one group.

    Words are those of Unicode (UAX 29): "don't" and "3.14" are one each, so is an ideograph, and
    punctuation is apart. Special and other added tokens, padding (negative ids) and tokens of white
    space are groups by themselves, a single space belongs to the word after it. A token that covers
    two words belongs to the one that has most of its characters, the earlier of two with as many.

    Args:
        ids: the token ids of one text.
        tokenizer: the model's tokenizer.

    >>> import multihead
    >>> _, tokenizer = multihead.load_builtin()
    >>> group_words(tokenizer("the cat, too")["input_ids"], tokenizer)[1:3]
    [TokenGroup(start=1, stop=2, text='the'), TokenGroup(start=2, stop=4, text='cat')]
    """
    return TokenText(tokenizer).words(ids)
