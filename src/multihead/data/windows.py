"""Windows: texts cut into pieces that a model can take, each with its special tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from ..errors import MultiheadError
from .documents import Document, Example, each_document
from .tokenizing import Encoder, encode_target, max_tokens, require_tokenizer, truncate

__all__ = ["Window", "Windower", "cut_texts", "cut_windows"]

CONTEXT = 1024  # tokens of a window by default, if the model has as many positions


class Window(NamedTuple):
    """Tokens that the model reads as one sequence, and those among them that count.

    >>> Window([0, 13, 14, 15, 1], first=2, last=5).ids[2:5]
    [14, 15, 1]
    """

    ids: list[int]
    first: int  # the first position that counts
    last: int  # one past the last position that counts
    target: list[int] | None = None  # tokens that an encoder-decoder should give
    label: Any = None  # what a classifier should give


def cut_windows(ids: list[int], before: int, after: int, context: int, stride: int) -> list[Window]:
    """Cut a document into windows of at most `context` tokens, each `stride` tokens after the last.

    Each window is between the document's special tokens. A token counts once, in the first window
    that has it; where windows overlap, the repeated tokens are context only.

    Args:
        ids: the document's tokens.
        before, after: the number of special tokens at its beginning and at its end.
        context: tokens of a window, special ones included.
        stride: at most `context - before - after`.

    >>> windows = cut_windows([0, 11, 12, 13, 14, 15, 1], before=1, after=1, context=5, stride=2)
    >>> [(window.ids, window.first, window.last) for window in windows]
    [([0, 11, 12, 13, 1], 0, 4), ([0, 13, 14, 15, 1], 2, 5)]
    """
    if len(ids) <= context:
        return [Window(ids, 0, len(ids))]
    end = len(ids) - after
    body, room = ids[before:end], context - before - after
    windows: list[Window] = []
    counted = 0
    for start in range(0, len(body), stride):
        piece = body[start : start + room]
        is_last = start + room >= len(body)
        first = before + counted - start if start else 0
        last = before + len(piece) + (after if is_last else 0)
        windows.append(Window(ids[:before] + piece + ids[end:], first, last))
        counted = start + len(piece)
        if is_last:
            break
    return windows


class Windower:
    """Tokenises texts and cuts them to what the model takes: one window, or several.

    Args:
        tokenizer: the model's tokenizer.
        limit: the most tokens that the model takes, None where nothing bounds it. Longer texts are
            truncated to it, or, given a context,
        context: cut into windows of so many tokens, special ones included,
        stride: so many tokens apart; all but the special ones by default.
        model: the model, whose prompts come before each text, if it has some
            (sentence-transformers).
        continued: the texts are to be continued; see `Encoder`.

    Raises:
        MultiheadError: no tokenizer; a limit, context or stride that is out of range.

    >>> import multihead
    >>> _, tokenizer = multihead.load_builtin()
    >>> windower = Windower(tokenizer, context=4)
    >>> [len(window.ids) for window in windower.cut("the cat and the dog and the hat")]
    [4, 4, 4, 3]
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        limit: int | None = None,
        context: int | None = None,
        stride: int | None = None,
        model: nn.Module | None = None,
        continued: bool = False,
    ) -> None:
        self.encoder = Encoder(tokenizer, model, continued=continued)
        special = tokenizer.num_special_tokens_to_add()
        for name, value in (("limit", limit), ("context", context)):
            if value is not None and value <= special:
                raise MultiheadError(
                    f"{name}={value} leaves no room for text: this tokenizer adds {special} special"
                    f" tokens; give at least {special + 1}"
                )
        if context is None and stride is not None:
            raise MultiheadError(
                f"stride={stride} is the step between windows of context tokens; give context too"
            )
        if context is not None and limit is not None and context > limit:
            raise MultiheadError(
                f"context={context:,}: the model has {limit:,} positions; give at most that many"
            )
        if stride is None and context is not None:
            stride = context - special
        if context is not None and not 1 <= (stride or 0) <= context - special:
            raise MultiheadError(
                f"stride={stride}: expected 1 to {context - special} tokens (context={context}"
                f" without the {special} special ones); with a larger step tokens would be left out"
            )
        self.tokenizer, self.limit, self.context, self.stride = tokenizer, limit, context, stride
        self.truncated = self.windowed = self.texts = 0
        self.examples: list[str] = []  # of truncated texts

    def cut(self, text: Document) -> list[Window]:
        """The windows of the next text or conversation.

        Raises:
            TypeError, MultiheadError: see `multihead.data.tokenize`.
        """
        encoded = self.encoder.encode(text, self.texts)
        ids, before, after = encoded
        self.texts += 1
        if self.context is not None and self.stride is not None:
            windows = cut_windows(ids, before, after, self.context, self.stride)
            self.windowed += len(windows) > 1
            return windows
        if self.limit is not None and len(ids) > self.limit:
            self.truncated += 1
            if len(self.examples) < 3:
                self.examples.append(
                    f"text {self.texts:,}: {len(ids):,} tokens, the model has {self.limit:,}"
                    f" positions; read the {self.end} {self.limit:,}"
                )
            ids = truncate(encoded, self.limit, self.side)
        return [Window(ids, 0, len(ids))]

    @property
    def side(self) -> str:
        """The side on which a text is truncated, by its tokenizer."""
        return getattr(self.tokenizer, "truncation_side", "right")

    @property
    def end(self) -> str:
        """The tokens of a truncated text that are read: "first" or "last"."""
        return "last" if self.side == "left" else "first"

    @property
    def state(self) -> list[Any]:
        """State that `notes` depends on besides `texts` (JSON values), for a job that is
        resumed.
        """
        return [self.truncated, self.windowed, self.encoder.repeated, *self.examples]

    @state.setter
    def state(self, state: list[Any]) -> None:
        self.truncated, self.windowed, self.encoder.repeated, *self.examples = state

    def notes(self) -> list[str]:
        """Sentences on what was truncated, and what was cut into windows."""
        notes = list(self.examples)
        if self.truncated > len(self.examples):
            notes.append(
                f"{self.truncated - len(self.examples):,} more texts were read to their"
                f" {self.end} {self.limit:,} tokens"
            )
        if self.truncated:
            notes.append("given a context (--context) long texts are read whole, in windows")
        if self.windowed:
            notes.append(
                f"{self.windowed:,} of {self.texts:,} texts were longer than {self.context:,}"
                f" tokens and read in windows, {self.stride:,} tokens apart: heads see no further"
                " back than a window"
            )
        return notes + self.encoder.notes()


