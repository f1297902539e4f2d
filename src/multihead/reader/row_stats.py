"""Sums over the keys of one attention call, for every query: by the CPU kernels in one pass, or in
plain torch from blocks of queries.

Both give the same numbers (tests/reader/test_row_stats.py). Whatever needs the weights themselves
(maps, user-defined `rows` statistics, watches) receives them a block of queries at a time: in
torch the blocks that are there, after the kernels in a second pass over the queries concerned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import MultiheadError
from ..ops.backends import cpu, jit
from ..ops.backends.blocks import WeightBlock, mix_values, rows_per_block, weight_blocks
from ..ops.call import AttentionCall
from ..ops.masks import bounds_to_dense
from ..ops.modes import has_plain_memory
from .context import QueryBlock, TokenContext, Watch
from .statistics.base import Statistic
from .statistics.masses import Mass


@dataclass
class Sample:
    """A watch of some queries alone: after the kernels only these are computed once more."""

    document: Tensor  # [N]: batch element
    row: Tensor  # [N]: query
    into: Tensor  # [N, H, S]: zeros, which become the weights of these queries

    def __call__(self, block: QueryBlock) -> None:
        here = ((self.row >= block.rows.start) & (self.row < block.rows.stop)).nonzero()[:, 0]
        self.into[here, :, block.keys] = block.weights[
            self.document[here], :, self.row[here] - block.rows.start
        ]


@dataclass
class Capture:
    """Exact weights and contributions of some heads, filled during the pass."""

    heads: list[int]
    # queries, None for all; or a function of this and the number of queries
    rows: list[int] | Callable[[Capture, int], list[int]] | None
    keys: int | None  # number of the first keys that are kept, None for all
    weights: list[Tensor] = field(default_factory=list)  # [B, heads, rows, keys], in order
    contributions: list[Tensor] = field(default_factory=list)
    numbers: list[int] | None = None  # the queries, sorted
    ids: Tensor | None = None  # [L], as given to the model
    key_ids: Tensor | None = None  # [S]
    valid: Tensor | None = None  # bool [L]: no padding
    key_valid: Tensor | None = None  # bool [S]

    def begin(self, context: TokenContext, length: int) -> list[int]:
        """A call of `length` queries begins; returns the queries to keep."""
        self.ids = None if context.given_query_ids is None else context.given_query_ids[0]
        self.key_ids = None if context.given_key_ids is None else context.given_key_ids[0]
        self.valid, self.key_valid = context.query_valid[0], context.key_valid[0]
        rows = self.rows(self, length) if callable(self.rows) else self.rows
        self.numbers = sorted(set(range(length) if rows is None else rows))
        outside = [n for n in self.numbers if not 0 <= n < length]
        if outside:
            raise MultiheadError(
                f"rows: {outside[0]} isn't a query of this text; its queries are 0 to {length - 1}"
            )
        return self.numbers

    def clear(self) -> None:
        """Forget what was added."""
        self.weights, self.contributions = [], []

    def add(self, weights: Tensor, norms: Tensor) -> None:
        """Add the next queries, `[B, heads, rows, S]`; `norms` `[B, H, S]` belong to the keys."""
        weights = weights[..., : self.keys].clone()
        self.weights.append(weights)
        self.contributions.append(weights * norms[:, self.heads, None, : self.keys])

    def add_block(self, block: WeightBlock, norms: Tensor) -> None:
        """Add those of its queries that are in a block."""
        first, stop = block.rows.start, block.rows.stop
        inside = [n - first for n in self.numbers or () if first <= n < stop]
        if inside:
            weights = block.powers[:, self.heads] / block.total[:, self.heads, :, None]
            outside = block.keys.start, norms.shape[-1] - block.keys.stop
            self.add(torch.nn.functional.pad(weights[:, :, inside], outside), norms)


class RowMass(NamedTuple):
    """A mass of each query, `[B, H, L]`, before it is averaged or pooled."""

    exists: Tensor  # bool [B, 1 or H, L]: the query may read such a key
    weight: Tensor
    contribution: Tensor
    even: Tensor  # the contribution for uniform weights on the allowed keys


class RowStatsRequest(NamedTuple):
    """The sums that are wanted of a call whose q, k and v are float32 or better."""

    call: AttentionCall
    context: TokenContext
    columns: Tensor  # [B, H, S, C]: values of keys to be averaged; the first are the keys' norms
    # [B, P, L]: keys whose single weight is wanted; any number for those that are no keys
    places: Tensor
    matching: list[Mass]  # masses on the earlier keys whose id is that of the query's token
    causal: bool
    capture: Capture | None
    watches: Sequence[Watch]
    statistics: list[Statistic]  # with `rows`
    mixing: bool  # whether the output is wanted


class RowSums(NamedTuple):
    """Sums of weights, `[B, H, L]` unless another shape is given."""

    out: Tensor  # [B, H, L, Ev], empty where it wasn't wanted
    weight: Tensor  # 1; less with a sink; 0 where no key may be read
    entropy: Tensor
    largest: Tensor
    distance: Tensor | None
    sums: Tensor  # [C, B, H, L]
    picked: Tensor  # [P, B, H, L]
    matching: dict[str, RowMass]  # `even` is a sum, not yet divided by the number of keys
    statistics: list[Tensor]
    received: Tensor  # [B, H, S]


def sum_rows(request: RowStatsRequest) -> RowSums:
    """By the kernels where they support the call and pay off, else by blocks."""
    call = request.call
    if (
        cpu.unsupported_reason(call)
        or cpu.slow_reason(call)
        or any(s.name not in FUSED_MATCHING for s in request.matching)
        or not has_plain_memory(*call.tensors(), request.columns, request.places)
    ):
        return sum_by_blocks(request)
    try:
        return sum_by_kernels(request)
    except jit.KernelsUnavailable:
        jit.report_missing()
        return sum_by_blocks(request)


FUSED_MATCHING = ("duplicate", "induction")  # in the kernel's order


def sum_by_kernels(request: RowStatsRequest) -> RowSums:
    """One pass, and a second one for whatever needs the weights themselves."""
    jit.require_numba()
    from ..ops.backends.kernels.stats import DISTANCE, ENTROPY, LARGEST, PAIRED, SINGLE, WEIGHT

    call, context = request.call, request.context
    ids = None
    if request.matching:
        assert (
            context.query_ids is not None
            and context.key_ids is not None
            and context.previous_ids is not None
        )
        ids = (context.query_ids, context.key_ids, context.previous_ids)
    out, _, stats, received = cpu.attend_with_statistics(
        call, request.columns, request.places, context.offset or 0, ids, context.query_valid
    )
    places = request.places.shape[1]
    picked, paired, sums = stats[SINGLE:].split(
        [places, 2 * PAIRED, len(stats) - SINGLE - places - 2 * PAIRED]
    )
    wanted = {s.name for s in request.matching}
    matching = {}
    for name, (weight, contribution, norms, number) in zip(
        FUSED_MATCHING, paired.split(PAIRED), strict=True
    ):
        if name in wanted:
            matching[name] = RowMass(number > 0, weight, contribution, norms)
    return RowSums(
        out,
        stats[WEIGHT],
        stats[ENTROPY],
        stats[LARGEST],
        None if context.offset is None else stats[DISTANCE],
        sums,
        picked,
        matching,
        _show_weights(request),
        received,
    )


def _show_weights(request: RowStatsRequest) -> list[Tensor]:
    """Compute weights once more for the capture, the samples and the watches, and return the
    values of the `rows` statistics.
    """
    call = request.call
    values: list[list[Tensor]] = [[] for _ in request.statistics]
    (batch, heads, length), keys = call.q.shape[:3], call.k.shape[2]
    step = rows_per_block(batch * heads, keys)
    if request.capture is not None:
        capture = request.capture
        queries = torch.tensor(
            capture.begin(request.context, length), dtype=torch.int64, device="cpu"
        )
        of_heads = call.slice(head=torch.tensor(capture.heads, device="cpu"))
        for rows in queries.split(max(step, step * heads // len(capture.heads))):
            capture.add(cpu.attend_for_weights(of_heads.slice(query=rows)), request.columns[..., 0])
    for sample in request.watches:
        if isinstance(sample, Sample):
            for b in sample.document.unique().tolist():
                here = (sample.document == b).nonzero()[:, 0]
                rows = call.slice(batch=slice(b, b + 1), query=sample.row[here])
                sample.into[here] = cpu.attend_for_weights(rows)[0].transpose(0, 1)
    watches = [watch for watch in request.watches if not isinstance(watch, Sample)]
    for block in _blocks(call, request.context, step) if watches or values else ():
        for watch in watches:
            watch(block)
        for statistic, parts in zip(request.statistics, values, strict=True):
            parts.append(_rows(statistic, block))
    return [torch.cat(parts, 2) for parts in values]


def _blocks(call: AttentionCall, context: TokenContext, step: int) -> Iterator[QueryBlock]:
    """All queries, `step` at a time, against the keys that any of them may read."""
    length, keys = call.q.shape[2], call.k.shape[2]
    for i in range(0, length, step):
        rows, columns, may_read = slice(i, min(i + step, length)), slice(0, keys), None
        part = call.slice(query=rows)
        if part.start is not None and part.stop is not None:
            some = part.stop > part.start
            if bool(some.any()):
                columns = slice(int(part.start[some].min()), int(part.stop[some].max()))
            if int(part.start.max()) > columns.start or int(part.stop.min()) < columns.stop:
                key = torch.arange(columns.start, columns.stop, device="cpu")
                may_read = bounds_to_dense(part.start, part.stop, key)[:, None]
            part = part.slice(key=columns)
        elif part.mask is not None:
            may_read = part.mask
        yield QueryBlock(cpu.attend_for_weights(part), rows, columns, may_read, context)


def sum_by_blocks(request: RowStatsRequest) -> RowSums:
    """In plain torch, on any device.

    Each block gives powers exp(s - top), of which sums are taken; they are divided by the query's
    total once, at the end.
    """
    call, context, causal = request.call, request.context, request.causal
    q, v = call.q, call.v
    batch, heads, length = q.shape[:3]
    norms = request.columns[..., 0]
    # one more column, for distances
    columns = torch.cat([request.columns, torch.zeros_like(norms[..., None])], -1)
    matching = {s: _empty_mass(norms, length) for s in request.matching}
    values: list[list[Tensor]] = [[] for _ in request.statistics]
    if request.capture is not None:
        request.capture.begin(context, length)
    out = q.new_empty(batch, heads, length, v.shape[-1]) if request.mixing else q.new_empty(0)
    sums = norms.new_empty(columns.shape[-1], batch, heads, length)
    picked = norms.new_empty(request.places.shape[1], batch, heads, length)
    totals, spread, largest, apart = (norms.new_ones(batch, heads, length) for _ in range(4))
    weight = totals if call.sinks is None else torch.empty_like(totals)
    received = torch.zeros_like(norms)
    for block in weight_blocks(call, passing=True):
        rows, keys, total, powers = block.rows, block.keys, block.total, block.powers
        key = torch.arange(keys.start, keys.stop, device=q.device)
        query = torch.arange(rows.start, rows.stop, device=q.device) + (context.offset or 0)
        totals[..., rows] = total
        if request.mixing:
            out[:, :, rows] = mix_values(block, v)
        if causal:
            # i - j as (i - o) + (o - j), o the block's first query: summed from farther away, small
            # distances would be lost in rounding
            columns[:, :, keys, -1] = (query[0] - key).to(q.dtype)
            apart[..., rows] = (query - query[0]).to(q.dtype)
        elif context.offset is not None:
            apart[..., rows] = (powers * (query[:, None] - key).abs().to(q.dtype)).sum(-1)
        sums[..., rows] = (powers @ columns[:, :, keys]).permute(3, 0, 1, 2)
        if len(picked):
            place = request.places[:, :, rows] - keys.start  # [B, P, rows]
            place = place.clamp_(0, powers.shape[-1] - 1).transpose(1, 2)[:, None]
            picked[..., rows] = powers.gather(-1, place.expand(-1, heads, -1, -1)).permute(
                3, 0, 1, 2
            )
        for s, mass in matching.items():
            _sum_matching(mass, s, block, context, norms)
        counted = (context.query_valid[:, None, rows] / total)[:, :, None]
        received[:, :, keys] += (counted @ powers)[:, :, 0]
        if request.capture is not None:
            request.capture.add_block(block, norms)
        if request.watches or values:
            weights = QueryBlock(powers / total[..., None], rows, keys, block.allowed, context)
            for watch in request.watches:
                watch(weights)
            for statistic, parts in zip(request.statistics, values, strict=True):
                parts.append(_rows(statistic, weights))
        if call.sinks is not None:
            largest[..., rows], weight[..., rows] = block.shifted.amax(-1).exp(), powers.sum(-1)
        spread[..., rows] = block.shifted.mul_(powers).sum(-1)  # last: it overwrites the scores
    part = 1 / totals  # 0 where nothing may be read: the total is infinite
    sums *= part
    empty = totals.isinf()
    weight = torch.where(empty, 0, weight * part)
    # -sum A log A = log(total) sum A - sum A (s - top)
    entropy = torch.where(empty, 0, totals.log()) * weight - spread * part
    distance = None
    if context.offset is not None:
        distance = sums[-1] + apart * weight if causal else apart * part
    masses = {
        s.name: RowMass(mass.exists, mass.weight * part, mass.contribution * part, mass.even)
        for s, mass in matching.items()
    }
    return RowSums(
        out,
        weight,
        entropy,
        largest * part,
        distance,
        sums[:-1],
        picked * part,
        masses,
        [torch.cat(parts, 2) for parts in values],
        received,
    )


def _rows(statistic: Statistic, block: QueryBlock) -> Tensor:
    shape, dtype = block.weights.shape[:-1], block.weights.dtype
    try:
        values = statistic.rows(block)
    except Exception as error:
        error.add_note(
            f"in rows() of the statistic {statistic.name!r}, for queries {block.rows.start} to"
            f" {block.rows.stop - 1}"
        )
        raise
    if not isinstance(values, Tensor) or values.shape != shape:
        got = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise MultiheadError(
            f"statistic {statistic.name!r}: its rows() returned {got}, expected a tensor"
            f" {list(shape)} [B, H, rows]"
        )
    return values.to(dtype)


def _empty_mass(norms: Tensor, length: int) -> RowMass:
    zero = norms.new_zeros(*norms.shape[:2], length)
    return RowMass(
        torch.zeros(norms.shape[0], norms.shape[1], length, dtype=torch.bool, device=norms.device),
        zero,
        zero.clone(),
        zero.clone(),
    )


def _sum_matching(
    mass: RowMass, statistic: Mass, block: WeightBlock, context: TokenContext, norms: Tensor
) -> None:
    """Add the powers of earlier keys whose id is that of the query's token.

    There are few such pairs, so they are gathered one by one, not multiplied through the block.
    """
    batch, heads, size = block.powers.shape[0], norms.shape[1], norms.shape[-1]
    rows, keys = (part.stop - part.start for part in (block.rows, block.keys))
    b, i, j = _find_matching(statistic, block.rows, block.keys, context)
    of_head = b[:, None] * heads + torch.arange(heads, device=b.device)
    weight = _take_flat(block.powers, of_head * (rows * keys) + (i * keys + j)[:, None])
    norm = _take_flat(norms, of_head * size + (j + block.keys.start)[:, None])
    may_read = torch.ones_like(weight)
    if block.allowed is not None:
        by_query = block.allowed[(None,) * (4 - block.allowed.ndim)].expand(batch, -1, rows, keys)
        may_read = by_query[b, :, i, j].expand(-1, heads).to(weight.dtype)
        weight, norm = weight * may_read, norm * may_read

    def sum_by_query(values: Tensor) -> Tensor:
        flat = norms.new_zeros(batch * rows, heads).index_add_(0, b * rows + i, values)
        return flat.view(batch, rows, heads).transpose(1, 2)

    mass.weight[..., block.rows] = sum_by_query(weight)
    mass.contribution[..., block.rows] = sum_by_query(weight * norm)
    mass.even[..., block.rows] = sum_by_query(norm)
    mass.exists[..., block.rows] = sum_by_query(may_read) > 0


def _find_matching(
    statistic: Mass, rows: slice, keys: slice, context: TokenContext
) -> tuple[Tensor, Tensor, Tensor]:
    """The matching pairs of a block: batch element, query and key, counted from the block's first.

    The keys are sorted by (id, position) once a pass, so those of a query are a run of them, and
    nothing of size rows x keys is compared.
    """
    sought = statistic.matching_ids(context)
    assert sought is not None and context.query_ids is not None and context.offset is not None
    size = sought.shape[1]
    cached = statistic.name, context.offset, size
    if cached not in context.sorted_keys:
        coded = sought.long() * size + torch.arange(size, device=sought.device)
        context.sorted_keys[cached] = coded.sort(-1).values
    in_order, token = (
        context.sorted_keys[cached],
        context.query_ids[:, rows].long() * size,
    )  # [B, S], [B, rows]
    position = torch.arange(rows.start, rows.stop, device=token.device) + context.offset
    low = torch.searchsorted(in_order, token + keys.start)
    high = torch.searchsorted(in_order, token + position.clamp(keys.start, keys.stop))
    count = (high - low).flatten()  # length of each query's run
    where = torch.arange(len(count), device=count.device).repeat_interleave(count)
    first = low.flatten() - (count.cumsum(0) - count)  # of its run, less the pairs before it
    b, i = where // token.shape[1], where % token.shape[1]
    place = torch.arange(len(where), device=count.device) + first[where]
    return b, i, in_order[b, place] - token.flatten()[where] - keys.start


def _take_flat(values: Tensor, index: Tensor) -> Tensor:
    return values.reshape(-1).index_select(0, index.reshape(-1)).view(index.shape)
