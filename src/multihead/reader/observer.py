"""What stands at one site while a model is read: it takes the attention call over, and looks at
W_O's output.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import MultiheadError, ReadingError
from ..models.calls import readable_keys
from ..models.foreign import Kind, kind_of, left
from ..models.instrument import replaced_heads
from ..models.site import Site
from ..models.transformers import observers
from ..ops.call import AttentionCall
from ..ops.functional import compute
from .accumulate import adds_up, count, fix_contributions
from .collect import RowStats, collect_row_stats
from .context import Text, Watch
from .row_stats import Capture
from .statistics import Statistic, columns, describe
from .statistics.base import ELEMENTWISE
from .statistics.masses import Mass
from .sums import Head
from .table import Table

if TYPE_CHECKING:
    from .session import Reading


class Watcher(Protocol):
    """Sees the weights of every site, a block of query rows at a time: what isn't a number a row is
    taken from there.

    Its methods `begin_pass()` and `end_pass()`, if it has them, are called around each pass of the
    whole model.
    """

    def at(self, site: Site, call: AttentionCall, text: Text) -> Watch | None:
        """An attention call begins: what is to be handed its blocks, one after another; None for
        nothing.
        """


class Observer:
    """Watches one site's attention calls, then what reaches its output projection and what leaves
    it.
    """

    def __init__(self, session: Reading, site: Site) -> None:
        self.session, self.site = session, site
        self.kind = site.kind  # its name's guess, until a call tells
        self.groups: int | None = None
        self.pending: list[tuple[Tensor, RowStats, Text]] = []
        self.capture: Capture | None = None
        self.counted: tuple[int, int] | None = None
        self.ids_reason = ""
        self.reached = False
        self.calls = self.most_calls = 0  # of a pass so far, of any pass
        self.blanks: list[
            Tensor
        ] = []  # numbers that were made 0, while Check.zeros_stay has its pass
        self.zeros_stayed: bool | None = None
        self.table = Table(self.heads())
        self.open: dict[
            str, Tensor
        ] = {}  # of documents that aren't at their end, by column: x, y, rows [3, documents, H]
        self._weights: tuple[Tensor, Tensor, Tensor] | None = None
        self._weights_of: list[tuple[int, int]] = []

    def heads(self) -> list[Head]:
        site, heads = self.site, self.site.num_heads
        groups = self.groups or max(
            1, heads // max(1, getattr(site.module, "num_key_value_groups", 1))
        )
        return [
            Head(site.head_label(h), site.name, site.layer, h, h * groups // heads, self.kind)
            for h in range(heads)
        ]

    def reasons(self, table: Table) -> dict[str, str]:
        """Why columns are empty at this site: "site column" -> reason."""
        found: dict[str, str] = {}
        by_name = {s.name: s for s in self.session.statistics}
        for column in columns([*table.sums, *by_name]):
            name = describe(column).name
            held = column in table.sums and (table.count(column) > 0).any()
            if not self.reached or held or name in self.session.reasons:
                continue
            statistic = by_name.get(name) or describe(column)
            key = f"{self.site.name} {column}"
            why = self.session.why.get(key) or statistic.why_missing(self)
            if not why and column != name and self.site.elementwise:
                why = ELEMENTWISE
            found[key] = why or f"no such query in this text ({statistic.queries})"
        return found

    @property
    def causal(self) -> bool | None:
        return self.session.causal

    @property
    def elementwise(self) -> bool:
        return self.site.elementwise

    @property
    def logit_reason(self) -> str:
        return self.session.stream.reason_at(self.site)

    @contextmanager
    def attached(self) -> Iterator[None]:
        observers[self.site.module] = self.call
        handles = [self.site.out.register_forward_hook(self.projected)]
        if isinstance(kind := kind_of(self.site.module), Kind) and not kind.projects:
            handles.append(self.site.module.register_forward_hook(self.returned))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            del observers[self.site.module]

    def forget(self) -> None:
        self.pending, self._weights = [], None

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """W_O `[H*Ev, D]`, its bias `[D]`, and factors `[H, Ev, r]` with ||v W_O^(h)|| = ||v
        factors_h||.

        The factor is R' of a QR of W_O^(h)': a Gram matrix would do as well, but squares the
        condition number.
        """
        now = [
            (p.data_ptr(), 0 if p.is_inference() else p._version)
            for p in self.site.out.parameters()
        ]
        if self._weights is None or now != self._weights_of:  # an optimizer may step in between
            self._weights_of = now
            weight, bias = self.site.out_weight()
            per_head = (
                weight.detach().double().unflatten(0, (self.site.num_heads, self.site.head_dim))
            )
            factors = torch.linalg.qr(per_head.mT, mode="r").R.mT.contiguous()
            self._weights = weight.detach(), bias.detach(), factors
        return self._weights

    @property
    def statistics(self) -> list[Statistic]:
        """Those measured in the pass under way."""
        session = self.session
        if self.capture is not None or not session.counting:
            return []
        if session.prefix:
            return [s for s in session.statistics if isinstance(s, Mass) and s.probed]
        return session.statistics

    @property
    def idle(self) -> bool:
        """Not to be read: maps of other sites are wanted."""
        return self.session.mapping and self.capture is None

    def call(self, call: AttentionCall) -> Tensor:
        """The attention call itself, in place of transformers' own."""
        session, site = self.session, self.site
        if session.check.passing == "blank":
            out = compute(call)
            self.blanks.append(
                (torch.rand(out.shape, generator=torch.Generator().manual_seed(0)) < 0.5).to(
                    out.device
                )
            )
            return out.masked_fill(self.blanks[-1], 0)
        if session.check.passing or self.idle:
            return compute(call)
        heads, groups, width = call.q.shape[1], call.k.shape[1], call.v.shape[-1]
        if heads != site.num_heads or width != site.head_dim:
            raise ReadingError(
                f"{site.name} ({type(site.module).__name__}) can't be read: it has {heads} heads of"
                f" width {width}, but its output projection {site.out_name} takes {site.num_heads}"
                f" of {site.head_dim}"
            )
        kind = (
            self.kind if call.context.cross is None else "cross" if call.context.cross else "self"
        )
        if self.reached and kind != self.kind:
            raise ReadingError(
                f"{site.name} ({type(site.module).__name__}) can't be read: it is called both on"
                " its own sequence and across to another, and one row of a table can't hold both"
            )
        if self.capture is not None and call.q.shape[0] > 1:
            raise MultiheadError(
                f"text holds {call.q.shape[0]} texts for {site.name}: expected one, for a map is of"
                " one text"
            )
        self.groups, self.reached, self.kind = groups, True, kind
        self.calls += (
            session.inside and not self.pending
        )  # not what a backward pass computes once more
        self.most_calls = max(self.most_calls, self.calls)
        if self.capture is not None and self.calls > 1:
            raise MultiheadError(
                f"{site.name} runs several times a pass (its weights are shared by layers), and a"
                " map can't say of which; read the table instead, which pools them"
            )
        if _in_backward():
            return compute(
                call
            )  # checkpointing computes this site once more, but counted it was before
        text = self._text(call)
        given = session.stack_of(site, call.q.shape[2])
        if session.document_of is None and not given.continues and session.counting:
            self.close()  # of ready-made inputs each row is a document
        self.ids_reason = text.reason
        watches = [
            watch
            for watcher in session.watchers
            if (watch := watcher.at(site, call, text)) is not None
        ]
        out, rows = collect_row_stats(
            call, text, self.weights[2], self.statistics, self.capture, watches
        )
        if kind == "self" and call.q.shape[2] > 1:
            session.causal = rows.causal and session.causal is not False
        if not session.prefix and session.counting:
            past = given.past if call.context.offset is None else call.context.offset
            begun = call.q.shape[0] if session.document_of is None and not past else 0
            self.counted = (begun, int(text.real.sum()))
        self.pending.append((out.detach(), rows, text))
        return out

    def add(self, column: str, x: Tensor, y: Tensor, rows: Tensor) -> None:
        """One batch's sums `[B, H]`: each row's go to its document, whose windows or pieces are
        added up first.
        """
        kind, _, mass = column.rpartition(":")
        name = f"{kind}:{self.session.prefix}{mass}" if kind else self.session.prefix + column
        new, document = torch.stack([x, y, rows]), self.session.document_of
        if document is not None:
            new = new.new_zeros(3, self.session.opened, x.shape[1]).index_add_(
                1, document.to(x.device), new
            )
        self.open[name] = new if name not in self.open else self.open[name] + new

    def close(self) -> None:
        """The documents are at their end: only now are their moments taken."""
        self.table, self.open = self.so_far(), {}

    def so_far(self) -> Table:
        """The table, with the open documents as if they ended here."""
        table = Table(
            self.heads(), {column: sums.copy() for column, sums in self.table.sums.items()}
        )
        for column, (x, y, rows) in self.open.items():
            if not bool(torch.stack([x, y]).isfinite().all()):
                raise ReadingError(
                    f"{self.site.name} ({type(self.site.module).__name__}): {column} of a text is"
                    " NaN or infinite, and would empty the whole column; look at the model's"
                    " weights and at that text, or load the model in float32"
                )
            table.add(column, 0, x=x.cpu(), y=y.cpu(), rows=rows.cpu())
        return table

    def _text(self, call: AttentionCall) -> Text:
        session = self.session
        batch, length, keys = call.q.shape[0], call.q.shape[2], call.k.shape[2]
        device = call.q.device
        given = session.stack_of(self.site, length)
        past = given.past if call.context.offset is None else call.context.offset
        every = torch.ones(batch, length, dtype=torch.bool, device=device)
        key_real = torch.ones(batch, keys, dtype=torch.bool, device=device)
        mask = given.mask
        if mask is not None and mask.shape[0] not in (
            1,
            batch,
        ):  # of texts, where these rows are pictures
            mask = None
        if mask is not None:  # it may be longer than the text so far
            mask = mask.bool()[:, : past + length].expand(batch, -1)
        if (
            call.context.key_valid is not None and self.kind == "self" and keys == past + length
        ):  # what it was told itself
            mask = call.context.key_valid.expand(batch, -1)
        real = every if mask is None else mask[:, -length:]
        if session.select is not None:
            real = real & session.select.to(device)
        if self.kind == "cross":
            other = given.encoder_mask if call.context.key_valid is None else call.context.key_valid
            if other is not None and other.shape[1] == keys:
                key_real = other.bool().expand(batch, -1)
            else:  # keys that no row may read are padding
                key_real = readable_keys(call)
            first = key_real.int().argmax(-1)
            return Text(
                real,
                key_real,
                first,
                None,
                None,
                None,
                None,
                None,
                "the keys are of another sequence",
            )
        total = past + length
        hidden = max(total - keys, 0)  # keys that a sliding cache has dropped
        if past == 0 and keys != length and given.cache is None:
            return Text(
                real,
                key_real,
                torch.full((batch,), -1, device=device),
                None,
                None,
                None,
                None,
                None,
                f"{keys} keys for {length} rows without a cache: where a row stands among the keys"
                " isn't known",
            )
        first = torch.zeros(batch, dtype=torch.int64, device=device) - hidden
        if mask is not None:
            first = mask.int().argmax(-1) - hidden
            seen = mask[:, hidden : hidden + keys]
            key_real = torch.nn.functional.pad(seen, (0, keys - seen.shape[1]), value=False)
        every_id, ids = given.key_ids, given.ids
        if every_id is not None and every_id.shape[1] != total:
            every_id, given.reason = (
                None,
                "earlier keys are in the layers' own caches, and their ids aren't kept",
            )
        if every_id is None or ids is None or every_id.shape[0] != batch:
            reason = given.reason or (
                "pictures and sound have no token ids" if given.other else "no token ids were given"
            )
            return Text(real, key_real, first, None, None, None, None, past - hidden, reason)
        special = torch.isin(every_id, torch.tensor(sorted(session.special), device=device))
        nobody = torch.isin(
            every_id, torch.tensor(session.placeholders, device=device)
        )  # a place for a picture, say
        if mask is not None:
            nobody |= ~mask  # padding is nobody's copy either
        every_id, special = every_id.masked_fill(nobody, -1), special & ~nobody
        ids = every_id[:, -length:].masked_fill(nobody[:, -length:], -2)
        spare = max(keys - total, 0)  # of a cache that is longer than the text
        every_id = torch.nn.functional.pad(every_id, (1, spare), value=-1)
        special = torch.nn.functional.pad(special, (0, spare))[:, hidden : hidden + keys]
        before_ids, key_ids = (
            every_id[:, hidden : hidden + keys],
            every_id[:, hidden + 1 : hidden + 1 + keys],
        )
        if given.positions is not None and past == 0 and given.positions.shape[1] == keys:
            starts = torch.nn.functional.pad(given.positions.diff(dim=1) != 1, (1, 0)).expand(
                batch, -1
            )
            before_ids = before_ids.masked_fill(starts, -1)  # texts packed behind one another
        return Text(
            real,
            key_real,
            first,
            ids,
            key_ids,
            before_ids,
            special,
            past - hidden,
            continues=given.continues,
            found=given.found,
        )

    def returned(self, module: nn.Module, args: Any, output: Any) -> None:
        """A module ran whose own forward doesn't call its projection: as it came, what it returned
        is all there is to see.
        """
        out = (
            left(module, output)
            if self.session.check.passing == "plain" and "forward" not in vars(module)
            else None
        )
        if out is not None:
            self.projected(self.site.out, args, out)

    def projected(self, module: nn.Module, args: Any, output: Any) -> None:
        """The output projection ran: check that the heads' updates add up to what it returned, then
        count.
        """
        session = self.session
        if session.check.passing == "plain":
            length = output.shape[-2]
            given = session.stack_of(self.site, length)
            session.check.keep(
                self.site,
                output,
                None if given.mask is None else given.mask[:, : given.past + length],
            )
            return
        if session.check.passing == "blank" and self.blanks:
            blank = torch.cat(
                [b.transpose(1, 2).flatten(0, 1) for b in self.blanks]
            )  # [rows, H, Ev]
            own = args[0].reshape(blank.shape).clone()
            own[:, replaced_heads(self.site)] = 0  # heads in whose place something else reaches W_O
            stays = bool(own.any()) and not bool(own[blank].any())
            self.zeros_stayed, self.blanks = stays and self.zeros_stayed is not False, []
            return
        if self.idle or _in_backward():
            return
        session.check.at_site(self.site, output)
        if session.check.passing:
            return
        if not self.pending:
            raise ReadingError(
                f"{self.site.name or 'the model itself'} ({type(self.site.module).__name__}) can't"
                f" be read: its projection {self.site.out_name} ran, but it called neither"
                " transformers' attention interface nor torch's scaled_dot_product_attention, and"
                " what a module writes out by itself can't be seen; call"
                " scaled_dot_product_attention in it"
            )
        parts, self.pending = self.pending, []
        if session.entered is not None and len(parts) == 1:
            session.entered.append((self, args[0], parts[0][2].real))
        sizes = [out.shape[0] * out.shape[2] for out, _, _ in parts]
        width = self.site.num_heads * self.site.head_dim
        if len(parts) > 1 and (self.capture is not None or sum(sizes) * width != args[0].numel()):
            raise ReadingError(
                f"{self.site.name} ({type(self.site.module).__name__}) can't be read: it calls"
                f" attention {len(parts)} times before its projection runs once"
            )
        if len(parts) > 1:  # pictures or windows behind one another, each with a call of its own
            for (out, rows, text), entered, left in zip(
                parts,
                args[0].detach().reshape(-1, width).split(sizes),
                output.detach().reshape(sum(sizes), -1).split(sizes),
                strict=True,
            ):
                self.count(out, rows, text, entered, left)
        else:
            self.count(*parts[0], args[0].detach(), output.detach())
        if session.on_site is not None and self.capture is None:
            session.on_site()

    def count(self, out: Tensor, rows: RowStats, text: Text, entered: Tensor, left: Tensor) -> None:
        """One attention call's rows, and what entered and left the projection for them."""
        session = self.session
        if self.capture is not None:
            fix_contributions(self.capture, self.site, out, text, entered)
            return
        try:
            adds_up(self.site, self.weights, entered, left, text)
        except ReadingError:  # an adapter was switched since W_O was looked at?
            self._weights = None
            adds_up(self.site, self.weights, entered, left, text)
        if session.counting:
            count(
                self.site, self.weights, self.add, out, rows, text, entered, left, self.statistics
            )
        given = entered.reshape(
            *text.real.shape, self.site.num_heads, self.site.head_dim
        ).transpose(1, 2)
        session.stream.at_site(self, given, left, text, rows.causal)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
