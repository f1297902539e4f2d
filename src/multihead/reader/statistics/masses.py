"""Masses: the part of the attention weights on a class of keys.

A mass is given three times. By weight (`previous`): the mean over queries of the sum of A_ij on
the class. By contribution (`contribution:previous`): the sum over queries of c_ij on the class,
divided by the sum over the same queries of all c_ij. For uniform weights (`even:previous`): what
`contribution:previous` would be if the head read its allowed keys uniformly. All three rest on
the same queries: those that may read at least one key of the class.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ...data.token_text import TokenText
from ...errors import MultiheadError
from .base import Statistic, why_no_key

if TYPE_CHECKING:
    from torch import Tensor

    from ..context import TokenContext
    from .base import SiteState

SOME_KEY = "queries that may read such a key"
MASKED_COPY = "tokens are in this text twice, but the mask lets no query read that far back"
SEARCHED = 256  # rows of tokens in which what explains an empty class is looked for
OLSSON = "Olsson et al. 2022"


class Mass(Statistic):
    """The weight on a class of keys.

    The class is the same for all queries (`key_values` returns booleans), one key for each query
    (`key_index`), or the earlier keys whose id is that of the query's token (`matching_ids`).
    """

    is_protocol = True
    methods = ("key_values", "key_index", "matching_ids")
    range = (0.0, 1.0)
    queries = SOME_KEY
    is_mass = True
    probed: ClassVar[bool] = False  # also measured on the probe's random tokens

    def key_index(self, context: TokenContext, positions: Tensor) -> Tensor | None:
        """The key of each query, `[B, L]` (numbers outside of 0..S-1 are no key). `positions`
        `[B, L]` are the queries' own key numbers.
        """
        return None

    def matching_ids(self, context: TokenContext) -> Tensor | None:
        """An id for each key, `[B, S]`; earlier keys with the id of the query's token match."""
        return None


class Previous(Mass):
    name, formula, meaning = "previous", "mass at i - 1", "reads the previous token"
    needs_one_sequence = probed = True
    offset = -1
    hidden = "no query may read the token before it"

    def why_absent(self, site: SiteState) -> str:
        return why_no_key(site, self.hidden)

    def key_index(self, context: TokenContext, positions: Tensor) -> Tensor | None:
        return positions + self.offset


class Self(Previous):
    name, formula, meaning = "self", "mass at i", "reads the token itself"
    probed = False
    offset = 0

    def why_absent(self, site: SiteState) -> str:
        return "the mask forbids it: no query may read itself"


class Next(Previous):
    name, formula, meaning = "next", "mass at i + 1", "reads the next token"
    probed = False
    offset, hidden = 1, "no query may read the token after it"

    def why_missing(self, site: SiteState) -> str:
        if site.causal:
            return "the model is causal: no query may read a later key"
        return super().why_missing(site)


class First(Mass):
    """Attention sinks are mostly the first key (Xiao et al. 2023, arXiv:2309.17453)."""

    name, formula, meaning = "first", "mass on the first key", "reads the first token"
    source = "Xiao et al. 2023"

    def why_absent(self, site: SiteState) -> str:
        return "no query may read the first token: the mask, or a sliding cache, leaves it out"

    def key_index(self, context: TokenContext, positions: Tensor) -> Tensor | None:
        return context.first_key[:, None].expand_as(positions)


class Special(Mass):
    """BOS, CLS, SEP and the like (Clark et al. 2019, arXiv:1906.04341)."""

    name, formula, meaning = "special", "mass on special tokens", "reads special tokens"
    source = "Clark et al. 2019"
    needs_one_sequence = needs_tokens = True

    def why_absent(self, site: SiteState) -> str:
        if not site.knows_special:
            return (
                "the ids of special tokens aren't known: the model's config names none; pass them"
                " as special_ids=, such as special_ids=tokenizer.all_special_ids, or to"
                " multihead.read the tokenizer"
            )
        if not site.text.special:
            return "no special token is in this text"
        return "special tokens are in this text, but the mask lets no query read one"

    def key_values(self, context: TokenContext) -> Tensor | None:
        return context.special


class Duplicate(Mass):
    """Duplicate-token heads (Olsson et al. 2022, arXiv:2209.11895)."""

    name, formula = "duplicate", "mass on j < i with token_j = token_i"
    meaning, source = "reads earlier copies of the token", OLSSON
    needs_one_sequence = needs_tokens = probed = True

    def why_absent(self, site: SiteState) -> str:
        if not site.text.copied:
            return "no token is in this text twice"
        return MASKED_COPY

    def matching_ids(self, context: TokenContext) -> Tensor | None:
        return context.key_ids


class Induction(Mass):
    """Induction heads (Olsson et al. 2022, arXiv:2209.11895)."""

    name, formula = "induction", "mass on j < i with token_(j-1) = token_i"
    meaning, source = "reads what followed an earlier copy of the token", OLSSON
    needs_one_sequence = needs_tokens = probed = True

    def why_absent(self, site: SiteState) -> str:
        if not site.text.repeated:
            return "no token is in this text twice, with one in between"
        return MASKED_COPY

    def matching_ids(self, context: TokenContext) -> Tensor | None:
        return context.previous_ids


class Probe(Mass):
    """A mass on a sequence of random tokens that is repeated once, where chance doesn't help."""

    queries = "queries of the repetition"
    source, cost = OLSSON, "a short extra run"
    needs_one_sequence = needs_tokens = True

    def __init__(self, of: Mass, meaning: str) -> None:
        self.name = f"probe:{of.name}"
        self.formula = f"{of.name}, on random tokens that are repeated"
        self.meaning = meaning


