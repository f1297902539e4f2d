"""One attention call, observed: the output, and for every query row of every head what its weights
did.

Everything is taken from a block of rows on the way past; no probabilities are kept. What comes out
are numbers a row, `[B, H, L]`, and nothing larger.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import MultiheadError
from ..ops.backends.blocks import exact, merged
from ..ops.call import AttentionCall
from ..ops.functional import compute
from .row_stats import Asked, Capture, Mass, Text, Watch, passed
from .statistics import Added

OFFSETS = {"previous": -1, "self": 0, "next": 1}


@dataclass
class Rows:
    """Numbers for each row `[B, H, L]` of one call."""

    allowed: Tensor  # [B, 1 or H, L]: number of keys that the row may read
    entropy: Tensor
    confidence: Tensor
    distance: Tensor | None
    contribution: Tensor  # sum_j c_ij
    even: Tensor  # the same, reading evenly
    masses: dict[str, Mass]
    means: dict[str, Tensor]  # of statistics that a user added; NaN where a row has none
    received: Tensor  # [B, H, S]: sum of the weights that each key gets from real rows
    readers: Tensor  # [B, 1 or H, S]: how many real rows may read it
    causal: bool  # no row may read a later key


class _Keys:
    """The mask, asked three ways: how many keys a row may read, sums of key columns over those,
    whether it may read one.
    """

    def __init__(self, call: AttentionCall, columns: Tensor) -> None:
        batch, length, keys = call.q.shape[0], call.q.shape[2], call.k.shape[2]
        self.columns = columns  # [B, H, S, C]
        self.may: Tensor | None = None
        if call.mask is not None and (allowed := call.allowed()) is not None:
            self.may = allowed.expand(-1, -1, length, keys)
            self.count = self.may.sum(-1)
            return
        every = torch.zeros(1, length, dtype=torch.int64, device=call.q.device)
        start, stop = call.bounds() or (every, every + keys)
        self.start, self.stop = start.expand(batch, -1), stop.expand(batch, -1)
        self.count = (self.stop - self.start)[:, None]
        self.sums = torch.nn.functional.pad(columns.double().cumsum(2), (0, 0, 1, 0))

    def total(self) -> Tensor:
        """Sums of the columns over each row's allowed keys: `[C, B, H, L]`."""
        if self.may is not None:
            return (self.may.to(self.columns.dtype) @ self.columns).permute(3, 0, 1, 2).double()
        heads, width = self.columns.shape[1], self.columns.shape[3]
        high, low = (
            x[:, None, :, None].expand(-1, heads, -1, width) for x in (self.stop, self.start)
        )
        return (self.sums.gather(2, high) - self.sums.gather(2, low)).permute(3, 0, 1, 2)

    def reads(self, at: Tensor) -> Tensor:
        """Whether row i may read key at[b, i]: `[B, 1 or H, L]`; False for a number that isn't a
        key.
        """
        if self.may is None:
            return ((at >= self.start) & (at < self.stop))[:, None]
        keys = self.may.shape[-1]
        found = self.may.expand(at.shape[0], -1, -1, -1).gather(
            -1, at.clamp(0, keys - 1)[:, None, :, None].expand(-1, self.may.shape[1], -1, 1)
        )[..., 0]
        return found & ((at >= 0) & (at < keys))[:, None]

    def readers(self, real: Tensor) -> Tensor:
        """How many of the real rows `[B, L]` may read each key: `[B, 1 or H, S]`."""
        if self.may is not None:
            return (self.may & real[:, None, :, None]).sum(2)
        change = torch.zeros(
            real.shape[0], self.columns.shape[2] + 1, dtype=torch.int64, device=real.device
        )
        step = (real & (self.stop > self.start)).long()
        change.scatter_add_(1, self.start, step).scatter_add_(1, self.stop, -step)
        return change.cumsum(1)[:, None, :-1]

    def any(self, which: Tensor) -> Tensor:
        """Whether a row may read at least one of the keys `which` (bool `[B, S]`): `[B, 1 or H,
        L]`.
        """
        if self.may is not None:
            return (self.may & which[:, None, None]).any(-1)
        sums = torch.nn.functional.pad(which.long().cumsum(-1), (1, 0))
        return (sums.gather(1, self.stop) > sums.gather(1, self.start))[:, None]

    def latest(self) -> Tensor:
        """The last key that each row may read, -1 for none: `[B, 1 or H, L]`."""
        if self.may is None:
            return torch.where(self.stop > self.start, self.stop - 1, -1)[:, None]
        number = torch.arange(self.may.shape[-1], device=self.may.device)
        return torch.where(self.may, number, -1).amax(-1)


def observe(
    call: AttentionCall,
    text: Text,
    factors: Tensor,
    wanted: frozenset[str],
    capture: Capture | None = None,
    watches: Sequence[Watch] = (),
    added: Iterable[Added] = (),
) -> tuple[Tensor, Rows]:
    """The call's output `[B, H, L, Ev]`, and what its rows did. `factors` `[H, Ev, r]` give ||v
    W_O^(h)|| = ||v factors_h||.
    """
    q, k, v = (
        merged(x.detach().to(torch.promote_types(x.dtype, torch.float32)))
        for x in (call.q, call.k, call.v)
    )
    # dropout, and a graph that keeps no weights, are the operator's business
    out = compute(call) if call.is_tracked() or call.dropout else None
    with exact(call.q), torch.no_grad():
        mixed, rows = _observe(
            call._replace(q=q, k=k, v=v),
            text,
            factors,
            wanted,
            capture,
            watches,
            added,
            mixing=out is None,
        )
        return (mixed.to(call.q.dtype) if out is None else out), rows


