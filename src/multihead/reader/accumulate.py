"""`SiteRecord`: the sums of one site's statistics while a model is read, and how one call of its
attention is added to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import MultiheadError, ReadingError
from ..models.foreign import has_elementwise_gate
from ..models.head_updates import norm_factors
from ..models.instrument import replaced_heads
from ..models.introspect import tolerance
from ..models.site import Site
from ..models.weights import INEXACT, apply_quietly, describe_state, has_hooks, read_projection
from .collect import RowStats
from .context import TokenContext
from .row_stats import Capture
from .statistics.base import Defined, HeadUpdates, Statistic, Totals
from .sums import Head
from .table import Table
from .text_facts import TextFacts
from .verify import require_equal, rows_to_compare


@dataclass
class PassSettings:
    """Options of the coming passes of a reading. The reading changes them, the taps read them."""

    counting: bool = True  # False: only watchers see the passes, nothing is added to the table
    prefix: str = ""  # before the names of masses: "probe:" while the probe runs
    select: Tensor | None = None  # bool [B, L]: the only queries that count, besides being real
    # [B]: the document of each row, of those opened; None: each row begins a document
    document_of: Tensor | None = None
    documents: int = 0  # number of documents opened
    on_site: Callable[[], None] | None = None  # called each time a site was read


class OutWeights(NamedTuple):
    """The output projection of a site."""

    weight: Tensor  # [H*Ev, D]
    bias: Tensor  # [D]
    # [H, Ev, r], float64, with ||v W_O^(h)|| = ||v factors_h||: R' of a QR of W_O^(h)'. A Gram
    # matrix would do as well, but squares the condition number.
    factors: Tensor


class SiteCall(NamedTuple):
    """One attention call that has been through W_O."""

    out: Tensor  # [B, H, L, Ev]: head outputs
    rows: RowStats
    context: TokenContext
    x: Tensor  # what entered W_O, B*L*H*Ev values
    y: Tensor  # what left it, B*L*D values

    @property
    def entered(self) -> Tensor:
        """x as `[B, H, L, Ev]`: the head outputs, unless a gate or norm lies between."""
        batch, heads, length, width = self.out.shape
        return self.x.reshape(batch, length, heads, width).transpose(1, 2)


class SiteRecord:
    """State of one site in a reading: facts from its calls, and sums by column."""

    def __init__(self, site: Site, settings: PassSettings) -> None:
        self.site, self.settings = site, settings
        self.kind = site.kind  # a guess from its name until it is called
        self.num_kv_heads: int | None = None
        self.reached = False
        self.most_calls = 0  # in any pass
        self.ids_reason = ""  # why token ids are missing
        self.facts = TextFacts()
        # Whether an elementwise gate or norm lies between the heads and W_O. Where calls suggest
        # it,
        # it has to be proved at the end of the pass.
        self.elementwise = has_elementwise_gate(site.module)
        self.elementwise_proved = self.elementwise
        self.table = Table(self.heads())
        # of documents that haven't ended: x, y, rows [3, documents, H] by column
        self._open: dict[str, Tensor] = {}
        self.like: Tensor | None = None  # of the device and dtype of what enters W_O
        self.is_random = False  # whether W_O has dropout that is active
        self.error = 0.0  # of W_O as a matrix, relative to its largest output
        self.note = ""  # how W_O differs from a matrix
        self._weights: OutWeights | None = None
        self._with_hooks = False  # whether hooks of others belong to them
        self._state: list[Any] = []  # of the module that they were taken from

    def heads(self) -> list[Head]:
        site, heads = self.site, self.site.num_heads
        groups = self.num_kv_heads or max(
            1, heads // max(1, getattr(site.module, "num_key_value_groups", 1))
        )
        return [
            Head(site.head_label(h), site.name, site.layer, h, h * groups // heads, self.kind)
            for h in range(heads)
        ]

    @property
    def described(self) -> str:
        return f"{self.site.name or 'the model itself'} ({type(self.site.module).__name__})"

    # ---- sums

    def add(self, column: str, x: Tensor, y: Tensor, rows: Tensor) -> None:
        """Add numerators, denominators and counts `[B, H]` to the documents of the batch's rows."""
        settings = self.settings
        kind, _, mass = column.rpartition(":")
        name = f"{kind}:{settings.prefix}{mass}" if kind else settings.prefix + column
        new = torch.stack([x, y, rows])
        if settings.document_of is not None:
            new = new.new_zeros(3, settings.documents, x.shape[1]).index_add_(
                1, settings.document_of.to(x.device), new
            )
        self._open[name] = new if name not in self._open else self._open[name] + new

    def close_documents(self) -> None:
        """The documents have ended, so their moments can be added to the table."""
        self.table, self._open = self.so_far(), {}

    def so_far(self) -> Table:
        """The table, as if the open documents ended here."""
        table = Table(
            self.heads(), {column: sums.copy() for column, sums in self.table.sums.items()}
        )
        for column, (x, y, rows) in self._open.items():
            if not bool(torch.stack([x, y]).isfinite().all()):
                raise ReadingError(
                    f"{self.described}: {column} of a text is NaN or infinite, and would empty the"
                    " whole column; look at the model's weights and at that text, or load the"
                    " model in float32"
                )
            table.add(column, 0, x=x.cpu(), y=y.cpu(), rows=rows.cpu())
        return table

    # ---- the output projection

    @property
    def out_weights(self) -> OutWeights:
        """W_O as it is now: an optimizer may step between two passes."""
        state = describe_state(self.site.out)
        if self._weights is None or state != self._state:
            self._read_weights(self._with_hooks)
            self._state = state
        assert self._weights is not None
        return self._weights

    def _read_weights(self, hooks: bool) -> None:
        found = read_projection(self.site.out, self.like, hooks=hooks)
        per_head = found.weight.double()
        per_head = per_head.unflatten(0, (self.site.num_heads, self.site.head_dim))
        self._weights = OutWeights(found.weight, found.bias, norm_factors(per_head))
        self._with_hooks, self.error = hooks, found.error
        if found.error > tolerance(found.weight.dtype):
            self.note = (
                f"{self.site.out_name} isn't quite linear (it may quantise what enters it): the"
                f" updates of its heads add up to its output within {found.error:.1%} of its"
                " largest value"
            )

    def forget_weights(self) -> None:
        self._weights = None

    def require_sum(self, call: SiteCall) -> bool:
        """Raise unless the heads' updates and the bias add up to what W_O returned.

        Where they do only once W_O is read again (an adapter was switched, a hook on it changes
        what it returns, it has dropout), the result is True: what was computed from W_O is stale.
        """
        try:
            _require_sum(self, call)
            return False
        except ReadingError as error:
            found = error
        out = self.site.out
        for hooks in (False, True) if has_hooks(out) else (False,):
            for self.is_random in (False, True) if out.training else (False,):
                try:
                    self._read_weights(hooks)
                    _require_sum(self, call)
                except (ReadingError, RuntimeError):
                    continue
                if self.is_random:
                    self.note = (
                        f"{self.site.out_name} has dropout: the updates of its heads are those"
                        " without it"
                    )
                return True
        self.is_random, self._weights, self._with_hooks = False, None, False
        raise found

    # ---- one call

    def accumulate(self, call: SiteCall, statistics: Sequence[Statistic]) -> None:
        """Add the statistics of one call."""
        out, rows, context = call.out, call.rows, call.context
        batch, heads, length, _ = out.shape
        gate = self._measure_gate(call)
        counts = (context.query_valid[:, None] & (rows.allowed > 0)).expand(batch, heads, length)
        # heads whose own values reach W_O
        own = torch.ones(heads, 1, dtype=torch.bool, device=out.device)
        own[replaced_heads(self.site)] = False

        def mean(column: str, values: Tensor, exists: Tensor) -> None:
            chosen = counts & exists
            number = chosen.sum(-1).double()
            self.add(column, _sum(values, chosen), number, number)

        def pooled(column: str, part: Tensor, whole: Tensor, exists: Tensor) -> None:
            chosen = counts & own & exists
            self.add(column, _sum(part, chosen), _sum(whole, chosen), chosen.sum(-1).double())

        factor = 1.0 if gate is None else gate.abs()
        contributions, uniform = rows.contribution * factor, rows.even * factor
        for name, mass in rows.masses.items():
            mean(name, mass.weight, mass.exists)
            if not self.elementwise:
                part, even = mass.contribution * factor, mass.even * factor
                pooled(f"contribution:{name}", part, contributions, mass.exists)
                pooled(f"even:{name}", even, uniform, mass.exists)
        for name, (values, exists) in rows.means.items():
            _require_finite(name, values, counts)
            mean(name, values, exists)
        statistics = [s for s in statistics if s.implements("update")]
        if not statistics:
            return
        updates = self._head_updates(call, contributions, uniform, counts, own)
        for statistic in statistics:
            result = statistic.update(self.site, updates)
            if isinstance(result, Totals):
                self.add(statistic.name, *result)
            elif isinstance(result, Defined):
                mean(statistic.name, *result)
            elif result is not None:
                _require_values(statistic, result, (batch, heads, length))
                _require_finite(statistic.name, result, counts)
                mean(statistic.name, result, ~result.isnan())

    def _head_updates(
        self, call: SiteCall, contributions: Tensor, uniform: Tensor, counts: Tensor, own: Tensor
    ) -> HeadUpdates:
        work = torch.promote_types(call.out.dtype, torch.float32)
        weight, bias, factors = self.out_weights
        entered = call.entered.to(work)
        y = call.y.reshape(*call.context.query_valid.shape, -1)
        exact = not self.is_random and self.error <= tolerance(torch.float32)
        if exact and y.dtype in (torch.float32, torch.float64):
            update = y - bias
        else:
            update = entered.transpose(1, 2).flatten(2) @ weight.to(work)
        return HeadUpdates(
            entered,
            weight.to(work),
            update.to(work),
            factors.to(work),
            contributions,
            uniform,
            call.rows.received,
            call.rows.readers,
            counts,
            own,
            call.context,
            self.elementwise,
        )

    def scale_contributions(self, call: SiteCall, capture: Capture) -> None:
        """Scale the contributions of a map by a gate between the heads and W_O, or drop them where
        they aren't defined.
        """
        gate = self._measure_gate(call)
        if self.elementwise or not set(capture.heads).isdisjoint(replaced_heads(self.site)):
            capture.contributions = []
        elif gate is not None:
            factor = gate.abs()[:, capture.heads][:, :, capture.numbers, None]
            capture.contributions = [torch.cat(capture.contributions, 2) * factor]

    def _measure_gate(self, call: SiteCall) -> Tensor | None:
        """The gate `[B, H, L]` between the heads and W_O, if there is one.

        Sets `elementwise` where no number for each head and query explains the difference.
        """
        entered = call.entered
        if torch.equal(call.out, entered) or self.elementwise:
            return None
        a, b = call.out.double(), entered.double()
        b[:, replaced_heads(self.site)] = 0
        square = a.square().sum(-1)
        gate = (a * b).sum(-1) / torch.where(square > 0, square, 1)
        counts = call.context.query_valid[:, None] & (call.rows.allowed > 0)
        off = torch.where(counts, (a * gate[..., None] - b).norm(dim=-1), 0).amax()
        if off > tolerance(call.out.dtype) * torch.where(counts, b.norm(dim=-1), 0).amax():
            self.elementwise = True
            return None
        return gate.to(call.out.dtype)


