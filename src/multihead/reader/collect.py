"""`collect_row_stats`: the output of one attention call and the statistics of its queries.

They are taken from blocks of weights as attention computes them; the weights themselves are not
kept. The results are `[B, H, L]`, a number a query.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import MultiheadError
from ..models.instrument import Compute, is_plain
from ..ops.backends.blocks import autocast_off, merge_batch_heads
from ..ops.call import AttentionCall
from ..ops.functional import compute
from .context import TokenContext, Watch
from .row_stats import Capture, RowMass, RowStatsRequest, RowSums, sum_rows
from .statistics.base import Defined, Statistic
from .statistics.masses import Mass


@dataclass
class RowStats:
    """Statistics of the queries of one call, `[B, H, L]` each."""

    allowed: Tensor  # [B, 1 or H, L]: number of keys that the query may read
    contribution: Tensor  # sum_j c_ij
    even: Tensor  # the same for uniform weights on the allowed keys
    masses: dict[str, RowMass]
    means: dict[str, Defined]
    received: Tensor  # [B, H, S]: the sum of the weights that each key receives
    readers: Tensor  # [B, 1 or H, S]: the number of queries that may read it
    causal: bool  # no query may read a later key
    # computes them again with other factors of W_O, and fills a capture
    again: Callable[[Tensor, Capture | None], RowStats] | None = None


class AllowedKeys:
    """The keys that each query may read: their number, sums of key columns over them, and whether
    one is among them.
    """

    def __init__(self, call: AttentionCall, columns: Tensor) -> None:
        batch, length, keys = call.q.shape[0], call.q.shape[2], call.k.shape[2]
        self.columns = columns  # [B, H, S, C]
        self.mask: Tensor | None = None
        if call.mask is not None and (allowed := call.allowed()) is not None:
            self.mask = allowed.expand(-1, -1, length, keys)
            self.count = self.mask.sum(-1)
            return
        every = torch.zeros(1, length, dtype=torch.int64, device=call.q.device)
        start, stop = call.bounds() or (every, every + keys)
        self.start, self.stop = start.expand(batch, -1), stop.expand(batch, -1)
        self.count = (self.stop - self.start)[:, None]
        self.sums = torch.nn.functional.pad(columns.double().cumsum(2), (0, 0, 1, 0))

    def total(self) -> Tensor:
        """Sums of the columns over the allowed keys of each query: `[C, B, H, L]`."""
        if self.mask is not None:
            return (self.mask.to(self.columns.dtype) @ self.columns).permute(3, 0, 1, 2).double()
        heads, width = self.columns.shape[1], self.columns.shape[3]
        start, stop = (
            x[:, None, :, None].expand(-1, heads, -1, width) for x in (self.start, self.stop)
        )
        return (self.sums.gather(2, stop) - self.sums.gather(2, start)).permute(3, 0, 1, 2)

    def allows(self, key: Tensor) -> Tensor:
        """True where query i may read key[b, i]: `[B, 1 or H, L]`; False where that is no key."""
        if self.mask is None:
            return ((key >= self.start) & (key < self.stop))[:, None]
        keys = self.mask.shape[-1]
        index = key.clamp(0, keys - 1)[:, None, :, None].expand(-1, self.mask.shape[1], -1, 1)
        allowed = self.mask.expand(key.shape[0], -1, -1, -1).gather(-1, index)[..., 0]
        return allowed & ((key >= 0) & (key < keys))[:, None]

    def count_readers(self, valid: Tensor) -> Tensor:
        """The number of valid queries, bool `[B, L]`, that may read each key: `[B, 1 or H, S]`."""
        if self.mask is not None:
            return (self.mask & valid[:, None, :, None]).sum(2)
        change = torch.zeros(
            valid.shape[0], self.columns.shape[2] + 1, dtype=torch.int64, device=valid.device
        )
        step = (valid & (self.stop > self.start)).long()
        change.scatter_add_(1, self.start, step).scatter_add_(1, self.stop, -step)
        return change.cumsum(1)[:, None, :-1]

    def any(self, members: Tensor) -> Tensor:
        """True where a query may read at least one of the keys, bool `[B, S]`: `[B, 1 or H, L]`."""
        if self.mask is not None:
            return (self.mask & members[:, None, None]).any(-1)
        sums = torch.nn.functional.pad(members.long().cumsum(-1), (1, 0))
        return (sums.gather(1, self.stop) > sums.gather(1, self.start))[:, None]

    def latest(self) -> Tensor:
        """The last key that each query may read, -1 for none: `[B, 1 or H, L]`."""
        if self.mask is None:
            return torch.where(self.stop > self.start, self.stop - 1, -1)[:, None]
        key = torch.arange(self.mask.shape[-1], device=self.mask.device)
        return torch.where(self.mask, key, -1).amax(-1)


def collect_row_stats(
    call: AttentionCall,
    context: TokenContext,
    factors: Tensor,
    statistics: Sequence[Statistic] = (),
    capture: Capture | None = None,
    watches: Sequence[Watch] = (),
    compute: Compute = compute,
) -> tuple[Tensor, RowStats]:
    """The call's output `[B, H, L, Ev]` and the statistics of its queries.

    `factors` `[H, Ev, r]` give ||v W_O^(h)|| = ||v factors_h||. Of `statistics` those with
    `key_values` or `rows` and the masses are computed here.
    """
    q, k, v = (
        merge_batch_heads(x.detach().to(torch.promote_types(x.dtype, torch.float32)))
        for x in (call.q, call.k, call.v)
    )
    # with dropout, or a graph, the operator computes the output: no weights are kept for backward;
    # and so it does where other taps are to see the call
    plain = is_plain(compute) and not call.is_tracked() and not call.dropout
    out = None if plain else compute(call)

    def again(factors: Tensor, capture: Capture | None) -> RowStats:
        with autocast_off(call.q), torch.no_grad():
            wide = call._replace(q=q, k=k, v=v)
            return _collect(wide, context, factors, statistics, capture, (), mixing=False)[1]

    with autocast_off(call.q), torch.no_grad():
        mixed, rows = _collect(
            call._replace(q=q, k=k, v=v),
            context,
            factors,
            statistics,
            capture,
            watches,
            mixing=out is None,
        )
        rows.again = again
        return (mixed.to(call.q.dtype) if out is None else out), rows


def _collect(
    call: AttentionCall,
    context: TokenContext,
    factors: Tensor,
    statistics: Sequence[Statistic],
    capture: Capture | None,
    watches: Sequence[Watch],
    *,
    mixing: bool,
) -> tuple[Tensor, RowStats]:
    q, v = call.q, call.v
    batch, heads, length = q.shape[:3]
    norms = value_norms(v, factors.to(q.dtype), heads)
    classes, values = _key_values(context, statistics)
    columns = torch.stack(
        [
            norms,
            *(norms * members[:, None] for members in classes.values()),
            *(
                x.to(q.dtype)[:, None].expand_as(norms)
                for x in (*classes.values(), *values.values())
            ),
        ],
        -1,
    )
    keys = AllowedKeys(call, columns[..., : 1 + len(classes)])
    count = keys.count.clamp(min=1)
    even = keys.total() / count
    positions = None
    if context.offset is not None:
        positions = torch.arange(length, device=q.device).expand(batch, -1) + context.offset
    causal = positions is not None and bool((keys.latest() <= positions[:, None]).all())
    single, matching = _single_keys(context, statistics, positions)
    request = RowStatsRequest(
        call,
        context,
        columns,
        torch.stack([*single.values()], 1)
        if single
        else context.query_valid.new_empty(batch, 0, length, dtype=torch.int64),
        matching,
        causal,
        capture,
        watches,
        [s for s in statistics if s.implements("rows") and s.name not in FUSED],
        mixing,
    )
    sums = sum_rows(request)
    masses = {}
    for name, mass in sums.matching.items():
        masses[name] = mass._replace(even=mass.even / count)
    for n, (name, key) in enumerate(single.items()):
        exists, norm = keys.allows(key), _take(norms, key)
        weight = torch.where(exists, sums.picked[n], 0)  # c of one key is its weight times its norm
        masses[name] = RowMass(exists, weight, weight * norm, torch.where(exists, norm / count, 0))
    for n, (name, members) in enumerate(classes.items(), 1):
        masses[name] = RowMass(
            keys.any(members), sums.sums[n + len(classes)], sums.sums[n], even[n]
        )
    means = dict(zip(values, sums.sums[1 + 2 * len(classes) :], strict=True)) | {
        s.name: mean for s, mean in zip(request.statistics, sums.statistics, strict=True)
    }
    asked = {s.name for s in statistics}
    return sums.out, RowStats(
        keys.count,
        sums.sums[0],
        even[0],
        masses,
        {name: Defined(x, ~x.isnan()) for name, x in means.items()}
        | {name: x for name, x in _fused(sums, keys.count).items() if name in asked},
        sums.received,
        keys.count_readers(context.query_valid),
        causal,
    )


# `rows` statistics that the pass over the weights yields by itself
FUSED = ("entropy", "entropy_ratio", "confidence", "distance")


def _fused(sums: RowSums, allowed: Tensor) -> dict[str, Defined]:
    """The built-in statistics named in `FUSED`, as their `rows` define them."""
    some = allowed > 0
    limit = allowed.clamp(min=2).to(sums.entropy.dtype).log()
    found = {
        "entropy": Defined(sums.entropy, some),
        "entropy_ratio": Defined(sums.entropy / limit, allowed > 1),
        "confidence": Defined(sums.largest, some),
    }
    if sums.distance is not None:
        found["distance"] = Defined(sums.distance, some)
    return found


def _single_keys(
    context: TokenContext, statistics: Sequence[Statistic], positions: Tensor | None
) -> tuple[dict[str, Tensor], list[Mass]]:
    """For masses on one key a query that key, `[B, L]`; and the masses on earlier keys
    with the id of the query's token.
    """
    single: dict[str, Tensor] = {}
    matching: list[Mass] = []
    known = positions is not None and context.query_ids is not None
    # `first` exists in cross-attention too, where queries have no position among the keys
    places = (
        torch.zeros_like(context.query_valid, dtype=torch.int64) if positions is None else positions
    )
    for s in statistics:
        if not isinstance(s, Mass) or (s.needs_one_sequence and positions is None):
            continue
        if (key := s.key_index(context, places)) is not None:
            single[s.name] = key
        elif known and s.matching_ids(context) is not None:
            matching.append(s)
    return single, matching


def _key_values(
    context: TokenContext, statistics: Sequence[Statistic]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Classes of keys (bool `[B, S]`) and values of keys, by the name of their statistic."""
    classes: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for s in statistics:
        x = s.key_values(context) if s.implements("key_values") else None
        if x is None:
            continue
        named = f"statistic {s.name!r}: its key_values() returned"
        if not isinstance(x, Tensor) or x.shape != context.key_valid.shape:
            shape = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise MultiheadError(
                f"{named} {shape}, expected a tensor {list(context.key_valid.shape)} [B, S]:"
                " booleans for a class of keys, or floating-point values"
            )
        if not bool(x.isfinite().all()):  # 0 * nan is nan: one such key would empty every query
            raise MultiheadError(
                f"{named} values that aren't finite; return 0 where there is nothing to average,"
                " or None where the statistic doesn't exist"
            )
        (classes if x.dtype == torch.bool else values)[s.name] = x.to(context.key_valid.device)
    return classes, values


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
