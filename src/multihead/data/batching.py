"""From texts of any number to the batches of a reading: tokenise, cut into windows, sort by length,
pad. Memory is bounded: no more than a chunk of 64 batches is held.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import MultiheadError
from ..models.introspect import (
    can_generate,
    device_of,
    find_sentence_transformer,
    inner_model,
    is_encoder_decoder,
    takes_padding,
    text_config,
)
from .batch import Batch, collate
from .documents import Document, encode_document, is_document, several
from .ready import are_ready, ready_inputs, take_ready
from .targets import complete_decoder, generate_targets, target_batch
from .tokenizing import max_tokens, require_tokenizer
from .windows import Window, Windower, cut_texts

__all__ = ["ReadyBatches", "TextBatches", "Unit", "first_batch", "plan_batches", "window_batches"]

CHUNK = 64  # batches whose sequences are sorted by length, and so held in memory
BOTH_SIDES = (
    "an encoder-decoder reads the text on both sides: the decoder is given it as what it should"
    " produce"
)


@dataclass(frozen=True)
class Unit:
    """Whole documents that are read together: in one batch, or one long document in several."""

    batches: list[Batch]
    documents: int


class TextBatches:
    """Texts as units, in chunks: the same units for the same texts and settings, also after `skip`.

    Args:
        texts: the documents (texts or conversations); taken one after another, no more than a
            chunk ahead.
        windower: cuts them.
        batch_size: sequences in a batch.
        left: pad on the left, for texts that are to be continued.
        same_length: only texts of one length in a batch, so that none is padded.
        chunk: batches whose sequences are sorted by length together, 64 by default.

    Raises:
        MultiheadError: no tokenizer or batch size; while iterating, an empty text or one without
            tokens.

    >>> import multihead
    >>> _, tokenizer = multihead.load_builtin()
    >>> texts = ["the cat", "the cat sat on the mat", "the dog"]
    >>> batches = TextBatches(texts, Windower(tokenizer), batch_size=2)
    >>> [unit.batches[0].inputs["input_ids"].shape for chunk in batches.chunks() for unit in chunk]
    [torch.Size([2, 8]), torch.Size([1, 4])]
    """

    def __init__(
        self,
        texts: Iterable[Document],
        windower: Windower,
        *,
        batch_size: int = 8,
        left: bool = False,
        same_length: bool = False,
        chunk: int | None = None,
    ) -> None:
        require_tokenizer(windower.tokenizer, batch_size)
        self.texts, self.windower, self.batch_size = iter(texts), windower, batch_size
        self.left, self.same_length = left, same_length
        self.chunk = CHUNK if chunk is None else chunk
        self.taken = 0  # documents
        self.ended = False
        self.remarks: list[str] = []  # before the windower's notes
        self._hash = hashlib.sha256()

    @property
    def limit(self) -> int | None:
        """The most tokens in a sequence."""
        return self.windower.limit

    @property
    def digest(self) -> str:
        """Hash of the documents taken so far."""
        return self._hash.hexdigest()

    @property
    def state(self) -> list[Any]:
        """State that `notes` depends on (JSON values), for a reading that is resumed after a
        `skip`.
        """
        return self.windower.state

    @state.setter
    def state(self, state: list[Any]) -> None:
        self.windower.state = state

    def notes(self) -> list[str]:
        """Sentences on what was truncated, and what was cut into windows."""
        return [*self.remarks, *self.windower.notes()]

    def skip(self, number: int) -> None:
        """Take so many documents without tokenising them."""
        for text in itertools.islice(self.texts, number):
            self._take(text)
            self.windower.texts += 1

    def chunks(self) -> Iterator[list[Unit]]:
        """The units, as many at a time as are sorted together."""
        while not self.ended:
            documents: list[list[Window]] = []
            sequences = 0
            for text in self.texts:
                documents.append(self.windower.cut(text))
                self._take(text)
                sequences += len(documents[-1])
                if sequences >= self.chunk * self.batch_size:
                    break
            else:
                self.ended = True
            # the longest first
            documents.sort(key=lambda windows: -max(len(window.ids) for window in windows))
            yield [self._unit(together) for together in self._together(documents)]

    def _take(self, text: Document) -> None:
        self.taken += 1
        content = encode_document(text)
        self._hash.update(len(content).to_bytes(8, "little") + content)

    def _together(self, documents: list[list[Window]]) -> Iterator[list[list[Window]]]:
        """Documents that make a unit: as many as fit into one batch."""
        together: list[list[Window]] = []
        for windows in documents:
            is_full = sum(map(len, together)) + len(windows) > self.batch_size
            differs = together and len(windows[0].ids) != len(together[0][0].ids)
            if together and (is_full or (self.same_length and differs)):
                yield together
                together = []
            together.append(windows)
        if together:
            yield together

    def _unit(self, documents: list[list[Window]]) -> Unit:
        rows = [(window, n) for n, windows in enumerate(documents) for window in windows]
        batches = []
        for _, group in itertools.groupby(
            rows, key=lambda row: len(row[0].ids) if self.same_length else 0
        ):
            same = list(group)
            for start in range(0, len(same), self.batch_size):
                windows, numbers = zip(*same[start : start + self.batch_size])
                batches.append(
                    collate(windows, self.windower.tokenizer, left=self.left, document=numbers)
                )
        return Unit(batches, len(documents))


class ReadyBatches:
    """Ready-made model inputs in the place of `TextBatches`: each batch is a unit, each of its
    sequences a document.
    """

    digest, state, limit = "", None, None

    def __init__(self, batches: Iterable[Any], model: nn.Module) -> None:
        self.ended = isinstance(batches, Sized)  # all are there, and their number is known
        self.units = (
            Unit([Batch(ready_inputs(batch, number, model))], 0)
            for number, batch in enumerate(batches)
        )
        self.taken = 0

    def notes(self) -> list[str]:
        return []

    def skip(self, number: int) -> None:
        raise NotImplementedError

    def chunks(self) -> Iterator[list[Unit]]:
        """All units at once where their number is known, else one after another."""
        return iter([list(self.units)]) if self.ended else ([unit] for unit in self.units)


def plan_batches(
    model: nn.Module,
    texts: Any,
    tokenizer: Any,
    *,
    batch_size: int = 8,
    context: int | None = None,
    stride: int | None = None,
    new_tokens: int | None = None,
) -> TextBatches | ReadyBatches:
    """The units of a reading: of texts, or of ready-made batches of model inputs.

    Args:
        model: for its number of positions, and what it takes.
        texts: one text, conversation or batch (a dict of model inputs), or an iterable of them;
            see `several`.
        tokenizer: the model's tokenizer, for texts.
        batch_size: sequences in a batch of texts.
        context, stride: see `Windower`.
        new_tokens: the number of tokens that the model will write after each text: texts are
            padded on the left and truncated so that the new tokens have room.

    Raises:
        TypeError: texts that are no texts, a tokenizer that is none.
        MultiheadError: no text, no tokenizer, a model that takes no text, settings out of range.
    """
    texts = several(texts)
    if isinstance(texts, list):
        are_texts = all(map(is_document, texts))
    else:  # the kind of a generator is known once it gave one
        first = list(itertools.islice(texts, 1))
        texts = itertools.chain(first, texts)
        are_texts = bool(first) and is_document(first[0])
    if not are_texts:
        settings = {"context": context, "stride": stride, "generate": new_tokens}
        for name, value in settings.items():
            if value is not None:
                raise MultiheadError(
                    f"{name}={value} is for texts; ready-made inputs are read as they are"
                )
        return ReadyBatches(texts, model)
    _require_text_input(model, texts, tokenizer)
    limit, both_sides = max_tokens(model, tokenizer), is_encoder_decoder(model)
    if new_tokens is None:
        windower = Windower(tokenizer, limit=limit, context=context, stride=stride, model=model)
        same_length = not takes_padding(model)
        batches = TextBatches(texts, windower, batch_size=batch_size, same_length=same_length)
        if both_sides:
            batches.remarks.append(BOTH_SIDES)
        return batches
    if context is not None or stride is not None:
        raise MultiheadError(
            f"context={context}, stride={stride} with generate: what is written after a window"
            " isn't the text's continuation; leave them out, and texts are truncated so that the"
            " new tokens have room"
        )
    room = limit if both_sides or limit is None else limit - new_tokens
    if room is not None and room < 2:
        raise MultiheadError(
            f"generate: max_new_tokens={new_tokens:,} leaves no room for a text; the model has"
            f" {limit:,} positions"
        )
    # Where positions are counted from the padding on, a padded text would be another text.
    counts_padding = "position_ids" not in inspect.signature(inner_model(model).forward).parameters
    chunked = getattr(text_config(model), "attention_chunk_size", None) is not None
    return TextBatches(
        texts,
        Windower(tokenizer, limit=room, model=model, continued=True),
        batch_size=batch_size,
        left=not both_sides,
        same_length=not both_sides and (counts_padding or chunked),
    )


def first_batch(model: nn.Module, texts: Any, tokenizer: Any = None) -> tuple[dict[str, Any], int]:
    """The model inputs of the first of some texts or ready-made batches, and how many there are.

    Text is truncated to what the model takes; an encoder-decoder gets it on both sides.
    """
    if tokenizer is None and (holder := find_sentence_transformer(model)) is not None:
        tokenizer = holder.tokenizer
    plan = plan_batches(model, texts, tokenizer, batch_size=1)
    is_text = isinstance(plan, TextBatches)
    batches = [batch for chunk in plan.chunks() for unit in chunk for batch in unit.batches]
    if not batches:
        raise MultiheadError("texts=[] is empty: expected at least one text to read")
    first = batches[0].for_model(model) if is_text else batches[0]
    return first.inputs, len(batches)


def window_batches(
    model: nn.Module,
    texts: Document | Iterable[Document] | Iterable[Mapping[str, Any]],
    tokenizer: Any,
    *,
    context: int,
    tokens: int | None = None,
) -> list[Batch]:
    """Texts in windows of at most `context` tokens, one in each batch, to about `tokens` in all;
    ready-made batches stay. On the model's device; an encoder-decoder gets the target on the
    decoder's side, or what it generates.

    Raises:
        TypeError, MultiheadError: see `cut_texts`.
    """
    listed = list(several(texts))
    if are_ready(listed):
        ready = [Batch(take_ready(model, inputs, n)) for n, inputs in enumerate(listed)]
        return [complete_decoder(model, batch) for batch in ready]
    windows = cut_texts(model, listed, tokenizer, longest=context, tokens=tokens)
    if is_encoder_decoder(model) and can_generate(model):
        if windows[0].target is None:
            windows = generate_targets(model, tokenizer, windows)
        return [target_batch(model, tokenizer, [window]) for window in windows]
    device = device_of(model)
    return [complete_decoder(model, collate([window], tokenizer).to(device)) for window in windows]


def _require_text_input(model: nn.Module, texts: Any, tokenizer: Any) -> None:
    if isinstance(texts, list) and not texts:
        raise MultiheadError("texts=[] is empty: expected at least one text to read")
    if tokenizer is None:
        raise MultiheadError(
            "texts are strings but tokenizer is None: pass"
            " tokenizer=AutoTokenizer.from_pretrained(...), or batches of ready-made model inputs"
            " (dicts of tensors)"
        )
    if isinstance(tokenizer, str) or not callable(tokenizer):
        raise TypeError(
            f"tokenizer={tokenizer!r} is a {type(tokenizer).__name__}: expected a tokenizer, such"
            " as AutoTokenizer.from_pretrained(folder) returns"
        )
    inner = inner_model(model)
    if getattr(inner, "main_input_name", "input_ids") != "input_ids" and hasattr(inner, "config"):
        raise MultiheadError(
            f"{type(inner).__name__} takes {inner.main_input_name}, not text; pass ready-made model"
            f" inputs (dicts of tensors): multihead.read(model, [{{{inner.main_input_name!r}:"
            " ...}])"
        )