def _sum(values: Tensor, chosen: Tensor) -> Tensor:
    return torch.where(chosen, values, 0).double().sum(-1)


def _require_values(statistic: Statistic, values: object, shape: tuple[int, ...]) -> None:
    if not isinstance(values, Tensor) or values.shape != shape:
        got = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise MultiheadError(
            f"statistic {statistic.name!r}: its update() returned {got}, expected a tensor"
            f" {list(shape)} [B, H, L]"
        )


def _require_finite(name: str, values: Tensor, counts: Tensor) -> None:
    if bool((values.isinf() & counts).any()):
        raise MultiheadError(
            f"statistic {name!r}: it is infinite for some query; return NaN where it doesn't exist"
        )


def _require_sum(record: SiteRecord, call: SiteCall) -> None:
    """Compare the sum of the heads' updates and the bias with what W_O returned, on some rows; of a
    projection with dropout, with what it returns without.
    """
    weight, bias, _ = record.out_weights
    real = call.context.query_valid
    x, y = call.x.reshape(*real.shape, -1), call.y.reshape(*real.shape, -1)
    chosen = rows_to_compare(real, *real.shape).to(x.device)
    entered, left = x.flatten(0, 1)[chosen], y.flatten(0, 1)[chosen]
    if record.is_random and record.site.out.training and len(chosen):
        left = apply_quietly(record.site.out, entered[None])[0]
    expected = entered.to(weight.dtype) @ weight + bias
    inexact = tolerance(torch.float32) < record.error <= INEXACT
    if inexact:  # compared without the bias, which may be much larger
        left, expected = left - bias, expected - bias
    require_equal(
        left,
        expected.to(left.dtype),
        record.described,
        f": the updates of its heads and the bias don't add up to what {record.site.out_name}"
        " returned",
        INEXACT if inexact else 0.0,
    )
