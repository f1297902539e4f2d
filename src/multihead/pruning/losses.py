"""Losses of a model on texts, document by document, and the paired difference of two models.

Two models are compared on the same documents, so that differences between documents drop out of
the difference between the models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..data.documents import Document, several
from ..data.ready import are_ready, take_ready
from ..data.scoring import (
    GENERATED_LOSS,
    LABEL_LOSS,
    MASKED_LOSS,
    TOKEN_LOSS,
    find_loss,
    make_non_finite_error,
    require_loss,
)
from ..data.tokenizing import require_tokenizer
from ..data.windows import cut_texts
from ..errors import MultiheadError
from ..io import Progress
from ..models.contexts import evaluation
from ..models.introspect import unwrap
from ..user_code import load_name
from .calibration import (
    loss_batch,
    most_sequences,
    ready_loss_batch,
    require_one_loss,
    split_inputs,
)

__all__ = [
    "Difference",
    "Losses",
    "compare_losses",
    "evaluate",
    "load_measure",
    "percentile_interval",
]

Floats = NDArray[np.float64]
RESAMPLES = 5000
LOGITS = 2**24  # that are computed at once
IN_NATS = (TOKEN_LOSS, MASKED_LOSS, GENERATED_LOSS)  # a token


@dataclass(frozen=True, eq=False)
class Losses:
    """A measure on each of some documents.

    Attributes:
        total: float64 `[documents]`, the sum over a document's scored tokens, in nats. A
            user-defined measure has its values here, with a count of 1.
        count: float64 `[documents]`, the number of scored tokens.
        name: the measure, such as "token loss".
        higher_is_better: False for losses.

    >>> losses = Losses(np.array([10.0, 30.0]), np.array([5.0, 15.0]))
    >>> losses.mean, round(losses.perplexity, 2)
    (2.0, 7.39)
    """

    total: Floats
    count: Floats
    name: str = TOKEN_LOSS
    higher_is_better: bool = False

    @property
    def mean(self) -> float:
        """The mean over all tokens of all documents."""
        return float(self.total.sum() / self.count.sum())

    @property
    def perplexity(self) -> float | None:
        """exp(mean); None for a measure that isn't a loss in nats."""
        with np.errstate(over="ignore"):
            return float(np.exp(self.mean)) if self.name in IN_NATS else None