class TokenClass(Mass):
    """The mass on tokens whose decoded text matches a regular expression: `class:NAME`.

    Tokens that make a character together match where the character does; by words, the tokens of a
    word match where the word does.

    Args:
        name: the column is `class:NAME`.
        pattern: is searched for in each token's text (`re.search`).
        tokenizer: decodes token ids; `multihead.read` passes its own.
        by: "token" or "word".
    """

    needs_one_sequence = needs_tokens = True

    def __init__(
        self,
        name: str,
        pattern: re.Pattern[str] | None = None,
        tokenizer: Any = None,
        by: str = "token",
    ) -> None:
        self.name, self.by = f"class:{name}", by
        self._last: tuple[Tensor, Tensor] | None = None  # ids, and which are members by words
        self.formula = f"mass on tokens of the class {name}"
        self.meaning = f"reads tokens of the class {name}"
        self.pattern = pattern
        self.texts = None if tokenizer is None else TokenText(tokenizer)
        self.members: dict[str, bool] = {}  # a token's text -> in the class
        self.found = False  # a key of the class
        self.split = ""  # what matches, but only over several tokens
        self.searched = 0  # rows of tokens in which that was looked for

    def key_values(self, context: TokenContext) -> Tensor | None:
        given = context.given_key_ids  # so that the tokens of a picture are a class, too
        if context.key_ids is None or given is None or self.texts is None:
            return None
        if self.by == "word":
            members = self._members_by_word(given.masked_fill(~context.key_valid, -1))
            self.found |= bool(members.any())
            return members & context.key_valid
        ids, place = given.unique(return_inverse=True)
        known = ids.tolist()
        texts = [self.texts.decode([i]) for i in known]
        held = [i >= 0 and self._holds(text) for i, text in zip(known, texts, strict=True)]
        members = place.new_tensor(held).bool()[place]
        parts = [self.texts.is_part(i) for i in known]
        if any(parts):
            has_parts = place.new_tensor(parts).bool()[place].any(-1)
            for row in has_parts.nonzero().flatten().tolist():
                for start, stop, text in self.texts.characters(given[row].tolist()):
                    if stop - start > 1:
                        members[row, start:stop] = self._holds(text)
        members &= context.key_valid
        if not self.found:
            self.found = bool(members.any())
            if not self.found and not self.split and self.searched < SEARCHED:
                self._find_split(given, context.key_valid)
        return members

    def why_absent(self, site: SiteState) -> str:
        if self.pattern is None:
            return ""
        if self.found:
            return "tokens of the class are in this text, but the mask lets no query read one"
        return self.split or f"no token of this text matches {self.pattern.pattern!r}"

    def settings(self) -> Any:
        pattern = None if self.pattern is None else self.pattern.pattern
        return (self.name, pattern, self.by) if self.by == "word" else (self.name, pattern)

    def _members_by_word(self, ids: Tensor) -> Tensor:
        """The keys that are tokens of a word of the class; each pass is grouped once."""
        assert self.texts is not None
        last = self._last
        if last is None or last[0].shape != ids.shape or bool((last[0] != ids).any()):
            members = ids.new_zeros(ids.shape).bool()
            for row, tokens in enumerate(ids.tolist()):
                for start, stop, text in self.texts.words(tokens):
                    members[row, start:stop] = tokens[start] >= 0 and self._holds(text)
            self._last = last = ids, members
        return last[1]

    def _holds(self, text: str) -> bool:
        if text not in self.members:
            assert self.pattern is not None
            self.members[text] = self.pattern.search(text) is not None
        return self.members[text]

    def _find_split(self, ids: Tensor, valid: Tensor) -> None:
        """Look for a place in a text that matches over several tokens."""
        assert self.pattern is not None and self.texts is not None
        for row, real in zip(ids, valid, strict=True):
            self.searched += 1
            pieces = self.texts.pieces(row[real].tolist())
            match = self.pattern.search("".join(pieces))
            if match is None or not match[0]:
                continue
            ends = list(itertools.accumulate(map(len, pieces)))
            inside = [
                repr(piece)
                for piece, end in zip(pieces, ends, strict=True)
                if end > match.start() and end - len(piece) < match.end()
            ]
            self.split = (
                f"no token by itself matches {self.pattern.pattern!r}: in this text"
                f" {match[0]!r} is several tokens, {' '.join(inside)}; give an expression that"
                " matches one of them"
            )
            return


def token_classes(
    classes: Mapping[str, str] | None, tokenizer: Any, by: str = "token"
) -> list[TokenClass]:
    """A `TokenClass` for each name and regular expression.

    Raises:
        MultiheadError: a name or an expression that isn't one, or no tokenizer.
        TypeError: not a mapping of strings to strings.
    """
    if not classes:
        return []
    if not isinstance(classes, Mapping) or not all(
        isinstance(x, str) for pair in classes.items() for x in pair
    ):
        raise TypeError(
            f"classes={classes!r}: expected names of classes with a regular expression each,"
            ' such as {"digits": r"\\d"}'
        )
    if tokenizer is None:
        raise MultiheadError(
            f"classes={dict(classes)!r} match the text of tokens, but tokenizer is None:"
            " pass the tokenizer"
        )
    chosen = []
    for name, pattern in classes.items():
        if not re.fullmatch(r"[\w.-]{1,60}", name):
            raise MultiheadError(
                f"classes: {name!r} isn't a name; expected up to 60 letters, digits, _, . or -,"
                " as in digits=\\d"
            )
        try:
            chosen.append(TokenClass(name, re.compile(pattern), tokenizer, by))
        except re.error as error:
            raise MultiheadError(
                f"classes: {name}={pattern!r} isn't a regular expression ({error}); correct it, or"
                " escape its special characters with a backslash"
            ) from error
    return chosen
