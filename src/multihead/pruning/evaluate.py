"""What a model loses on a text, document by document, and whether another one loses more: measures,
and paired intervals.

A measure is given for each document, so that two models are compared on the same ones: what differs
    between documents drops
out of the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..data.scoring import MASKED_LOSS, TOKEN_LOSS, find_loss, make_non_finite_error, scored_batch
from ..data.tokenizing import require_tokenizer
from ..data.windows import cut_texts
from ..errors import MultiheadError
from ..io import Progress
from ..models.introspect import require_model
from ..models.transformers import evaluation
from ..user_code import load_name

__all__ = ["Difference", "Losses", "difference", "evaluate", "function", "interval"]

Floats = NDArray[np.float64]
RESAMPLES = 5000
LOGITS = 2**24  # that are computed at once


@dataclass(frozen=True, eq=False)
class Losses:
    """A measure on each of some documents.

    `total` and `count` are float64 `[documents]`: the sum over a document's scored tokens (nats),
    and how many there are. A measure of one's own has its values as totals, each counted once.
    """

    total: Floats
    count: Floats
    name: str = TOKEN_LOSS
    higher_is_better: bool = False

    @property
    def mean(self) -> float:
        """Over all tokens, wherever they stand."""
        return float(self.total.sum() / self.count.sum())

    @property
    def perplexity(self) -> float | None:
        """exp(mean); None for a measure that isn't a loss in nats."""
        with np.errstate(over="ignore"):
            return float(np.exp(self.mean)) if self.name in (TOKEN_LOSS, MASKED_LOSS) else None


@dataclass(frozen=True)
class Difference:
    """How much more one model has of a measure than another, with a 95% interval; empty (NaN) from
    a single document.
    """

    mean: float
    low: float
    high: float
    documents: int

    def __str__(self) -> str:
        return (
            f"{self.mean:+.4f} [{self.low:+.4f}, {self.high:+.4f}] over {self.documents:,}"
            " documents"
        )


def evaluate(
    model: nn.Module,
    texts: str | Iterable[str],
    tokenizer: Any,
    *,
    batch_size: int = 8,
    context: int | None = None,
    tokens: int | None = None,
    progress: Progress | None = None,
) -> Losses:
    """The loss of each document: of the token that comes next or, where a model reads both ways, of
    tokens that are masked.

    A text longer than `context` tokens is cut into windows, and each window is a document of its
    own, with special tokens of
    its own: one novel gives many, and so an interval. (Neighbouring windows are alike, which the
        interval doesn't know.) Of
    15% of a document's tokens (special ones aside) each is replaced by the mask token: the same
    ones for every model that has this tokenizer, whatever else is evaluated with it. Special tokens
    that close a document have no loss.

    Args:
        model: a transformers model with a language-modelling head, or a module whose output has
            `logits` `[B, L, V]`. It is put in evaluation mode and is afterwards as it was.
        texts: one text, or any number.
        tokenizer: the model's own.
        batch_size: documents a pass.
        context: tokens of a window, special ones included; by default the model's positions, at
            most 1,024.
        tokens: stop after the window with which this many were given to the model; by default all
            are.
        progress: called after each pass with the number of documents done, of all, and
            "evaluating".

    Raises:
        TypeError: not a model, or texts that aren't strings.
        ValueError: a model without logits for tokens, an encoder-decoder, a tokenizer without a
            mask token where one is needed, an empty text, a context that can't be, losses that
            aren't numbers.

    >>> import multihead
    >>> model, tokenizer = multihead.load_builtin()
    >>> losses = evaluate(model, "the cat sat on the mat and the cat sat " * 40, tokenizer, context=32)
    >>> losses.name, len(losses.total) > 10, losses.perplexity > 1
    ('token loss', True, True)
    """
    require_model(model)
    require_tokenizer(tokenizer, batch_size)
    windows = cut_texts(model, texts, tokenizer, context=context, tokens=tokens)
    total, count = np.zeros((2, len(windows)))
    device = next(model.parameters()).device
    with evaluation(model), torch.no_grad():
        kind = find_loss(model, tokenizer, windows)
        # windows of like length in one pass
        order = sorted(range(len(windows)), key=lambda n: -len(windows[n].ids))
        for start in range(0, len(order), batch_size):
            now = order[start : start + batch_size]
            batch = scored_batch(kind, tokenizer, [windows[n] for n in now]).to(device)
            total[now], count[now] = (x.cpu() for x in batch.losses(model, most_logits=LOGITS))
            if progress is not None:
                progress(start + len(now), len(order), "evaluating")
    for n in np.flatnonzero(~np.isfinite(total)):
        raise make_non_finite_error(f"the {kind} of document {n + 1:,} is {total[n]}")
    if not count.any():
        raise MultiheadError(
            "texts hold no token that could be predicted: one each, or special ones alone; give"
            " longer ones"
        )
    return Losses(total, count, kind)