@dataclass(frozen=True)
class Difference:
    """The measure of one model minus that of another, with a 95% interval (NaN for a single
    document).

    >>> print(Difference(0.25, 0.2, 0.31, 40))
    +0.2500 [+0.2000, +0.3100] over 40 documents
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
    texts: Document | Iterable[Document],
    *,
    tokenizer: Any = None,
    original: nn.Module | None = None,
    batch_size: int = 8,
    context: int | None = None,
    tokens: int | None = None,
    progress: Progress | None = None,
) -> Losses:
    """Measure the loss of each document: of next tokens; for a masked model, of masked tokens; for
    an encoder-decoder, of the tokens of the target; for a classifier, the loss of its labels. For
    any other model, or texts without targets or labels, the distance from the original's outputs.

    A text longer than `context` tokens is cut into windows, each a separate document between
    special tokens, so one novel gives many documents and an interval. (Neighbouring windows are
    alike, which the interval doesn't know.) For a masked model, 15% of a document's tokens (without
    special ones) are replaced by the mask token: the same ones for every model with this tokenizer,
    whatever else is evaluated. Special tokens at the end of a document have no loss.

    Args:
        model: a transformers model, or a module whose output has `logits` `[B, L, V]`. It is in
            evaluation mode meanwhile, and afterwards as before.
        texts: one text or conversation (a list of messages), or any number; rows with a text and a
            label, or with a source and a target; or ready-made batches of model inputs, each of
            whose sequences (or pictures, or sounds) is a document.
        tokenizer: the model's tokenizer, for texts.
        original: the model before it was changed, for what has no loss without it: the Kullback-
            Leibler divergence of logits, the relative squared difference of embeddings and hidden
            states (see `distillation.py`); for an encoder-decoder, whose targets aren't given, the
            token loss on what the original generates.
        batch_size: documents in a pass.
        context: tokens of a window, special ones included; by default the model's positions, at
            most 1,024.
        tokens: stop after the window with which so many tokens are reached; None takes all.
        progress: called after each pass with the number of documents done, of all, and
            "evaluating".

    Raises:
        TypeError: not a model, or texts that aren't strings.
        MultiheadError: a model without a loss on these texts and no original, labels that it
            doesn't have, a tokenizer without a mask token where one is needed, an empty text, a
            context out of range, losses that aren't finite.

    >>> import multihead
    >>> model, tokenizer = multihead.load_builtin()
    >>> text = "the cat sat on the mat and the cat sat " * 40
    >>> losses = evaluate(model, text, tokenizer=tokenizer, context=32)
    >>> losses.name, len(losses.total) > 10, losses.perplexity > 1
    ('token loss', True, True)
    """
    model = unwrap(model)
    original = None if original is None else unwrap(original)
    listed = list(several(texts))
    if are_ready(listed):
        return _evaluate_ready(model, listed, original, progress)
    require_tokenizer(tokenizer, batch_size)
    windows = cut_texts(model, listed, tokenizer, context=context, tokens=tokens)
    total, count = np.zeros((2, len(windows)))
    with evaluation(model), torch.no_grad():
        kind = find_loss(model, tokenizer, windows)
        require_loss(kind, model, original)
        # windows of similar length in one pass
        order = sorted(range(len(windows)), key=lambda n: -len(windows[n].ids))
        batch_size = most_sequences(kind, model, tokenizer, batch_size)
        if kind == LABEL_LOSS:  # the mean over a batch is what the model computes
            batch_size = 1
        for start in range(0, len(order), batch_size):
            now = order[start : start + batch_size]
            batch = loss_batch(kind, model, tokenizer, [windows[n] for n in now], original)
            total[now], count[now] = (x.cpu() for x in batch.losses(model, most_logits=LOGITS))
            if progress is not None:
                progress(start + len(now), len(order), "evaluating")
    return _checked_losses(total, count, kind)


def _evaluate_ready(
    model: nn.Module, listed: list[Any], original: nn.Module | None, progress: Progress | None
) -> Losses:
    found, kinds = [], []
    with evaluation(model), torch.no_grad():
        for number, one in enumerate(listed):
            inputs = take_ready(model, one, number)
            kind, batch = ready_loss_batch(model, inputs, original)
            kinds.append(kind)
            batches = [batch]
            if kind == LABEL_LOSS:  # the mean over a batch is what the model computes
                parts = split_inputs(inputs, 1)
                batches = [ready_loss_batch(model, part, original)[1] for part in parts]
            found += [part.losses(model) for part in batches]
            if progress is not None:
                progress(number + 1, len(listed), "evaluating")
    total, count = (torch.cat(x).cpu().double().numpy() for x in zip(*found, strict=True))
    return _checked_losses(total, count, require_one_loss(kinds))


def _checked_losses(total: Floats, count: Floats, kind: str) -> Losses:
    for n in np.flatnonzero(~np.isfinite(total)):
        raise make_non_finite_error(f"the {kind} of document {n + 1:,} is {total[n]}")
    if not count.any():
        raise MultiheadError(
            "texts hold no token that could be predicted: they have one token each, or only special"
            " ones; give longer ones"
        )
    return Losses(total, count, kind)


def compare_losses(a: Losses, b: Losses) -> Difference:
    """The mean of `b` minus that of `a`, over all tokens, with a 95% interval.

    The interval is the percentile bootstrap over documents (Efron and Tibshirani 1993) with a fixed
    seed: documents are drawn with replacement, each with its loss under both models, and sums are
    divided. It is too narrow for fewer than about ten documents.

    Raises:
        MultiheadError: not the same measure on the same documents.

    >>> a = Losses(np.array([10.0, 30.0, 20.0]), np.array([5.0, 10.0, 8.0]))
    >>> print(compare_losses(a, Losses(a.total + 0.5 * a.count, a.count)))
    +0.5000 [+0.5000, +0.5000] over 3 documents
    """
    if a.name != b.name:
        raise MultiheadError(
            f"one model is measured by its {a.name}, the other one by its {b.name}; compare models"
            " with the same head on top, such as a model before and after pruning"
        )
    for what, x, y in (
        ("higher_is_better", a.higher_is_better, b.higher_is_better),
        ("documents", len(a.count), len(b.count)),
    ):
        if x != y:
            raise MultiheadError(
                f"a and b differ in {what} ({x!r} and {y!r}): expected one measure of two models on"
                " the same documents"
            )
    if len(differing := np.flatnonzero(a.count != b.count)):
        n = int(differing[0])
        raise MultiheadError(
            f"a and b differ in document {n + 1:,} ({a.count[n]:,.0f} and {b.count[n]:,.0f} scored"
            " tokens): evaluate both models on the same texts, with the same tokenizer, context"
            " and tokens"
        )
    change, number = b.total - a.total, len(a.count)
    random = np.random.default_rng(0)
    means = []
    for size in _blocks(RESAMPLES, number):
        which = random.integers(number, size=(size, number))
        with np.errstate(invalid="ignore"):  # documents without scored tokens give NaN
            means.append(change[which].sum(1) / a.count[which].sum(1))
    low, high = percentile_interval(np.concatenate(means), number)
    return Difference(float(change.sum() / a.count.sum()), low, high, number)


def percentile_interval(values: Floats, documents: int) -> tuple[float, float]:
    """The interval that holds 95% of bootstrap values `[n]`; NaN for fewer than two documents."""
    if documents < 2:
        return np.nan, np.nan
    low, high = np.nanquantile(values, (0.025, 0.975))
    return float(low), float(high)


def _blocks(total: int, width: int) -> Iterator[int]:
    """Sizes that add up to `total` rows of `width` numbers, each block of bounded memory."""
    step = max(1, 2**22 // width)
    for start in range(0, total, step):
        yield min(step, total - start)


def load_measure(where: str) -> Callable[[nn.Module, Any], Losses]:
    """A user-defined measure: the function NAME of `FILE.py:NAME`, called with (model, tokenizer).

    It returns one number or, for intervals, one for each document; lower is better. Where higher
    is, it returns `{"values": ..., "higher_is_better": True}`. The file is run as Python runs it.

    Raises:
        FileNotFoundError: no such file.
        MultiheadError: not FILE.py:NAME, a file that can't be run or has no such function; when
            called, a result that isn't numbers.
    """
    measure = load_name(where, argument="measure", example="measure.py:accuracy")
    name = where.rpartition(":")[2]
    if not callable(measure):
        raise MultiheadError(f"measure={where!r}: {name} is {measure!r}, not a function")

    def call_measure(model: nn.Module, tokenizer: Any) -> Losses:
        try:
            result = measure(model, tokenizer)
        except SystemExit as error:  # with which the command would end as if it were done
            raise MultiheadError(
                f"measure={where!r} ends the program (SystemExit: {error}); return a number"
            ) from error
        wrong = MultiheadError(
            f"measure={where!r} returned {str(result)[:80]}: expected a number, one number for"
            ' each document, or {"values": numbers, "higher_is_better": True}'
        )
        if not isinstance(result, Mapping):
            result = {"values": result, "higher_is_better": False}
        if not {"values"} <= result.keys() <= {"values", "higher_is_better"}:
            raise wrong
        values = result["values"]
        values = values.detach().cpu() if isinstance(values, Tensor) else values
        try:
            total = np.atleast_1d(np.asarray(values, float))
        except (TypeError, ValueError):
            raise wrong from None
        if total.ndim != 1 or not total.size or not np.isfinite(total).all():
            raise wrong
        return Losses(total, np.ones(len(total)), name, bool(result.get("higher_is_better")))

    return call_measure
