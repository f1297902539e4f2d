"""What a site's rows come to once its output projection has run: sums for the table, and the check
that they add up.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import MultiheadError
from ..models.instrument import replaced_heads
from ..models.introspect import tolerance
from ..models.site import Site, elementwise
from .row_masks import Rows
from .row_stats import Capture, Text
from .verify import compare, rows_to_compare

READERS = 64  # rows that may read a key, for `received` to say anything of it
Add = Callable[
    [str, Tensor, Tensor, Tensor], None
]  # column, numerators, denominators, rows: each [B, H]


def count(
    site: Site,
    weights: tuple[Tensor, Tensor, Tensor],
    add: Add,
    out: Tensor,
    rows: Rows,
    text: Text,
    entered: Tensor,
    left: Tensor,
    *,
    probing: bool,
) -> None:
    """Add one call's rows to the table.

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
    for name, values in rows.means.items():
        if bool((values.isinf() & real).any()):
            raise MultiheadError(
                f"statistic {name!r}: it gave an infinite number for a row; give NaN where it"
                " doesn't exist"
            )
        mean(name, values, ~values.isnan())
    if probing:
        return
    _received(add, rows, text)
    mean("entropy", rows.entropy)
    some = rows.allowed.clamp(min=2).to(rows.entropy.dtype)
    mean("entropy_ratio", rows.entropy / some.log(), rows.allowed > 1)
    mean("confidence", rows.confidence)
    if rows.distance is not None:
        mean("distance", rows.distance)
    given = given.to(work)
    norm = (given @ factors.to(work)).norm(dim=-1)
    mean("norm", norm)
    update = (
        left - bias
        if left.dtype in (torch.float32, torch.float64)
        else _merged(given) @ weight.to(work)
    )
    back = (update.to(work) @ weight.to(work).mT).unflatten(-1, (heads, width)).transpose(1, 2)
    square = update.to(work).square().sum(-1)[:, None]
    mean("share", (back * given).sum(-1) / torch.where(square > 0, square, 1), square > 0)
    if not site.elementwise:
        mean("cancellation", norm / torch.where(read > 0, read, 1), (read > 0) & own)
        pooled("reach", read, even)


def _received(add: Add, rows: Rows, text: Text) -> None:
    """The largest part that one key gets of those who may read it, and where that key stands; one
    number a text.
    """
    readers = rows.readers.expand_as(rows.received)
    fit = (readers >= READERS) & text.key_real[:, None]
    part, where = torch.where(fit, rows.received / readers.clamp(min=1), -1.0).max(-1)
    number, some = fit.sum(-1).double(), fit.any(-1).double()
    add("received", part.double() * some, some, number)
    add("received_at", (where - text.first.clamp(min=0)[:, None]).double() * some, some, number)


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