def difference(a: Losses, b: Losses) -> Difference:
    """How much more `b` has than `a`, over all tokens, with a 95% interval.

    The interval is the percentile bootstrap over documents (Efron and Tibshirani 1993) with a fixed
    seed: documents are drawn again, each with its loss under both models, and each time sums are
    divided. With fewer than about ten documents it is too narrow.

    Raises:
        ValueError: not the same measure on the same documents.

    >>> a = Losses(np.array([10.0, 30.0, 20.0]), np.array([5.0, 10.0, 8.0]))
    >>> print(difference(a, Losses(a.total + 0.5 * a.count, a.count)))
    +0.5000 [+0.5000, +0.5000] over 3 documents
    """
    for what, x, y in (
        ("name", a.name, b.name),
        ("higher_is_better", a.higher_is_better, b.higher_is_better),
        ("documents", len(a.count), len(b.count)),
    ):
        if x != y:
            raise MultiheadError(
                f"a and b differ in {what} ({x!r} and {y!r}): expected one measure of two models on"
                " the same documents"
            )
    if len(apart := np.flatnonzero(a.count != b.count)):
        n = int(apart[0])
        raise MultiheadError(
            f"a and b differ in document {n + 1:,} ({a.count[n]:,.0f} and {b.count[n]:,.0f} scored"
            " tokens): evaluate both models on the same texts, with the same tokenizer, context"
            " and tokens"
        )
    change, number = b.total - a.total, len(a.count)
    random = np.random.default_rng(0)
    drawn = []
    for many in _blocks(RESAMPLES, number):
        which = random.integers(number, size=(many, number))
        with np.errstate(invalid="ignore"):  # of documents without tokens alone: no number
            drawn.append(change[which].sum(1) / a.count[which].sum(1))
    return Difference(
        float(change.sum() / a.count.sum()), *interval(np.concatenate(drawn), number), number
    )


def interval(drawn: Floats, documents: int) -> tuple[float, float]:
    """Between which two values 95% of the drawn ones lie; from a single document nothing can be
    said.
    """
    if documents < 2:
        return np.nan, np.nan
    low, high = np.nanquantile(drawn, (0.025, 0.975))
    return float(low), float(high)


def _blocks(total: int, width: int) -> Iterator[int]:
    """`total` rows of so many numbers, some at a time."""
    step = max(1, 2**22 // width)
    for start in range(0, total, step):
        yield min(step, total - start)


def function(where: str) -> Callable[[nn.Module, Any], Losses]:
    """A measure of one's own: `FILE.py:NAME`, a function that is called with (model, tokenizer).

    It gives one number or, for intervals, one for each document; lower is better. Where higher is,
    it gives `{"values": ..., "higher_is_better": True}`. The file is run, as Python runs it.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not FILE.py:NAME, a file that can't be run or has no such function; when called,
            what isn't numbers.
    """
    measure = load_name(where, argument="function", example="measure.py:accuracy")
    name = where.rpartition(":")[2]
    if not callable(measure):
        raise MultiheadError(f"function={where!r}: {name} is {measure!r}, not a function")

    def measured(model: nn.Module, tokenizer: Any) -> Losses:
        given = measure(model, tokenizer)
        odd = MultiheadError(
            f"function={where!r} gave {str(given)[:80]}: expected a number, one number for each"
            ' document, or {"values": numbers, "higher_is_better": True}'
        )
        if not isinstance(given, Mapping):
            given = {"values": given, "higher_is_better": False}
        if not {"values"} <= given.keys() <= {"values", "higher_is_better"}:
            raise odd
        values = given["values"]
        try:
            total = np.atleast_1d(
                np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values, float)
            )
        except (TypeError, ValueError):
            raise odd from None
        if total.ndim != 1 or not total.size or not np.isfinite(total).all():
            raise odd
        return Losses(total, np.ones(len(total)), name, bool(given.get("higher_is_better")))

    return measured