def _observe(
    call: AttentionCall,
    text: Text,
    factors: Tensor,
    wanted: frozenset[str],
    capture: Capture | None,
    watches: Sequence[Watch],
    added: Iterable[Added],
    *,
    mixing: bool,
) -> tuple[Tensor, Rows]:
    q, v = call.q, call.v
    work = q.dtype
    batch, heads, length = q.shape[:3]
    norms = value_norms(v, factors.to(work), heads)
    classes, numbers = _columns(text, wanted, added)
    columns = torch.stack(
        [
            norms,
            *(norms * members[:, None] for members in classes.values()),
            *(x.to(work)[:, None].expand_as(norms) for x in (*classes.values(), *numbers.values())),
        ],
        -1,
    )
    mask = _Keys(call, columns[..., : 1 + len(classes)])
    count = mask.count.clamp(min=1)
    even = mask.total() / count
    at = (
        None
        if text.offset is None
        else torch.arange(length, device=q.device).expand(batch, -1) + text.offset
    )
    causal = at is not None and bool((mask.latest() <= at[:, None]).all())
    single: dict[str, Tensor] = {}  # masses on one key a row: which
    if at is not None:
        single = {name: at + step for name, step in OFFSETS.items() if name in wanted}
    if "first" in wanted:
        single["first"] = text.first[:, None].expand(batch, length)
    places = (
        torch.stack(list(single.values()), 1)
        if single
        else text.real.new_empty(batch, 0, length, dtype=torch.int64)
    )
    told = at is not None and text.ids is not None
    pairs: list[str] = [name for name in ("duplicate", "induction") if name in wanted and told]
    own = [a for a in added if a.row is not None]
    found = passed(Asked(call, text, columns, places, pairs, causal, capture, watches, own, mixing))
    masses = {}
    for name, mass in found.pairs.items():
        masses[name] = Mass(mass.exists, mass.weight, mass.contribution, mass.even / count)
    for n, (name, which) in enumerate(single.items()):
        exists, norm = mask.reads(which), _take(norms, which)
        read = torch.where(exists, found.picked[n], 0)  # c of one key is its weight times its norm
        masses[name] = Mass(exists, read, read * norm, torch.where(exists, norm / count, 0))
    for n, (name, members) in enumerate(classes.items(), 1):
        masses[name] = Mass(mask.any(members), found.sums[n + len(classes)], found.sums[n], even[n])
    means = dict(zip(numbers, found.sums[1 + 2 * len(classes) :], strict=True)) | {
        a.name: mean for a, mean in zip(own, found.own, strict=True)
    }
    return found.out, Rows(
        mask.count,
        found.entropy,
        found.largest,
        found.distance,
        found.sums[0],
        even[0],
        masses,
        means,
        found.received,
        mask.readers(text.real),
        causal,
    )


def _columns(
    text: Text, wanted: frozenset[str], added: Iterable[Added]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Classes of keys (bool `[B, S]`) and numbers of keys, by the name of their statistic."""
    classes = {} if text.special is None or "special" not in wanted else {"special": text.special}
    numbers = {}
    for a in added:
        found = None if a.keys is None else a.keys(text)
        if found is None:
            continue
        if not isinstance(found, Tensor) or found.shape != text.key_real.shape:
            shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise MultiheadError(
                f"statistic {a.name!r}: its keys= gave {shape}, expected a tensor"
                f" {list(text.key_real.shape)} [B, S], booleans for a class of keys or floating"
                " numbers"
            )
        if not bool(found.isfinite().all()):  # 0 * nan is nan: one such key would empty every row
            raise MultiheadError(
                f"statistic {a.name!r}: its keys= gave numbers that aren't finite; give 0 where"
                " there is nothing to average, or None where it doesn't exist at all"
            )
        found = found.to(text.key_real.device)
        if found.dtype == torch.bool:
            classes[a.name] = found
        else:
            numbers[a.name] = found
    return classes, numbers


def value_norms(v: Tensor, factors: Tensor, heads: int) -> Tensor:
    """||v_j W_O^(h)|| for every key and query head: `[B, H, S]` from v `[B, G, S, Ev]` and factors
    `[H, Ev, r]`.
    """
    groups = v.shape[1]
    grouped = factors.unflatten(0, (groups, heads // groups))
    return torch.stack(
        [(v @ grouped[:, n]).norm(dim=-1) for n in range(heads // groups)], 2
    ).flatten(1, 2)


def _take(norms: Tensor, which: Tensor) -> Tensor:
    """norms[b, h, which[b, i]], 0 for numbers that aren't keys."""
    keys = norms.shape[-1]
    inside = ((which >= 0) & (which < keys))[:, None]
    taken = norms.gather(
        -1, which.clamp(0, max(keys - 1, 0))[:, None].expand(-1, norms.shape[1], -1)
    )
    return torch.where(inside, taken, 0)
