"""From documents to passes of a model: tokens, windows of long documents, and rows of like length
in one batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from ..errors import MultiheadError
from .texts import beginning, check_tokenizer, no_room, tokens_of

if TYPE_CHECKING:  # see loading.py
    from torch import Tensor

__all__ = ["Pass", "Plan", "Unit", "windows"]

CHUNK = 64  # batches whose rows are sorted by length: so many documents are held in memory
Row = tuple[list[int], int, int]  # token ids, the first row that counts, the one behind the last


@dataclass(frozen=True)
class Pass:
    """One pass of the model."""

    inputs: dict[str, Tensor]  # input_ids and attention_mask [B, L]
    document_of: (
        list[int] | None
    )  # each row's document, among those of the unit; None: each row is one
    counts: Tensor | None  # bool [B, L]: the rows that count; None: all that are text


@dataclass(frozen=True)
class Unit:
    """Whole documents that are read together, in one pass; or one long document, in several."""

    passes: list[Pass]
    documents: int


def windows(ids: list[int], before: int, after: int, context: int, stride: int) -> list[Row]:
    """A document's windows: `context` tokens each at most, `stride` further on each time, each
    between its special tokens.

    `before` and `after` are how many special tokens open and close the document. A token's row
    counts once: in the first window that holds it. So the rows of an overlap are context only.

    >>> windows([0, 11, 12, 13, 14, 15, 1], before=1, after=1, context=5, stride=2)
    [([0, 11, 12, 13, 1], 0, 4), ([0, 13, 14, 15, 1], 2, 5)]
    """
    if len(ids) <= context:
        return [(ids, 0, len(ids))]
    end = len(ids) - after
    body, room = ids[before:end], context - before - after
    found: list[Row] = []
    counted = 0
    for start in range(0, len(body), stride):
        piece = body[start : start + room]
        last = start + room >= len(body)
        first = before + counted - start if start else 0
        found.append(
            (ids[:before] + piece + ids[end:], first, before + len(piece) + (after if last else 0))
        )
        counted = start + len(piece)
        if last:
            break
    return found


class Plan:
    """Documents as units, in chunks: the same for the same documents and settings, wherever it
    starts and whoever reads.

    Args:
        texts: the documents; taken one after another, no more than a chunk ahead.
        limit: the most tokens that the model takes, None where nothing bounds it. Longer documents
            are cut there ...
        context: ... or, given this, read in windows of so many tokens, `stride` (all but the
            special ones) apart.
        batch_size: rows a pass.
        left: pad on the left, for texts that are to be gone on with.
        alike: only texts of one length go together, so that none is padded.

    Raises:
        ValueError: a context or stride that can't be; while iterating, an empty text or one without
            tokens.
    """

    def __init__(
        self,
        texts: Iterable[str],
        tokenizer: Any,
        *,
        limit: int | None = None,
        context: int | None = None,
        stride: int | None = None,
        batch_size: int = 8,
        left: bool = False,
        alike: bool = False,
    ) -> None:
        check_tokenizer(tokenizer, batch_size)
        self.special = tokenizer.num_special_tokens_to_add()
        if limit is not None and limit <= self.special:
            raise no_room("limit", limit, self.special)
        if context is None and stride is not None:
            raise MultiheadError(
                f"stride={stride}: is the step between windows of context tokens; give context too"
            )
        if context is not None and context <= self.special:
            raise no_room("context", context, self.special)
        if context is not None and limit is not None and context > limit:
            raise MultiheadError(
                f"context={context:,}: the model has {limit:,} positions; give at most that many"
            )
        self.context, self.limit = context, limit
        self.stride = stride if stride is not None or context is None else context - self.special
        if context is not None and not 1 <= (self.stride or 0) <= context - self.special:
            raise MultiheadError(
                f"stride={stride}: expected 1 to {context - self.special} tokens (context={context}"
                f" without the {self.special} special ones); with a larger step tokens would be"
                " left out"
            )
        self.texts, self.tokenizer, self.batch_size, self.left = (
            iter(texts),
            tokenizer,
            batch_size,
            left,
        )
        self.alike = alike
        self.taken = 0  # documents
        self.ended = False
        self.cut = self.windowed = 0  # documents
        self.examples: list[str] = []  # of those that were cut
        self.remarks: list[str] = []  # that stand before the notes
        self._hash = hashlib.sha256()
        full, bare = (
            tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False)
        )
        self.before = next((n for n in range(len(full)) if full[n : n + len(bare)] == bare), 0)

    @property
    def digest(self) -> str:
        """Of the documents taken so far."""
        return self._hash.hexdigest()

    @property
    def told(self) -> list[Any]:
        """What the notes say, for one who begins after a `skip`."""
        return [self.cut, self.windowed, *self.examples]

    @told.setter
    def told(self, told: list[Any]) -> None:
        self.cut, self.windowed, *self.examples = told

    def notes(self) -> list[str]:
        """What was cut, and what was read in windows."""
        found = [*self.remarks, *self.examples]
        if self.cut > len(self.examples):
            found.append(
                f"{self.cut - len(self.examples):,} more texts were read to their first"
                f" {self.limit:,} tokens"
            )
        if self.cut:
            found.append("given a context (--context) long texts are read whole, in windows")
        if self.windowed:
            found.append(
                f"{self.windowed:,} of {self.taken:,} texts were longer than {self.context:,}"
                f" tokens and read in windows, {self.stride:,} tokens apart: heads see no further"
                " back than a window"
            )
        return found

    def skip(self, number: int) -> None:
        """Take so many documents without looking at more than what they are."""
        for text in islice(self.texts, number):
            self._take(text)

    def chunks(self) -> Iterator[list[Unit]]:
        """The units, as many at a time as are sorted together."""
        while not self.ended:
            held: list[list[Row]] = []
            rows = 0
            for text in self.texts:
                held.append(self._rows(text))
                rows += len(held[-1])
                if rows >= CHUNK * self.batch_size:
                    break
            else:
                self.ended = True
            held.sort(
                key=lambda document: -max(len(ids) for ids, *_ in document)
            )  # the longest first
            yield list(self._units(held))

    def _take(self, text: str) -> None:
        self.taken += 1
        content = text.encode("utf-8", "surrogatepass")
        self._hash.update(len(content).to_bytes(8, "little") + content)

    def _rows(self, text: str) -> list[Row]:
        ids = tokens_of(text, self.taken, self.tokenizer)
        self._take(text)
        if self.context is not None and self.stride is not None:
            found = windows(ids, self.before, self.special - self.before, self.context, self.stride)
            self.windowed += len(found) > 1
            return found
        if self.limit is not None and len(ids) > self.limit:
            self.cut += 1
            if len(self.examples) < 3:
                self.examples.append(
                    f"text {self.taken:,}: {len(ids):,} tokens, the model has {self.limit:,}"
                    f" positions; read the first {self.limit:,}"
                )
            ids = beginning(text, self.tokenizer, self.limit)
        return [(ids, 0, len(ids))]

    def _units(self, held: list[list[Row]]) -> Iterator[Unit]:
        together: list[list[Row]] = []
        for document in held:
            full = sum(map(len, together)) + len(document) > self.batch_size
            if together and (
                full or (self.alike and len(document[0][0]) != len(together[0][0][0]))
            ):
                yield self._unit(together)
                together = []
            together.append(document)
        if together:
            yield self._unit(together)

    def _unit(self, documents: list[list[Row]]) -> Unit:
        rows = [(row, number) for number, document in enumerate(documents) for row in document]
        return Unit(
            [
                self._pass(rows[n : n + self.batch_size])
                for n in range(0, len(rows), self.batch_size)
            ],
            len(documents),
        )

    def _pass(self, rows: list[tuple[Row, int]]) -> Pass:
        import torch
        from torch.nn.utils.rnn import pad_sequence

        side = "left" if self.left else "right"
        ids = [torch.tensor(ids) for (ids, *_), _ in rows]
        padded = pad_sequence(
            ids, batch_first=True, padding_value=self.tokenizer.pad_token_id or 0, padding_side=side
        )
        # Not `ids != padding`: where there is no padding token, or it is the end token, real tokens
        # have that id too.
        mask = pad_sequence(
            [torch.ones_like(row) for row in ids], batch_first=True, padding_side=side
        )
        counts = None
        if any(last - first < len(row) for (row, first, last), _ in rows):
            at = torch.arange(padded.shape[1])
            counts = torch.stack([(at >= first) & (at < last) for (_, first, last), _ in rows])
        return Pass(
            {"input_ids": padded, "attention_mask": mask}, [number for _, number in rows], counts
        )
