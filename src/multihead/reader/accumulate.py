"""What a site's rows come to once its output projection has run: sums for the table, and the check
that they add up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import MultiheadError
from ..models.instrument import replaced_heads
from ..models.introspect import tolerance
from ..models.site import Site, elementwise
from .collect import RowStats
from .context import Text
from .row_stats import Capture
from .statistics.base import Defined, HeadUpdates, Statistic, Totals
from .verify import compare, rows_to_compare

Add = Callable[
    [str, Tensor, Tensor, Tensor], None
]  # column, numerators, denominators, rows: each [B, H]


def count(
    site: Site,
    weights: tuple[Tensor, Tensor, Tensor],
    add: Add,
    out: Tensor,
    rows: RowStats,
    text: Text,
    entered: Tensor,
    left: Tensor,
    statistics: Sequence[Statistic],
) -> None:
    """Add one call's statistics to the table.

    `out` `[B, H, L, Ev]` is what the heads gave, `entered` what reached W_O (the same numbers,
    unless a gate or a norm stands between), `left` `[B, L, D]` what the projection returned.
    """
    batch, heads, length, width = out.shape
    weight, bias, factors = weights
    work = torch.promote_types(out.dtype, torch.float32)
    given = entered.reshape(batch, length, heads, width).transpose(1, 2)
    left = left.reshape(batch, length, -1)
    gate = between(site, out, given, text)

    real = (text.real[:, None] & (rows.allowed > 0)).expand(batch, heads, length)
    own = torch.ones(
        heads, 1, dtype=torch.bool, device=out.device
    )  # heads whose own values reach W_O
    own[replaced_heads(site)] = False

    def mean(column: str, values: Tensor, exists: Tensor | None = None) -> None:
        chosen = real if exists is None else real & exists
        number = chosen.sum(-1).double()
        add(column, torch.where(chosen, values, 0).double().sum(-1), number, number)

    def pooled(column: str, part: Tensor, whole: Tensor, exists: Tensor | None = None) -> None:
        chosen = real & own if exists is None else real & own & exists
        x, y = (torch.where(chosen, values, 0).double().sum(-1) for values in (part, whole))
        add(column, x, y, chosen.sum(-1).double())

    factor = 1.0 if gate is None else gate.abs()
    read, even = rows.contribution * factor, rows.even * factor
    for name, mass in rows.masses.items():
        mean(name, mass.weight, mass.exists)
        if not site.elementwise:
            pooled(f"contribution:{name}", mass.contribution * factor, read, mass.exists)
            pooled(f"even:{name}", mass.even * factor, even, mass.exists)
    for name, (values, exists) in rows.means.items():
        _require_finite(name, values, real)
        mean(name, values, exists)
    statistics = [s for s in statistics if s.implements("update")]
    if not statistics:
        return
    given = given.to(work)
    if left.dtype in (torch.float32, torch.float64):
        update = left - bias
    else:
        update = _merged(given) @ weight.to(work)
    heads_updates = HeadUpdates(
        given,
        weight.to(work),
        update.to(work),
        factors.to(work),
        read,
        even,
        rows.received,
        rows.readers,
        real,
        own,
        text,
        site.elementwise,
    )
    for statistic in statistics:
        result = statistic.update(site, heads_updates)
        if isinstance(result, Totals):
            add(statistic.name, *result)
        elif isinstance(result, Defined):
            mean(statistic.name, *result)
        elif result is not None:
            _require_values(statistic, result, (batch, heads, length))
            _require_finite(statistic.name, result, real)
            mean(statistic.name, result, ~result.isnan())


def _require_values(statistic: Statistic, values: object, shape: tuple[int, ...]) -> None:
    if not isinstance(values, Tensor) or values.shape != shape:
        got = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise MultiheadError(
            f"statistic {statistic.name!r}: its update() returned {got}, expected a tensor"
            f" {list(shape)} [B, H, L]"
        )


def _require_finite(name: str, values: Tensor, real: Tensor) -> None:
    if bool((values.isinf() & real).any()):
        raise MultiheadError(
            f"statistic {name!r}: it is infinite for some query; return NaN where it doesn't exist"
        )


def between(site: Site, out: Tensor, given: Tensor, text: Text) -> Tensor | None:
    """The gate `[B, H, L]` that stands between the heads and W_O: None for none; or nothing that
    one number can say.
    """
    if torch.equal(out, given) or site.elementwise:
        return None
    a, b = out.double(), given.double()
    b[:, replaced_heads(site)] = 0  # nothing to tell of these
    square = a.square().sum(-1)
    gate = (a * b).sum(-1) / torch.where(square > 0, square, 1)
    off = ((a * gate[..., None] - b).norm(dim=-1) * text.real[:, None]).amax()
    if off > tolerance(out.dtype) * b.norm(dim=-1).amax():
        elementwise.add(
            site.module
        )  # perhaps; once the pass is over, the reading puts it to the proof (Check.zeros_stay)
        return None
    return gate.to(out.dtype)


def fix_contributions(
    capture: Capture, site: Site, out: Tensor, text: Text, entered: Tensor
) -> None:
    """A gate between the heads and W_O scales what a map says of contributions, or leaves nothing
    to say.
    """
    batch, heads, length, width = out.shape
    given = entered.reshape(batch, length, heads, width).transpose(1, 2)
    gate = between(site, out, given, text)
    if site.elementwise or not set(capture.heads).isdisjoint(replaced_heads(site)):
        capture.contributions = []
    elif gate is not None:
        factor = gate.abs()[:, capture.heads][:, :, capture.numbers, None]
        capture.contributions = [torch.cat(capture.contributions, 2) * factor]


def _merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def adds_up(
    site: Site, weights: tuple[Tensor, Tensor, Tensor], entered: Tensor, left: Tensor, text: Text
) -> None:
    """The sum of the heads' updates and the output bias is what the projection returned, on some
    rows.
    """
    weight, bias, _ = weights
    batch, length = text.real.shape
    entered, left = entered.reshape(batch, length, -1), left.reshape(batch, length, -1)
    chosen = rows_to_compare(text.real, entered.shape[0], entered.shape[1]).to(entered.device)
    flat = entered.reshape(-1, entered.shape[-1])[chosen]
    expected = flat.to(weight.dtype) @ weight + bias
    compare(
        left.reshape(-1, left.shape[-1])[chosen],
        expected.to(left.dtype),
        f"{site.name} ({type(site.module).__name__})",
        f": the updates of its heads and the bias don't add up to what {site.out_name} returned",
    )
