"""`reading`: read a model in any loop: `with reading(model) as r: model(**inputs)`, then
`r.table()`.

A `Reading` connects four taps to the model: `Tokens` (which token is where), `Verifier` (outputs
against those of the model as it came), `HeadReader` (statistics) and `ResidualStream` (logits).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import MultiheadError, ReadingError
from ..models.contexts import without_stored_weights
from ..models.instrument import Tap, instrument, suspend
from ..models.introspect import find_special_ids, model_name, require_model
from ..models.site import Site, find_sites, list_unreadable
from .accumulate import PassSettings, SiteRecord
from .head_pairs import Pairs
from .moments import TERMS
from .observer import HeadReader, Watcher
from .row_stats import Capture
from .statistics import Statistic, columns, describe, resolve_statistics
from .statistics.base import ELEMENTWISE, NO_CONTRIBUTION, NO_QUERY
from .statistics.columns import PROBED, REQUESTABLE, is_user_defined
from .statistics.masses import TokenClass
from .stream import ResidualStream
from .table import Table
from .tokens import Tokens, ids_given
from .verify import Verifier

__all__ = ["Reading", "ReadingError", "reading"]

NOT_PROBED = "the probe was not run; multihead.read runs it on causal text models"


@contextmanager
def reading(
    model: nn.Module,
    *,
    special_ids: Iterable[int] | None = None,
    verify: bool = True,
    statistics: str | Statistic | Iterable[str | Statistic] = (),
) -> Iterator[Reading]:
    """Read every head of a model while it runs, in a user's own loop.

    Args:
        model: a transformers model, or a module of another library (see `multihead.read`).
            Afterwards it is as it was before, also after an error.
        special_ids: token ids that count as special (BOS, CLS, SEP); by default those that the
            model's config names.
        verify: compare the outputs with those of the model as it came, at the first input of each
            new kind.
        statistics: user-defined statistics, and "nearest", to measure besides the built-in ones
            (see `multihead.Statistic`). What needs the loss or more passes is left to
            `multihead.read`.

    Raises:
        MultiheadError: the model's attention can't be reached; names the class.
        ReadingError: outputs under reading differ, or the updates of a site don't add up; names
            the first such site.

    >>> import multihead
    >>> model, tokenizer = multihead.load_builtin()
    >>> with multihead.reading(model) as r:
    ...     _ = model(**tokenizer("the cat and the dog and the cat", return_tensors="pt"))
    >>> r.table().value("self").shape == (len(r.table().heads),)
    True
    """
    chosen = resolve_statistics(statistics)
    for statistic in chosen:
        if statistic.implements("run_pass") or statistic.implements("finish"):
            raise MultiheadError(
                f"statistics={statistic.name!r} needs other passes; multihead.read measures it"
            )
    session = Reading(model, special_ids=special_ids, verify=verify, statistics=chosen)
    with session.running():
        for statistic in chosen:
            statistic.begin(session)
        yield session


class Reading:
    """The taps of one reading and the table so far.

    Attributes:
        sites: the model's attention sites, in the order of the table's rows.
        settings: what the coming passes count for; change it by `passes` and `open`.
        watchers: see every block of weights as it is computed.
        reasons: why a column is empty everywhere, by name; `why` at one site, by "site column".
        meta, notes: more entries of `table().meta`.

    >>> import multihead
    >>> model, tokenizer = multihead.load_builtin()
    >>> with torch.no_grad(), multihead.reading(model) as session:
    ...     _ = model(**tokenizer("a cat and a cat", return_tensors="pt"))
    >>> len(session.table().heads) == sum(site.num_heads for site in session.sites)
    True
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        special_ids: Iterable[int] | None = None,
        verify: bool = True,
        statistics: list[Statistic] | None = None,
        captures: Callable[[list[Site]], Mapping[str, Capture]] | None = None,
    ) -> None:
        model = require_model(model)
        if hasattr(model, "_orig_mod"):
            raise MultiheadError(
                f"model is compiled ({type(model).__name__}): its code is fixed, so its attention"
                " can't be reached; pass model._orig_mod, the same model before torch.compile"
            )
        self.model = model
        self.statistics = resolve_statistics() if statistics is None else statistics
        self.sites = find_sites(model)
        self.special = frozenset(
            find_special_ids(model) if special_ids is None else ids_given(special_ids)
        )
        self.settings = PassSettings()
        self.records = [SiteRecord(site, self.settings) for site in self.sites]
        self.tokens = Tokens(model, self.sites, self.special)
        self.verifier = Verifier(model, self.tokens) if verify else None
        self.stream = ResidualStream(model, self.sites, self.settings)
        self._reader = HeadReader(
            model,
            self.records,
            self.tokens,
            self.settings,
            self.statistics,
            self.stream,
            None if captures is None else captures(self.sites),
        )
        self._documents_before = self._tokens_before = 0
        self.meta: dict[str, Any] = {}
        self.notes: list[str] = []
        self.pairs: Pairs | None = None  # divergences of pairs of heads, if they were compared
        self.why: dict[str, str] = {}
        asked = {s.name for s in self.statistics}
        self.reasons = {f"probe:{mass}": NOT_PROBED for mass in PROBED} | {
            name: f"only on request: multihead.read(..., statistics=[{name!r}]), --statistic {name}"
            for name in REQUESTABLE
            if name not in asked
        }

    # ---- running

    @contextmanager
    def running(self) -> Iterator[Reading]:
        """Connect the taps; the model is as it came afterwards, also after an error."""
        taps: list[Tap | None] = [self.tokens, self.verifier, self._reader, self.stream]
        connected = [tap for tap in taps if tap is not None]
        with (
            without_stored_weights(self.model) as had_weights,
            instrument(self.model, *connected, sites=self.sites),
        ):
            if had_weights:
                self.notes.append(
                    "output_attentions=True of the model's config is off while it is read: weights"
                    " aren't stored; multihead.read_maps gives those of chosen heads"
                )
            try:
                yield self
            finally:  # what only a pass needs goes at once
                self.tokens.clear()
                self._reader.clear()
                self.stream.close()
                for record in self.records:
                    record.forget_weights()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Run passes that this reading doesn't see: no statistics, no verification.

        They compute with `multihead.attention`, as those under reading do.
        """
        with (
            suspend(self.model, keep_changes=True),
            instrument(self.model, sites=self.sites, attention=True),
        ):
            yield

    @contextmanager
    def passes(self, **settings: Any) -> Iterator[None]:
        """Change what passes count for (see `PassSettings`) for the length of the `with`."""
        before = {name: getattr(self.settings, name) for name in settings}
        try:
            for name, value in settings.items():
                setattr(self.settings, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(self.settings, name, value)

    def count_only(self, select: Tensor | None) -> None:
        """From here on only these queries count, bool `[B, L]`; None: all."""
        self.settings.select = select

    def open(self, document_of: Tensor, documents: int) -> None:
        """From here on the rows `[B]` of each pass belong to documents, until `close`."""
        self.settings.document_of, self.settings.documents = document_of, documents

    def close(self) -> None:
        """The open documents have ended; from here on each row is a document again."""
        for record in self.records:
            record.close_documents()
        self.count(self.settings.documents, 0)
        self.settings.document_of, self.settings.documents = None, 0

    def count(self, documents: int, tokens: int) -> None:
        """Add to the number of documents and tokens that were read."""
        self._documents_before += documents
        self._tokens_before += tokens

    def resume(self, causal: bool | None) -> None:
        """Continue a reading that found the model `causal` or not."""
        self._reader.causal = causal

    @property
    def documents(self) -> int:
        return self._documents_before + self._reader.documents

    @property
    def causal(self) -> bool | None:
        """True if no self-attention query could read a later key; None before any was seen."""
        return self._reader.causal

    @property
    def inside(self) -> bool:
        """Whether a pass of the whole model is under way."""
        return self._reader.inside

    @property
    def watchers(self) -> list[Watcher]:
        return self._reader.watchers

    # ---- results

    def record(self, site: Site) -> SiteRecord:
        return next(record for record in self.records if record.site.name == site.name)

    def add(self, site: Site, name: str, values: Tensor) -> None:
        """Add a value for each head of a site, `[H]`, to the column `name`."""
        if values.shape != (site.num_heads,):
            raise MultiheadError(
                f"{name}: add() got {list(values.shape)}, expected a value for each head,"
                f" [{site.num_heads}]"
            )
        one = torch.ones(1, site.num_heads, dtype=torch.float64, device="cpu")
        self.record(site).add(name, values.double().cpu()[None], one, one)

    def logit_reason(self, site: Site) -> str:
        """Why the column `logit` is empty at a site."""
        return self.stream.reason_at(site, causal=self.causal)

    def table(self) -> Table:
        """The table so far, with a row a head."""
        heads = [head for record in self.records for head in record.heads()]
        table = Table(
            heads,
            {},
            dict(self.reasons),
            {
                "model": model_name(self.model),
                "documents": self.documents,
                "tokens": self._tokens_before + self._reader.tokens_read,
            }
            | self.meta,
            None if self.pairs is None else self.pairs + Pairs.empty(len(heads)),
        )
        if self.causal is False:
            for name, why in self.reasons.items():
                if why == NOT_PROBED:
                    table.reasons[name] = "the probe runs on causal models, and this one isn't"
        start = 0
        for record in self.records:
            part = record.so_far()
            for column, sums in part.sums.items():
                table.sums.setdefault(column, np.zeros((len(heads), sums.shape[1])))[
                    start : start + len(sums)
                ] = sums
            start += len(part.heads)
            table.reasons |= self._reasons_at(record, part)
        # a class without tokens at any site is an empty column, not an unknown one
        for statistic in self.statistics:
            if is_user_defined(statistic) or isinstance(statistic, TokenClass):
                table.sums.setdefault(statistic.name, np.zeros((len(heads), TERMS + 1)))
            if is_user_defined(statistic):
                table.meta.setdefault("statistics", {})[statistic.name] = statistic.to_dict()
        _merge_reasons(table.reasons, [r.site.name for r in self.records if r.reached])
        for column in table.columns:
            table.reasons.pop(column, None)
        table.meta["notes"] = self._coverage() + self._about_weights() + self.notes
        prefix = self.tokens.prefix
        if prefix:  # paths in the model inside wrappers, so that its tables add up with these
            table.heads = [replace(h, site=h.site.removeprefix(prefix)) for h in table.heads]
            table.reasons = {k.removeprefix(prefix): why for k, why in table.reasons.items()}
        return table

    def _about_weights(self) -> list[str]:
        """How output projections differ from a matrix: the first of each kind, and their number."""
        found = [record.note for record in self.records if record.note]
        more = f" (and so at {len(found) - 1} more)" if len(found) > 1 else ""
        return [found[0] + more] if found else []

    def _coverage(self) -> list[str]:
        """Notes on what wasn't read."""
        notes = [f"not read: {what}" for what in list_unreadable(self.model, self.sites)]
        for record in self.records:
            if self.documents and not record.reached:
                notes.append(f"not read: {record.site.name} wasn't reached")
        for record in self.records:
            if record.most_calls > 1:
                notes.append(
                    f"{record.site.label} runs {record.most_calls} times a pass (its weights are"
                    " shared by layers): its rows pool them"
                )
        if self._reader.entered and not self._reader.was_whole:
            names = ", ".join(name or type(self.model).__name__ for name in self._reader.entered)
            notes.append(f"only a part of the model was called: {names}")
        return notes

    def _reasons_at(self, record: SiteRecord, table: Table) -> dict[str, str]:
        """Why columns are empty at one site: "site column" -> reason."""
        reasons: dict[str, str] = {}
        by_name = {s.name: s for s in self.statistics if s.has_column}
        facts = _Facts(self, record)
        for column in columns([*table.sums, *by_name]):
            name = describe(column).name
            filled = column in table.sums and not np.isnan(table.value(column)).all()
            if not record.reached or filled or name in self.reasons:
                continue
            statistic = by_name.get(name) or describe(column)
            key = f"{record.site.name} {column}"
            why = self.why.get(key) or statistic.why_missing(facts)
            if column != name and name in table.sums and (table.count(name) > 0).any():
                why = ELEMENTWISE if record.elementwise else NO_CONTRIBUTION
            elif not record.facts.any_query and key not in self.why:
                why = NO_QUERY
            reasons[key] = why or f"no such query in this text ({statistic.queries})"
        return reasons


class _Facts:
    """A `SiteState`: facts about a site that explain an empty column."""

    def __init__(self, session: Reading, record: SiteRecord) -> None:
        self.kind, self.ids_reason = record.kind, record.ids_reason
        self.causal, self.elementwise = session.causal, record.elementwise
        self.logit_reason = session.logit_reason(record.site)
        self.knows_special, self.text = bool(session.special), record.facts


def _merge_reasons(reasons: dict[str, str], sites: list[str]) -> None:
    """Give a reason that holds at every site once, by the column's name alone."""
    for column in columns([key.rpartition(" ")[2] for key in reasons]):
        keys = [f"{site} {column}" for site in sites]
        why = {reasons.get(key) for key in keys}
        if len(why) == 1 and (one := why.pop()) is not None:
            reasons[column] = one
            for key in keys:
                del reasons[key]
