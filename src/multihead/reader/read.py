"""`multihead.read`: a model and texts in, a table of heads out."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batch import Batch, scored_inputs
from ..data.batching import ReadyBatches, Unit, plan_batches
from ..data.tokenizing import max_positions
from ..errors import MultiheadError
from ..io import Progress
from ..models.contexts import evaluation
from ..models.introspect import (
    config_fingerprint,
    config_of,
    find_special_ids,
    fingerprint,
    forward_kwargs,
    is_encoder_decoder,
    is_sentence_transformer,
    require_model,
    text_config,
)
from .distributed import Alone, Share
from .generate import generate_under_reading, options_of
from .resume import ReadingProgress, file_of
from .session import Reading
from .statistics import Statistic, resolve_statistics
from .statistics.columns import PROBED
from .statistics.masses import token_classes
from .statistics.on_request import Relations
from .table import Table
from .tokens import ids_given

PROBE_BLOCK = 48  # random tokens in a block
PROBE_BATCH = 4  # blocks, each said twice
PROBE_SEED = 0


def read(
    model: nn.Module,
    texts: str | Iterable[str] | Mapping[str, Any] | Iterable[Mapping[str, Any]],
    *,
    tokenizer: Any = None,
    batch_size: int = 8,
    context: int | None = None,
    stride: int | None = None,
    generate: int | Mapping[str, Any] | None = None,
    special_ids: Iterable[int] | None = None,
    probe: bool | None = None,
    classes: Mapping[str, str] | None = None,
    statistics: str | Statistic | Iterable[str | Statistic] = (),
    relations: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    resume: str | os.PathLike[str] | None = None,
    distributed: bool = False,
    stop: Callable[[], bool] | None = None,
) -> Table:
    r"""What each head of a model does on some text.

    Args:
        model: a transformers model whose attention goes through transformers' attention interface,
            or any module whose attention is torch's, timm's or this library's (docs/reading.md
            lists what can be read). It is put in evaluation mode for the reading and is afterwards
            as it was.
        texts: one text, any number (an encoder-decoder reads them on both sides), or batches of
            ready-made model inputs (dicts of tensors; the model's own 2-D `attention_mask` says
            which rows are real). A generator will do: no more than 64 batches are held, which are
            sorted by length, the longest first.
        tokenizer: needed for texts, unless the model holds its own (sentence-transformers). Texts
            longer than the model's positions are cut, and `table.meta["notes"]` says so, unless
            there is a `context`.
        batch_size: texts, or windows of them, in one pass.
        context: read longer texts in windows of so many tokens, special ones included, each with
            special tokens of its own.
        stride: how many tokens one window begins after the last; by default all that it holds. A
            token's row counts in the first window that holds it; in a later one it is only read.
        generate: also read so many tokens that the model writes behind each text, greedily, step by
            step from its cache; or arguments of `model.generate`, `max_new_tokens` among them. What
            stands behind an end token doesn't count.
        special_ids: token ids that count as special; by default the tokenizer's, else those the
            config names.
        probe: also run the probe (random tokens said twice), which alone shows induction. None: for
            causal text models.
        classes: names of classes of tokens, each with a regular expression that is searched for in
            a token's text, such as {"digits": r"\d"}; gives the masses `class:digits`.
        statistics: to measure besides the built-in ones: names of those that cost more than a
            pass ("copying", "importance", "effect", "effect_mean", "nearest"; see
            `multihead.reader.list_statistics()`), and user-defined ones (`multihead.Statistic`).
        relations: a CoNLL-U file, whose sentences are read too, for `relation:NAME` alone (see
            `multihead.reader.read_relations`).
        progress: called after each site of each batch with the number so far, the total (0 where
            it isn't known), and "reading".
        resume: a file in which progress is kept. Where it is there, the reading goes on from it:
            with the same model, texts and settings only. It stays; a finished one gives its table
            again. Of ranks after the first, one each.
        distributed: share the texts over the processes of torch.distributed's default group; all
            get the sum.
        stop: asked before each pass; once it says True the table of what was read so far is
            returned, and `table.meta["partial"]` says so.

    Returns:
        The table: `rows()`, `value(column)`, `to_pandas()`, `save(path)`; tables of one model add
            up.

    Raises:
        ValueError: an empty text, texts without a tokenizer, a model that can't be reached,
            arguments that can't be.
        ReadingError: a model that would be read wrongly, naming the first site that differs.

    >>> import multihead
    >>> model, tokenizer = multihead.load_builtin()
    >>> table = multihead.read(model, "the cat sat on the mat and the cat sat", tokenizer=tokenizer)
    >>> len(table.heads) == len(table.rows())
    True
    """
    require_model(model)
    _require_types(
        batch_size=batch_size,
        context=0 if context is None else context,
        stride=0 if stride is None else stride,
        progress=progress,
        stop=stop,
        resume=resume,
        relations=relations,
    )
    share = Share() if distributed else Alone()
    try:
        if tokenizer is None and is_sentence_transformer(model):
            tokenizer = model.tokenizer
        extra: list[Statistic] = [*token_classes(classes, tokenizer)]
        if relations is not None:
            extra.append(Relations(relations, tokenizer, batch_size))
        chosen = resolve_statistics(statistics, extra)
        _require_compatible(chosen, generate=generate, resume=resume, distributed=distributed)
        table = _Run(
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
            share,
            stop,
        ).table()
        if classes:
            table.meta["classes"] = dict(classes)
    except BaseException as error:
        share.fail(error)
        raise
    table = share.add(table)
    if not table.meta["documents"] and "partial" not in table.meta:
        raise MultiheadError(
            "texts is empty: expected at least one text or one batch of inputs to read"
        )
    return table


def _require_types(progress: Any, stop: Any, resume: Any, relations: Any, **numbers: Any) -> None:
    """`TypeError` for what is of another type than the argument that it was given as, before
    anything is read.
    """
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{name}={value!r}: expected a whole number")
    for name, value, kinds, what in (
        ("progress", progress, Callable, "a function of (done, total, stage)"),
        ("stop", stop, Callable, "a function that says True once reading is to end"),
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


class _Run:
    """One reading, unit by unit: what is where, and what was done before."""

    def __init__(
        self,
        model: nn.Module,
        texts: Any,
        tokenizer: Any,
        batch_size: int,
        context: int | None,
        stride: int | None,
        generate: Any,
        special_ids: Iterable[int] | None,
        probe: bool | None,
        statistics: list[Statistic],
        progress: Progress | None,
        resume: str | os.PathLike[str] | None,
        share: Alone,
        stop: Callable[[], bool] | None,
    ) -> None:
        if probe and not _text_model(model):
            raise MultiheadError(
                f"probe=True: {type(model).__name__} isn't a causal text model, and the probe is of"
                " random tokens"
            )
        self.model, self.tokenizer, self.probe, self.progress, self.share = (
            model,
            tokenizer,
            probe,
            progress,
            share,
        )
        self.statistics = statistics
        self.seen, self.total = itertools.count(1), 0  # sites read, and to read in all
        self.stop = stop or (lambda: False)
        self.options = None if generate is None else options_of(model, generate, tokenizer)
        self.plan = plan_batches(
            model,
            texts,
            tokenizer,
            batch_size=batch_size,
            context=context,
            stride=stride,
            new_tokens=None if self.options is None else self.options["max_new_tokens"],
        )
        if special_ids is None and tokenizer is not None:
            special_ids = find_special_ids(model, tokenizer)
        self.special = special_ids if special_ids is None else sorted(ids_given(special_ids))
        self.fingerprint = fingerprint(model)
        self.kept: ReadingProgress | None = None
        self.used = False
        self.did: set[str] = (
            set()
        )  # of what is done once a reading: "probe", "copying", "relations"
        if resume is not None:
            if isinstance(self.plan, ReadyBatches):
                raise MultiheadError(
                    f"resume={str(resume)!r}: only a reading of texts can go on; of ready-made"
                    " inputs it isn't known whether they are the same. Leave it out, or give"
                    " strings"
                )
            self.kept = ReadingProgress(
                file_of(resume, share.rank),
                {
                    "model": self.fingerprint,
                    "batch_size": batch_size,
                    "context": context,
                    "stride": stride,
                    "limit": self.plan.limit,
                    "special_ids": self.special,
                    "probe": probe,
                    "processes": share.size,
                    "generate": [
                        repr(generate),
                        config_fingerprint(None if generate is None else model.generation_config),
                    ],
                    "statistics": sorted(map(str, (s.settings() for s in statistics))),
                    "tokens": tokenizer("Tokens of a text: 1 234, \u00c4hre.")["input_ids"],
                },
            )

    def table(self) -> Table:
        """Read, and say what was read: of this process."""
        with (
            evaluation(self.model),
            torch.no_grad(),
            Reading(
                self.model, special_ids=self.special, statistics=self.statistics
            ).running() as session,
        ):
            for statistic in self.statistics:
                statistic.begin(session)
            with session.passes(on_site=self._site_was_read):
                partial = self._read(session)
        table = self._so_far(session)
        table.meta["notes"] = self.plan.notes() + table.meta["notes"]
        if partial:
            table.meta["partial"] = "it was stopped before the texts were at their end"
        return table

    def _read(self, session: Reading) -> bool:
        """Read all units, those done before left out. Whether it was stopped."""
        state = self.kept.state if self.kept is not None else None
        before = number = done = 0  # documents and units ahead of the chunk; units that are done
        notes = self.plan.state  # before the chunk
        if state is not None:
            before, number, done = state["before"], state["number"], state["done"]
            notes = self.plan.state = state["notes"]
            session.resume(state["causal"])
            self.used, self.did = state["used"], set(state["did"])
            self.plan.skip(before)
        passes = 0
        for chunk in self.plan.chunks():
            if state is not None and self.kept is not None:
                self.kept.verify(self.plan.taken, self.plan.digest)
                state = None
            mine = [
                (n, unit)
                for n, unit in enumerate(chunk, number)
                if n % self.share.size == self.share.rank and n >= done
            ]
            passes += sum(len(unit.batches) for _, unit in mine)
            known = self.plan.ended and self.options is None
            heads = sum(site.num_heads for site in session.sites)
            more = heads * sum(s.passes_per_head for s in self.statistics)
            self.total = passes * (len(session.sites) + more) if known else 0
            for n, unit in mine:
                if self.stop():
                    if self.kept is not None:
                        self._keep(session, before, number, done, notes)
                    return True
                if self._unit(session, unit):
                    return True
                self._once(session)
                done = n + 1
                if self.kept is not None and self.kept.is_due():
                    self._keep(session, before, number, done, notes)
            if self.plan.ended and self.kept is not None:
                self._keep(session, before, number, number + len(chunk), notes)
            before, number, notes = self.plan.taken, number + len(chunk), self.plan.state
        for statistic in self.statistics:
            if statistic.needs_all_texts:
                statistic.finish(session)
        if self.progress is not None and self.total and next(self.seen) <= self.total:
            self.progress(self.total, self.total, "reading")
        return False

    def _site_was_read(self) -> None:
        """Report progress; some sites run several times a pass."""
        if self.progress is not None:
            done = next(self.seen)
            self.progress(min(done, self.total) if self.total else done, self.total, "reading")

    def _keep(self, session: Reading, before: int, number: int, done: int, notes: Any) -> None:
        assert self.kept is not None
        state = {
            "before": before,
            "number": number,
            "done": done,
            "notes": notes,
            "taken": self.plan.taken,
            "digest": self.plan.digest,
            "causal": session.causal,
            "did": sorted(self.did),
            "used": self.used,
        }
        self.kept.save(state, self._so_far(session))

    def _so_far(self, session: Reading) -> Table:
        if "probe" in self.did or self.share.rank:
            for mass in PROBED:
                session.reasons.pop(f"probe:{mass}", None)
        else:
            why = (
                "the probe runs on causal text models"
                if self.probe is None
                else "the probe was turned off"
            )
            session.reasons.update({f"probe:{mass}": why for mass in PROBED})
        table = session.table()
        table.meta |= {
            "dtype": str(next(self.model.parameters()).dtype).removeprefix("torch."),
            "fingerprint": self.fingerprint,
        }
        if self.kept is not None and self.kept.table is not None:
            table = self.kept.table + table
        return table

    def _unit(self, session: Reading, unit: Unit) -> bool:
        """Read documents from their beginning to their end. True: it was stopped in between."""
        for number, batch in enumerate(unit.batches):
            self.share.check()
            if number and self.stop():
                session.close()
                return True
            if batch.document is not None:
                session.open(batch.document, unit.documents)
            with session.passes(select=batch.partial):
                self._pass(session, batch)
            self.used |= "input_ids" in batch.inputs
        if unit.batches[0].document is not None:
            session.close()
        return False

    def _pass(self, session: Reading, batch: Batch) -> None:
        is_text = batch.document is not None
        if self.options is None:
            whole = batch.for_model(self.model) if is_text else batch
            self._forward(session, whole.inputs)
            return
        is_unseen = session.verifier is not None and not session.verifier.kinds
        if is_text and is_encoder_decoder(self.model) and is_unseen:
            # generating calls the encoder by itself: compare the whole once
            with session.passes(counting=False):
                whole = batch.for_model(self.model)
                self.model(**forward_kwargs(self.model, whole.inputs))
        device = next(self.model.parameters()).device
        generate_under_reading(session, batch.to(device).inputs, self.options)

    def _forward(self, session: Reading, batch: Mapping[str, Any]) -> None:
        """One pass; statistics that need more than it wrap it."""
        inputs_of = (
            scored_inputs if any(s.needs_logits for s in self.statistics) else forward_kwargs
        )

        def forward(batch: Mapping[str, Any]) -> Any:
            return session.model(**inputs_of(session.model, dict(batch)))

        for statistic in self.statistics:
            if statistic.implements("run_pass"):
                forward = partial(statistic.run_pass, session, forward=forward)
        forward(batch)

    def _once(self, session: Reading) -> None:
        """What is done once, as soon as a text told what the model is, in one of the processes: the
        probe, for one.
        """
        probe = (
            self.probe
            if self.probe is not None
            else bool(session.causal) and self.used and _text_model(self.model)
        )
        if probe and "probe" not in self.did and not self.share.rank:
            run_probe(session, self.tokenizer)
            self.did.add("probe")
        for statistic in self.statistics:
            if not statistic.implements("finish") or statistic.needs_all_texts:
                continue
            if statistic.name not in self.did and not self.share.rank:
                statistic.finish(session)
                self.did.add(statistic.name)


def run_probe(session: Reading, tokenizer: Any = None) -> None:
    """Random tokens said twice: the rows of the second saying show induction where chance can't
    (Olsson et al. 2022).
    """
    ids, select = probe_ids(session.model, session.special, tokenizer)
    device = next(session.model.parameters()).device
    with session.passes(prefix="probe:", select=select, on_site=None):
        session.model(**forward_kwargs(session.model, {"input_ids": ids.to(device)}))


def probe_ids(
    model: nn.Module, special: Iterable[int], tokenizer: Any = None
) -> tuple[Tensor, Tensor]:
    """Ids `[PROBE_BATCH, (1 +) 2 * block]` (the start token first where the tokenizer sets one),
    and the rows that count.
    """
    config = text_config(model)
    start = []
    if tokenizer is not None and tokenizer.bos_token_id is not None:
        start = [i for i in tokenizer("a")["input_ids"][:1] if i == tokenizer.bos_token_id]
    limit = max_positions(model.config, tokenizer) or 10**9
    block = max(2, min(PROBE_BLOCK, (limit - len(start)) // 2))
    draw = torch.Generator().manual_seed(PROBE_SEED)
    size = min(config.vocab_size, len(tokenizer) if tokenizer is not None else config.vocab_size)
    allowed = torch.ones(size)
    allowed[[i for i in special if i < size]] = 0
    block = min(block, int(allowed.sum()))
    said = torch.stack(
        [torch.multinomial(allowed, block, generator=draw) for _ in range(PROBE_BATCH)]
    )
    ids = torch.cat([torch.tensor(start, dtype=torch.int64).expand(PROBE_BATCH, -1), said, said], 1)
    select = torch.zeros_like(ids, dtype=torch.bool)
    select[:, len(start) + block :] = True
    return ids, select


def _text_model(model: nn.Module) -> bool:
    config = text_config(model)
    return (
        hasattr(config_of(model), "get_text_config")  # the inputs of a user's module aren't known
        and isinstance(getattr(config, "vocab_size", None), int)
        and not is_encoder_decoder(config)
    )