def cut_texts(
    model: nn.Module,
    texts: Document | Iterable[Document],
    tokenizer: Any,
    *,
    context: int | None = None,
    longest: int = CONTEXT,
    tokens: int | None = None,
) -> list[Window]:
    """Texts in windows, each a separate document between special tokens, in order. A text with a
    label or a target has one window, its beginning.

    Args:
        model: for the number of its positions.
        texts: one or several; see `each_document`.
        tokenizer: the model's tokenizer.
        context: tokens of a window, special ones included; by default the model's positions, at
            most
        longest: so many.
        tokens: stop after the window with which so many tokens are reached; None takes all.

    Raises:
        TypeError: texts that aren't strings.
        MultiheadError: no text, an empty one, no tokenizer, a context that is out of range.
    """
    documents = each_document(texts)
    if tokens is not None and tokens < 1:
        raise MultiheadError(f"tokens={tokens}: expected at least 1, or None for the whole text")
    require_tokenizer(tokenizer)
    limit = max_tokens(model, tokenizer)
    if context is None:
        context = min(limit or longest, longest)
    windower = Windower(tokenizer, limit=limit, context=context, model=model)
    windows: list[Window] = []
    count = 0
    for text in documents:
        target = label = None
        if isinstance(text, Example):  # it is of the text as a whole, so there is one window
            label = text.label
            target = None if text.target is None else encode_target(text.target, tokenizer, limit)
        for ids, *_ in windower.cut(text)[: None if target is label is None else 1]:
            windows.append(Window(ids, 0, len(ids), target, label))
            count += len(ids) + len(target or ())
            if tokens is not None and count >= tokens:
                return windows
    if not windows:
        raise MultiheadError("texts=[] is empty: expected at least one text")
    return windows
