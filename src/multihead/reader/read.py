"""`multihead.read`: from a model and texts to a table of heads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral
from typing import Any

from torch import nn

from ..data.documents import Document
from ..errors import MultiheadError
from ..io import Progress
from ..models.introspect import find_sentence_transformer, require_model
from .distributed import ProcessGroup, SingleProcess
from .run import ReadingRun, ReadOptions
from .statistics import Statistic, resolve_statistics
from .statistics.masses import token_classes
from .statistics.on_request import Relations
from .table import Table
from .token_text import require_unit


def read(
    model: nn.Module,
    texts: Document | Iterable[Document] | Mapping[str, Any] | Iterable[Mapping[str, Any]],
    *,
    tokenizer: Any = None,
    batch_size: int = 8,
    context: int | None = None,
    stride: int | None = None,
    generate: int | Mapping[str, Any] | None = None,
    special_ids: Iterable[int] | None = None,
    probe: bool | None = None,
    classes: Mapping[str, str] | None = None,
    by: str = "token",
    statistics: str | Statistic | Iterable[str | Statistic] = (),
    relations: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    resume: str | os.PathLike[str] | None = None,
    distributed: bool = False,
    stop: Callable[[], bool] | None = None,
) -> Table:
    r"""Measure what each head of a model does on texts.

    Args:
        model: a transformers model whose attention goes through transformers' attention interface,
            or any module whose attention is torch's, timm's or this library's (docs/reading.md
            lists what can be read). It is put in evaluation mode for the reading and is afterwards
            as it was.
        texts: one text, any number (an encoder-decoder reads them on both sides), or batches of
            ready-made model inputs (dicts of tensors, arrays or lists; a 2-D `attention_mask` marks
            which positions are tokens). In the place of a text may be a conversation, a list of
            messages (dicts with "role" and "content"), which the tokenizer's chat template writes,
            or a data set's row with a text under "text" or a conversation under "messages". May be
            a generator: at most 64 batches are held, sorted by length, the longest first.
        tokenizer: needed for texts, unless the model holds one (sentence-transformers). Texts
            longer than the model's positions are truncated, which `table.meta["notes"]` reports,
            unless there is a `context`.
        batch_size: texts, or windows of them, in one pass.
        context: read longer texts in windows of so many tokens, special tokens included, which
            each window has.
        stride: tokens from the start of one window to that of the next; by default all that a
            window holds. A token counts as a query in the first window that holds it.
        generate: also read so many tokens that the model generates after each text, greedily, step
            by step with its KV cache; or arguments of `model.generate`, `max_new_tokens` among
            them. Tokens after an end token don't count.
        special_ids: token ids that count as special; by default the tokenizer's, else those that
            the config names.
        probe: also run the probe (random tokens repeated once), which alone shows induction. None:
            for causal text models.
        classes: names of classes of tokens, each with a regular expression that is searched for in
            a token's text, such as {"digits": r"\d"}; gives the masses `class:digits`.
        by: "word" searches for the classes in whole words, all tokens of which then belong to the
            class.
        statistics: to measure besides the built-in ones: names of those that cost more than a
            pass ("copying", "importance", "effect", "effect_mean", "nearest"; see
            `multihead.reader.list_statistics()`), and user-defined ones (`multihead.Statistic`).
        relations: a CoNLL-U file, whose sentences are read too, for `relation:NAME` alone (see
            `multihead.reader.read_relations`).
        progress: called after each site of each batch with the number so far, the total (0 where
            it isn't known), and "reading".
        resume: a file in which progress is kept. If it exists, the reading continues from it, with
            the same model, texts and settings only. It isn't deleted; that of a finished reading
            gives its table again. Of ranks after the first, one each.
        distributed: divide the texts among the processes of torch.distributed's default group; all
            get the sum.
        stop: called before each pass; once it returns True the table of what was read so far is
            returned, with `table.meta["partial"]`.

    Returns:
        The table: `rows()`, `value(column)`, `to_pandas()`, `save(path)`; tables of one model add
        up.

    Raises:
        MultiheadError: an empty text, texts without a tokenizer, a model that can't be reached,
            options that exclude each other.
        TypeError: an argument of another type.
        ReadingError: a model that would be read wrongly, naming the first site that differs.

    >>> import multihead
    >>> model, tokenizer = multihead.load_builtin()
    >>> table = multihead.read(model, "the cat sat on the mat and the cat sat", tokenizer=tokenizer)
    >>> len(table.heads) == len(table.rows())
    True
    """
    model = require_model(model)
    _require_types(
        batch_size=batch_size,
        context=0 if context is None else context,
        stride=0 if stride is None else stride,
        progress=progress,
        stop=stop,
        resume=resume,
        relations=relations,
    )
    require_unit(by)
    processes = ProcessGroup() if distributed else SingleProcess()
    try:
        if tokenizer is None and (holder := find_sentence_transformer(model)) is not None:
            tokenizer = holder.tokenizer
        extra: list[Statistic] = [*token_classes(classes, tokenizer, by)]
        if relations is not None:
            extra.append(Relations(relations, tokenizer, batch_size))
        chosen = resolve_statistics(statistics, extra)
        _require_compatible(chosen, generate=generate, resume=resume, distributed=distributed)
        options = ReadOptions(
            model,
            texts,
            tokenizer,
            batch_size,
            context,
            stride,
            generate,
            special_ids,
            probe,
            chosen,
            progress,
            resume,
            stop or (lambda: False),
        )
        table = ReadingRun(options, processes).run()
        if classes:
            whole = " in whole words" if by == "word" else ""
            table.meta["classes"] = {name: f"{p}{whole}" for name, p in classes.items()}
    except BaseException as error:
        processes.fail(error)
        raise
    table = processes.add(table)
    if not table.meta["documents"] and "partial" not in table.meta:
        raise MultiheadError(
            "texts is empty: expected at least one text or one batch of inputs to read"
        )
    return table


def _require_types(progress: Any, stop: Any, resume: Any, relations: Any, **numbers: Any) -> None:
    """Raise `TypeError` for arguments of another type, before anything is read."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{name}={value!r}: expected a whole number")
    for name, value, kinds, what in (
        ("progress", progress, Callable, "a function of (done, total, stage)"),
        ("stop", stop, Callable, "a function that returns True once reading is to end"),
        ("resume", resume, (str, os.PathLike), "the path of a file"),
        ("relations", relations, (str, os.PathLike), "the path of a CoNLL-U file"),
    ):
        if value is not None and not isinstance(value, kinds):  # type: ignore[arg-type]
            raise TypeError(f"{name}={value!r}: expected {what}, or None")


def _require_compatible(statistics: list[Statistic], **options: Any) -> None:
    """Raise for statistics that can't be had together with other options."""
    asked = {s.name for s in statistics}
    for names, others, why in (
        ({"importance", "effect", "effect_mean"}, ("generate",), "a loss needs a given text"),
        (
            {"effect_mean"},
            ("resume", "distributed"),
            "the mean is over all texts, and each run or process sees a part of them",
        ),
    ):
        for other in others:
            if (both := names & asked) and options[other]:
                raise MultiheadError(
                    f"statistics={sorted(both)} with {other}={options[other]!r}: {why}; leave one"
                    " of the two out"
                )
