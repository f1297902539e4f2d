"""`ReadingRun`: the passes of one `multihead.read`, unit by unit, with progress that can be
resumed.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..data.batch import Batch, scored_inputs
from ..data.batching import ReadyBatches, Unit, plan_batches
from ..errors import MultiheadError
from ..io import Progress
from ..models.contexts import evaluation
from ..models.introspect import (
    config_fingerprint,
    device_of,
    find_special_ids,
    fingerprint,
    forward_kwargs,
    inner_model,
    is_encoder_decoder,
)
from .distributed import SingleProcess
from .generate import generate_under_reading, options_of
from .probe import run_probe, takes_probe
from .resume import ReadingProgress, file_of
from .session import Reading
from .statistics import Statistic
from .statistics.columns import PROBED
from .table import Table
from .tokens import ids_given


@dataclass
class ReadOptions:
    """The arguments of `multihead.read`, checked."""

    model: nn.Module
    texts: Any
    tokenizer: Any
    batch_size: int
    context: int | None
    stride: int | None
    generate: int | Mapping[str, Any] | None
    special_ids: Iterable[int] | None
    probe: bool | None
    statistics: list[Statistic]
    progress: Progress | None
    resume: str | os.PathLike[str] | None
    stop: Callable[[], bool]


class ReadingRun:
    """One reading: which documents are read, which were read before, what is still to do."""

    def __init__(self, options: ReadOptions, processes: SingleProcess) -> None:
        self.options, self.processes = options, processes
        model, tokenizer = options.model, options.tokenizer
        if options.probe and not takes_probe(model):
            raise MultiheadError(
                f"probe=True: {type(model).__name__} isn't a causal text model, and the probe is of"
                " random tokens"
            )
        self.seen, self.total = itertools.count(1), 0  # sites read, and to read in all
        self.generation = (
            None if options.generate is None else options_of(model, options.generate, tokenizer)
        )
        self.plan = plan_batches(
            model,
            options.texts,
            tokenizer,
            batch_size=options.batch_size,
            context=options.context,
            stride=options.stride,
            new_tokens=None if self.generation is None else self.generation["max_new_tokens"],
        )
        special = options.special_ids
        if special is None and tokenizer is not None:
            special = find_special_ids(model, tokenizer)
        self.special = None if special is None else sorted(ids_given(special))
        self.fingerprint = fingerprint(model)
        self.used = False  # token ids were read
        self.did: set[str] = set()  # of what runs once: "probe", "copying", "relations"
        self.kept = self._open_progress()

    def _open_progress(self) -> ReadingProgress | None:
        options = self.options
        if options.resume is None:
            return None
        if isinstance(self.plan, ReadyBatches):
            raise MultiheadError(
                f"resume={str(options.resume)!r}: only a reading of texts can be resumed; of"
                " ready-made inputs it isn't known whether they are the same. Leave it out, or"
                " give strings"
            )
        generation = None
        if options.generate is not None:
            generation = getattr(inner_model(options.model), "generation_config", None)
        return ReadingProgress(
            file_of(options.resume, self.processes.rank),
            {
                "model": self.fingerprint,
                "batch_size": options.batch_size,
                "context": options.context,
                "stride": options.stride,
                "limit": self.plan.limit,
                "special_ids": self.special,
                "probe": options.probe,
                "processes": self.processes.size,
                "generate": [repr(options.generate), config_fingerprint(generation)],
                "statistics": sorted(map(str, (s.settings() for s in options.statistics))),
                "documents": self.plan.windower.encoder.settings,
                "tokens": options.tokenizer("Tokens of a text: 1 234, \u00c4hre.")["input_ids"],
            },
        )

    def run(self) -> Table:
        """The table of what this process read."""
        with (
            evaluation(self.options.model),
            torch.no_grad(),
            Reading(
                self.options.model, special_ids=self.special, statistics=self.options.statistics
            ).running() as session,
        ):
            session.tokens.repeated.expected = False  # each text is a document
            for statistic in self.options.statistics:
                statistic.begin(session)
            with session.passes(on_site=self._site_was_read):
                partial = self._read(session)
        table = self._so_far(session)
        table.meta["notes"] = self.plan.notes() + table.meta["notes"]
        if partial:
            table.meta["partial"] = "it was stopped before the texts were at their end"
        return table

    def _read(self, session: Reading) -> bool:
        """Read all units that weren't read before. Returns whether it was stopped."""
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
                if n % self.processes.size == self.processes.rank and n >= done
            ]
            passes += sum(len(unit.batches) for _, unit in mine)
            known = self.plan.ended and self.generation is None
            heads = sum(site.num_heads for site in session.sites)
            more = heads * sum(s.passes_per_head for s in self.options.statistics)
            self.total = passes * (len(session.sites) + more) if known else 0
            for n, unit in mine:
                if self.options.stop():
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
        for statistic in self.options.statistics:
            if statistic.needs_all_texts:
                statistic.finish(session)
        if self.options.progress is not None and self.total and next(self.seen) <= self.total:
            self.options.progress(self.total, self.total, "reading")
        return False

    def _site_was_read(self) -> None:
        """Report progress; some sites run several times a pass."""
        if self.options.progress is not None:
            done = next(self.seen)
            self.options.progress(
                min(done, self.total) if self.total else done, self.total, "reading"
            )

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
        if "probe" in self.did or self.processes.rank:
            for mass in PROBED:
                session.reasons.pop(f"probe:{mass}", None)
        else:
            why = self._why_no_probe(session)
            session.reasons.update({f"probe:{mass}": why for mass in PROBED})
        table = session.table()
        table.meta |= {
            "dtype": str(next(self.options.model.parameters()).dtype).removeprefix("torch."),
            "fingerprint": self.fingerprint,
        }
        if self.kept is not None and self.kept.table is not None:
            table = self.kept.table + table
        return table

    def _why_no_probe(self, session: Reading) -> str:
        if self.options.probe is False:
            return "the probe was turned off (probe=False)"
        name = type(self.options.model).__name__
        if not takes_probe(self.options.model):
            return f"the probe runs on causal text models of transformers, and {name} is none"
        if session.causal is False:
            return f"the probe runs on causal models, and {name} isn't: queries read later tokens"
        if session.causal is None:
            return (
                "the probe wasn't run: no text of two tokens or more has shown whether the model is"
                " causal"
            )
        if not self.used:
            return (
                "the probe is of token ids, and the model was given none; probe=True runs it all"
                " the same"
            )
        return "the reading was stopped before the probe"

    def _unit(self, session: Reading, unit: Unit) -> bool:
        """Read documents from beginning to end. Returns whether it was stopped in between."""
        for number, batch in enumerate(unit.batches):
            self.processes.check()
            if number and self.options.stop():
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
        if self.generation is None:
            whole = batch.for_model(self.options.model) if is_text else batch
            self._forward(session, whole.inputs)
            return
        is_unseen = session.verifier is not None and not session.verifier.kinds
        if is_text and is_encoder_decoder(self.options.model) and is_unseen:
            # generating calls the encoder by itself: compare the whole once
            with session.passes(counting=False):
                whole = batch.for_model(self.options.model)
                self.options.model(**forward_kwargs(self.options.model, whole.inputs))
        device = device_of(self.options.model)
        generate_under_reading(session, batch.to(device).inputs, self.generation)

    def _forward(self, session: Reading, batch: Mapping[str, Any]) -> None:
        """One pass; statistics that need more than it wrap it."""
        inputs_of = (
            scored_inputs
            if any(s.needs_logits for s in self.options.statistics)
            else forward_kwargs
        )

        def forward(batch: Mapping[str, Any]) -> Any:
            return session.model(**inputs_of(session.model, dict(batch)))

        for statistic in self.options.statistics:
            if statistic.implements("run_pass"):
                forward = partial(statistic.run_pass, session, forward=forward)
        forward(batch)

    def _once(self, session: Reading) -> None:
        """Run what runs once, in one of the processes, as soon as a text has shown whether the
        model is causal: the probe, and statistics from the weights alone.
        """
        probe = (
            self.options.probe
            if self.options.probe is not None
            else bool(session.causal) and self.used and takes_probe(self.options.model)
        )
        if probe and "probe" not in self.did and not self.processes.rank:
            run_probe(session, self.options.tokenizer)
            self.did.add("probe")
        for statistic in self.options.statistics:
            if not statistic.implements("finish") or statistic.needs_all_texts:
                continue
            if statistic.name not in self.did and not self.processes.rank:
                statistic.finish(session)
                self.did.add(statistic.name)
