"""What stands at one site while a model is read: it takes the attention call over, and looks at W_O's output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from ..models.interface import Call, compute, observers
from ..models.sites import Site
from ..models.switch import replaced
from .check import ReadingError
from .rows import OFFSETS, Capture, Rows, Text, Watch, observe, readable
from .site import adds_up, count, fix_contributions
from .statistics import MASSES, PROBED, columns, describe
from .table import Head, Table

if TYPE_CHECKING:
    from .session import Reading


class Watcher(Protocol):
    """Sees the weights of every site, a block of query rows at a time: what isn't a number a row is taken from there."""

    def at(self, site: Site, call: Call, text: Text) -> Watch | None:
        """An attention call begins: what is to be handed its blocks, one after another; None for nothing."""


class Observer:
    """Watches one site's attention calls, then what reaches its output projection and what leaves it."""

    def __init__(self, session: Reading, site: Site) -> None:
        self.session, self.site = session, site
        self.groups: int | None = None
        self.pending: list[tuple[Tensor, Rows, Text]] = []
        self.capture: Capture | None = None
        self.counted: tuple[int, int] | None = None
        self.ids_reason = ""
        self.reached = False
        self.calls = self.most_calls = 0  # of a pass so far, of any pass
        self.blanks: list[Tensor] = []  # numbers that were made 0, while Check.zeros_stay has its pass
        self.zeros_stayed: bool | None = None
        self.table = Table(self.heads())
        self._weights: tuple[Tensor, Tensor, Tensor] | None = None
        self._weights_of: list[tuple[int, int]] = []

    def heads(self) -> list[Head]:
        site, heads = self.site, self.site.num_heads
        groups = self.groups or max(1, heads // max(1, getattr(site.module, "num_key_value_groups", 1)))
        return [Head(site.head(h), site.name, site.layer, h, h * groups // heads, site.kind) for h in range(heads)]

    def reasons(self) -> dict[str, str]:
        """Why columns are empty at this site: "site column" -> reason."""
        found = {}
        for column in columns():
            name = describe(column).name
            if not self.reached or (self.table.count(column) > 0).any() or name in self.session.reasons:
                continue
            if name == "next" and self.session.causal:
                why = "no row may read a later key: the model is causal"
            elif self.site.kind == "cross" and name in (*OFFSETS, "distance", "duplicate", "induction", "special"):
                why = "cross-attention: the keys are another sequence's"
            elif name in ("special", "duplicate", "induction") and self.ids_reason:
                why = self.ids_reason
            elif column.partition(":")[0] in ("contribution", "even", "cancellation", "reach") and self.site.elementwise:
                why = "a gate or norm of each number by itself stands between the heads and the output projection"
            else:
                why = f"no such row in this text ({describe(column).rows})"
            found[f"{self.site.name} {column}"] = why
        return found

    @contextmanager
    def attached(self) -> Iterator[None]:
        observers[self.site.module] = self.call
        handle = self.site.out.register_forward_hook(self.projected)
        try:
            yield
        finally:
            handle.remove()
            del observers[self.site.module]

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """W_O `[H*Ev, D]`, its bias `[D]`, and factors `[H, Ev, r]` with ||v W_O^(h)|| = ||v factors_h||.

        The factor is R' of a QR of W_O^(h)': a Gram matrix would do as well, but squares the condition number.
        """
        now = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in self.site.out.parameters()]
        if self._weights is None or now != self._weights_of:  # an optimizer may step in between
            self._weights_of = now
            weight, bias = self.site.out_weight()
            per_head = weight.detach().double().unflatten(0, (self.site.num_heads, self.site.width))
            factors = torch.linalg.qr(per_head.mT, mode="r").R.mT.contiguous()
            self._weights = weight.detach(), bias.detach(), factors
        return self._weights

    @property
    def idle(self) -> bool:
        """Not to be read: maps of other sites are wanted."""
        return self.session.mapping and self.capture is None

    def call(self, call: Call) -> Tensor:
        """The attention call itself, in place of transformers' own."""
        session, site = self.session, self.site
        if session.check.passing == "blank":
            out = compute(call)
            self.blanks.append((torch.rand(out.shape, generator=torch.Generator().manual_seed(0)) < 0.5).to(out.device))
            return out.masked_fill(self.blanks[-1], 0)
        if session.check.passing or self.idle:
            return compute(call)
        heads, groups, width = call.q.shape[1], call.k.shape[1], call.v.shape[-1]
        if heads != site.num_heads or width != site.width:
            raise ReadingError(f"{site.name} ({type(site.module).__name__}) can't be read: it has {heads} heads of width "
                               f"{width}, but its output projection {site.out_name} takes {site.num_heads} of {site.width}")
        self.groups, self.reached = groups, True
        self.calls += session.inside and not self.pending  # not what a backward pass computes once more
        self.most_calls = max(self.most_calls, self.calls)
        if self.capture is not None and self.calls > 1:
            raise ValueError(f"{site.name} runs several times a pass (its weights are shared by layers), and a map can't say "
                             "of which; read the table instead, which pools them")
        text = self._text(call)
        self.ids_reason = text.reason
        wanted = frozenset(PROBED if session.prefix else MASSES)
        if self.capture is not None or not session.counting:
            wanted = frozenset()
        watches = [watch for watcher in session.watchers if (watch := watcher.at(site, call, text)) is not None]
        out, rows = observe(call, text, self.weights[2], wanted, self.capture, watches)
        if _in_backward():
            return out  # checkpointing computes this site once more: by the same operations, but counted it was before
        if site.kind == "self" and call.q.shape[2] > 1:
            session.causal = rows.causal and session.causal is not False
        if not session.prefix and session.counting:
            self.counted = (call.q.shape[0] if not session.stack_of(site, call.q.shape[2]).past else 0, int(text.real.sum()))
        self.pending.append((out.detach(), rows, text))
        return out

    def add(self, column: str, x: Tensor, y: Tensor, rows: Tensor) -> None:
        """One batch's sums `[B, H]`, each batch row a document of its own."""
        kind, _, mass = column.rpartition(":")
        name = f"{kind}:{self.session.prefix}{mass}" if kind else self.session.prefix + column
        for b in range(x.shape[0]):
            self.table.add(name, 0, x=x[b].cpu(), y=y[b].cpu(), rows=rows[b].cpu())

    def _text(self, call: Call) -> Text:
        session = self.session
        batch, length, keys = call.q.shape[0], call.q.shape[2], call.k.shape[2]
        device = call.q.device
        given = session.stack_of(self.site, length)
        every = torch.ones(batch, length, dtype=torch.bool, device=device)
        key_real = torch.ones(batch, keys, dtype=torch.bool, device=device)
        mask = given.mask
        if mask is not None and mask.shape[0] not in (1, batch):  # of texts, where these rows are pictures
            mask = None
        if mask is not None:  # it may be longer than the text so far
            mask = mask.bool()[:, : given.past + length].expand(batch, -1)
        real = every if mask is None else mask[:, -length:]
        if session.select is not None:
            real = real & session.select.to(device)
        if self.site.kind == "cross":
            other = given.encoder_mask
            if other is not None and other.shape[1] == keys:
                key_real = other.bool().expand(batch, -1)
            else:  # keys that no row may read are padding
                key_real = readable(call)
            first = key_real.int().argmax(-1)
            return Text(real, key_real, first, None, None, None, None, None, "the keys are of another sequence")
        total = given.past + length
        hidden = max(total - keys, 0)  # keys that a sliding cache has dropped
        if given.past == 0 and keys != length and given.cache is None:
            return Text(real, key_real, torch.full((batch,), -1, device=device), None, None, None, None, None,
                        f"{keys} keys for {length} rows without a cache: where a row stands among the keys isn't known")
        first = torch.zeros(batch, dtype=torch.int64, device=device) - hidden
        if mask is not None:
            first = mask.int().argmax(-1) - hidden
            seen = mask[:, hidden : hidden + keys]
            key_real = torch.nn.functional.pad(seen, (0, keys - seen.shape[1]), value=False)
        every_id, ids = given.key_ids, given.ids
        if every_id is None or ids is None or every_id.shape[0] != batch:
            reason = given.reason or ("pictures and sound have no token ids" if given.other else "no token ids were given")
            return Text(real, key_real, first, None, None, None, None, given.past - hidden, reason)
        special = torch.isin(every_id, torch.tensor(sorted(session.special), device=device))
        nobody = torch.isin(every_id, torch.tensor(session.placeholders, device=device))  # a place for a picture, say
        if mask is not None:
            nobody |= ~mask  # padding is nobody's copy either
        every_id, special = every_id.masked_fill(nobody, -1), special & ~nobody
        ids = every_id[:, -length:].masked_fill(nobody[:, -length:], -2)
        spare = max(keys - total, 0)  # of a cache that is longer than the text
        every_id = torch.nn.functional.pad(every_id, (1, spare), value=-1)
        special = torch.nn.functional.pad(special, (0, spare))[:, hidden : hidden + keys]
        before_ids, key_ids = every_id[:, hidden : hidden + keys], every_id[:, hidden + 1 : hidden + 1 + keys]
        if given.positions is not None and given.past == 0 and given.positions.shape[1] == keys:
            starts = torch.nn.functional.pad(given.positions.diff(dim=1) != 1, (1, 0)).expand(batch, -1)
            before_ids = before_ids.masked_fill(starts, -1)  # texts packed behind one another
        return Text(real, key_real, first, ids, key_ids, before_ids, special, given.past - hidden)

    def projected(self, module: nn.Module, args: Any, output: Any) -> None:
        """The output projection ran: check that the heads' updates add up to what it returned, then count."""
        session = self.session
        if session.check.passing == "plain":
            length = output.shape[-2]
            given = session.stack_of(self.site, length)
            session.check.keep(self.site, output, None if given.mask is None else given.mask[:, : given.past + length])
            return
        if session.check.passing == "blank" and self.blanks:
            blank = torch.cat([b.transpose(1, 2).flatten(0, 1) for b in self.blanks])  # [rows, H, Ev]
            own = args[0].reshape(blank.shape).clone()
            own[:, replaced.get(self.site.module, [])] = 0  # heads in whose place something else reaches W_O
            stays = bool(own.any()) and not bool(own[blank].any())
            self.zeros_stayed, self.blanks = stays and self.zeros_stayed is not False, []
            return
        if self.idle or _in_backward():
            return
        session.check.at_site(self.site, output)
        if session.check.passing:
            return
        if not self.pending:
            raise ReadingError(f"{self.site.name} ({type(self.site.module).__name__}) can't be read: its projection "
                               f"{self.site.out_name} ran, but its attention didn't go through the interface")
        parts, self.pending = self.pending, []
        sizes = [out.shape[0] * out.shape[2] for out, _, _ in parts]
        width = self.site.num_heads * self.site.width
        if len(parts) > 1 and (self.capture is not None or sum(sizes) * width != args[0].numel()):
            raise ReadingError(f"{self.site.name} ({type(self.site.module).__name__}) can't be read: it calls attention "
                               f"{len(parts)} times before its projection runs once")
        if len(parts) > 1:  # pictures or windows behind one another, each with a call of its own
            for (out, rows, text), entered, left in zip(parts, args[0].detach().reshape(-1, width).split(sizes),
                                                        output.detach().reshape(sum(sizes), -1).split(sizes), strict=True):
                self.count(out, rows, text, entered, left)
        else:
            self.count(*parts[0], args[0].detach(), output.detach())
        if session.on_site is not None and self.capture is None:
            session.on_site()

    def count(self, out: Tensor, rows: Rows, text: Text, entered: Tensor, left: Tensor) -> None:
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
            count(self.site, self.weights, self.add, out, rows, text, entered, left, probing=bool(session.prefix))


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
