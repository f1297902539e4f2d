"""`HeadReader`: the tap that reads a model. It computes each attention call together with the
statistics of its queries, and counts them once the output projection has run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from ..errors import MultiheadError, ReadingError
from ..models.contexts import is_in_backward
from ..models.instrument import Compute, PassInputs, Tap
from ..models.introspect import inner_model
from ..models.site import Site
from ..ops.call import AttentionCall
from .accumulate import PassSettings, SiteCall, SiteRecord
from .collect import RowStats, collect_row_stats
from .context import TokenContext, Watch
from .copied_caches import copy_caches
from .row_stats import Capture
from .statistics import Statistic
from .statistics.masses import Mass
from .tokens import ENCODED, Tokens
from .verify import require_elementwise


class Watcher(Protocol):
    """Sees the weights of every site, a block of queries at a time.

    Its methods `begin_pass()` and `end_pass()`, if it has them, are called around each pass of the
    whole model.
    """

    def at(self, site: Site, call: AttentionCall, context: TokenContext) -> Watch | None:
        """An attention call begins: a function that is called with its blocks, or None."""


class Follower(Protocol):
    """Sees each counted call of a site."""

    def site_was_read(self, record: SiteRecord, call: SiteCall) -> None: ...


class HeadReader(Tap):
    """Adds each pass to the records of the sites, or fills maps of chosen heads.

    Args:
        captures: by site name, the maps to fill. If given, nothing else is read.
    """

    def __init__(
        self,
        model: Any,
        records: Sequence[SiteRecord],
        tokens: Tokens,
        settings: PassSettings,
        statistics: Sequence[Statistic],
        follower: Follower,
        captures: Mapping[str, Capture] | None = None,
    ) -> None:
        self.model, self.tokens, self.settings = model, tokens, settings
        self.records = {record.site.name: record for record in records}
        self.statistics, self.follower, self.captures = statistics, follower, captures
        self.watchers: list[Watcher] = []
        self.documents = self.tokens_read = 0
        self.causal: bool | None = None  # no self-attention query could read a later key, so far
        self.inside = False  # a pass is under way
        self.entered: list[str] = []  # modules at which passes began, none twice
        self.was_whole = False  # one of them is the model, or that inside wrappers
        self._names = {id(module): name for name, module in model.named_modules()}
        # of the pass under way:
        self._pending: dict[str, list[tuple[Tensor, RowStats, TokenContext]]] = {}
        self._calls: dict[str, dict[int, int]] = {}  # by site and call of its stack
        # new documents and tokens, by site and call of its stack
        self._counted: dict[str, dict[int, tuple[int, int]]] = {}
        self._has_encoded = False  # a pass ran the encoder alone
        self._reuses = False  # the pass under way has what that pass gave
        self._inputs: PassInputs | None = None  # to run it again
        self._passed = False  # a pass was completed: from then on no caches are copied for that

    # ---- the tap

    def begin_pass(self, inputs: PassInputs) -> None:
        self.clear()
        self._call_watchers("begin_pass")
        self.inside = True
        name = self._names[id(inputs.model)]
        self.entered += [name] if name not in self.entered else []
        self.was_whole |= inputs.model in (self.model, inner_model(self.model))
        self._reuses = self._has_encoded and any(
            inputs.named().get(argument) is not None for argument in ENCODED
        )
        values = (*inputs.args, *inputs.kwargs.values())
        if self._passed and any(_has_positions(value) for value in values):
            self._inputs = None
        else:
            self._inputs = PassInputs(
                inputs.model, copy_caches(inputs.args), copy_caches(inputs.kwargs)
            )

    def attend(self, site: Site, call: AttentionCall, compute: Compute) -> Tensor:
        record, settings = self.records[site.name], self.settings
        capture = None if self.captures is None else self.captures.get(site.name)
        if self.captures is not None and capture is None:
            return compute(call)
        kind = (
            record.kind if call.context.cross is None else "cross" if call.context.cross else "self"
        )
        self._require_readable(record, call, kind, capture)
        first = not self._pending.get(site.name)
        given = self.tokens.stack_inputs(site, call.q.shape[2])
        record.num_kv_heads, record.reached, record.kind = call.k.shape[1], True, kind
        calls = self._calls.setdefault(site.name, {})
        calls[given.number] = calls.get(given.number, 0) + (self.inside and first)
        record.most_calls = max(record.most_calls, calls[given.number])
        if capture is not None and sum(calls.values()) > 1:
            why = (
                "its weights are shared by layers"
                if calls[given.number] > 1
                else "the model around it calls it several times"
            )
            raise MultiheadError(
                f"{site.name} runs several times a pass ({why}), so a map of it is ambiguous; read"
                " the table instead, which pools the runs"
            )
        if is_in_backward():  # checkpointing computes it again, but it was counted before
            return compute(call)
        context = self.tokens.locate(site, kind, call, settings.select)
        if settings.document_of is None and not given.continues and settings.counting:
            record.close_documents()  # of ready-made inputs each row is a document
        record.ids_reason = context.ids_reason
        watches = [
            watch
            for watcher in self.watchers
            if (watch := watcher.at(site, call, context)) is not None
        ]
        record.like = call.v.new_empty(0)
        out, rows = collect_row_stats(
            call, context, record.out_weights.factors, self._statistics(), capture, watches, compute
        )
        if kind == "self" and call.q.shape[2] > 1:
            self.causal = rows.causal and self.causal is not False
        if not settings.prefix and settings.counting:
            record.facts.add(context, rows.allowed)
            past = given.past if call.context.offset is None else call.context.offset
            # a cache that was filled outside of the reading begins documents
            is_new = not past or (given.cache is not None and not given.knows_cache)
            is_new = is_new and not given.repeats
            begun = call.q.shape[0] if settings.document_of is None and is_new else 0
            counted = self._counted.setdefault(site.name, {})
            counted[given.number] = begun, int(context.query_valid.sum())
        self._pending.setdefault(site.name, []).append((out.detach(), rows, context))
        return out

    def update(self, site: Site, x: Tensor | None, y: Tensor) -> None:
        record = self.records[site.name]
        if (self.captures is not None and site.name not in self.captures) or is_in_backward():
            return
        parts = self._pending.pop(site.name, [])
        if not parts or x is None:
            raise ReadingError(
                f"{record.described} can't be read: its projection {site.out_name} ran, but it"
                " called neither transformers' attention interface nor torch's"
                " scaled_dot_product_attention, so its weights can't be reached; call"
                " scaled_dot_product_attention in it"
            )
        for call in self._split(record, parts, x.detach(), y.detach()):
            self._count(record, call)
        if self.settings.on_site is not None and self.captures is None:
            self.settings.on_site()

    def end_pass(self, outputs: Any) -> None:
        self.inside, self._passed = False, True
        suspects = [
            record
            for record in self.records.values()
            if record.elementwise
            and not record.elementwise_proved
            and self._calls.get(record.site.name)
        ]
        inputs, self._inputs = self._inputs, None
        if suspects:
            for record in suspects:
                record.elementwise = False
            require_elementwise(self.model, inputs, [record.site for record in suspects])
            for record in suspects:
                record.elementwise = record.elementwise_proved = True
        self._call_watchers("end_pass")
        if not self._reuses:
            crossed = any(record.kind == "cross" for record in self.records.values())
            self._has_encoded = crossed and not any(
                record.site.stack == "decoder" and record.site.name in self._calls
                for record in self.records.values()
            )
        if self.settings.prefix or not self.settings.counting or self._reuses:
            return
        site = next((name for name in self.records if name in self._counted), None)
        for documents, tokens in self._counted.get(site or "", {}).values():
            self.documents += documents
            self.tokens_read += tokens

    def clear(self) -> None:
        """Forget the pass under way."""
        self._pending.clear()
        self._calls.clear()
        self._counted.clear()
        self._inputs = None

    # ----

    def _call_watchers(self, method: str) -> None:
        for watcher in self.watchers:
            getattr(watcher, method, lambda: None)()

    def _statistics(self) -> Sequence[Statistic]:
        """Those that the pass under way measures."""
        if self.captures is not None or not self.settings.counting:
            return ()
        if self.settings.prefix:
            return [s for s in self.statistics if isinstance(s, Mass) and s.probed]
        return self.statistics

    def _require_readable(
        self, record: SiteRecord, call: AttentionCall, kind: str, capture: Capture | None
    ) -> None:
        site, heads, width = record.site, call.q.shape[1], call.v.shape[-1]
        if heads != site.num_heads or width != site.head_dim:
            raise ReadingError(
                f"{record.described} can't be read: it has {heads} heads of width {width}, but its"
                f" output projection {site.out_name} takes {site.num_heads} of {site.head_dim}"
            )
        if record.reached and kind != record.kind:
            raise ReadingError(
                f"{record.described} can't be read: it is called both as self-attention and as"
                " cross-attention, and one row of a table can't hold both"
            )
        if capture is not None and call.q.shape[0] > 1:
            raise MultiheadError(
                f"text holds {call.q.shape[0]} texts for {site.name}: expected one, since a map is"
                " of one text"
            )

    def _split(
        self,
        record: SiteRecord,
        parts: list[tuple[Tensor, RowStats, TokenContext]],
        x: Tensor,
        y: Tensor,
    ) -> list[SiteCall]:
        """The calls that entered W_O together: one, or pictures or windows one after another."""
        if len(parts) == 1:
            return [SiteCall(*parts[0], x, y)]
        width = record.site.num_heads * record.site.head_dim
        sizes = [out.shape[0] * out.shape[2] for out, _, _ in parts]
        if self.captures is not None or sum(sizes) * width != x.numel():
            raise ReadingError(
                f"{record.described} can't be read: it calls attention {len(parts)} times before"
                " its projection runs once"
            )
        xs = x.reshape(-1, width).split(sizes)
        ys = y.reshape(sum(sizes), -1).split(sizes)
        return [SiteCall(*part, x, y) for part, x, y in zip(parts, xs, ys, strict=True)]

    def _count(self, record: SiteRecord, call: SiteCall) -> None:
        capture = None if self.captures is None else self.captures[record.site.name]
        if record.require_sum(call) and call.rows.again is not None:
            if capture is not None:
                capture.clear()
            call = call._replace(rows=call.rows.again(record.out_weights.factors, capture))
        if capture is not None:
            record.scale_contributions(call, capture)
            return
        if self.settings.counting:
            record.accumulate(call, self._statistics())
        self.follower.site_was_read(record, call)


def _has_positions(value: Any) -> bool:
    return hasattr(value, "get_seq_length") and int(value.get_seq_length()) > 0
