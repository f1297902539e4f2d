"""What the rows of one attention call did, taken on the way past: from blocks of rows in torch, or
by the CPU kernels.

Both give the same numbers (tests/reader/test_row_stats.py). What wants to see weights (maps,
statistics of a user's own, what watches a pass) is shown a block of rows at a time: in torch the
blocks that are there, by the kernels in a second pass over the rows that are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import MultiheadError
from ..ops.backends import cpu
from ..ops.backends.blocks import Block, blocks, mix, rows_per_block
from ..ops.call import AttentionCall
from ..ops.masks import allowed
from .statistics import Added


@dataclass
class Text:
    """What is known of the positions of one attention call. Query row i is key number `offset +
    i`.
    """

    real: Tensor  # bool [B, L]: query rows that are text
    key_real: Tensor  # bool [B, S]
    # [B]: the first key that is text (a left-padded text begins later); below 0 once a cache
    # dropped it
    first: Tensor
    ids: Tensor | None  # [B, L] token ids of the rows
    key_ids: Tensor | None  # [B, S]
    before_ids: Tensor | None  # [B, S]: id of the token before each key, -1 where there is none
    special: Tensor | None  # bool [B, S]: keys that are special tokens
    offset: int | None  # None: rows and keys are of two sequences (cross-attention)
    reason: str = ""  # why ids are missing
    continues: bool = False  # the rows go on with the texts of the last pass, from its cache
    found: dict[tuple[object, ...], Tensor] = field(
        default_factory=dict
    )  # keys by token, sorted once a pass


class Weights(NamedTuple):
    """A block of query rows as statistics of a user's own, and what watches a pass, see it."""

    weights: Tensor  # [B, H, rows, keys]: A_ij
    rows: slice
    keys: slice
    allowed: (
        Tensor | None
    )  # bool [B or 1, 1 or H, rows, keys]; None where every row may read all these keys
    text: Text


Watch = Callable[[Weights], None]  # is handed each block of rows, in order


@dataclass
class Sample:
    """A watch of a few rows alone: the kernels needn't show it any others."""

    document: Tensor  # [N]
    row: Tensor  # [N]
    into: Tensor  # [N, H, S]: zeros, which become the rows' weights

    def __call__(self, seen: Weights) -> None:
        here = ((self.row >= seen.rows.start) & (self.row < seen.rows.stop)).nonzero()[:, 0]
        self.into[here, :, seen.keys] = seen.weights[
            self.document[here], :, self.row[here] - seen.rows.start
        ]


@dataclass
class Capture:
    """Exact maps of some heads, filled on the way past."""

    heads: list[int]
    rows: list[int] | None  # query rows, None for all
    keys: int | None  # the first so many keys, None for all
    weights: list[Tensor] = field(default_factory=list)  # [B, heads, rows, keys], in order of rows
    contributions: list[Tensor] = field(default_factory=list)
    numbers: list[int] | None = None  # of the rows
    ids: Tensor | None = None  # [L]
    key_ids: Tensor | None = None  # [S]


@dataclass
class Mass:
    """A mass on a class of keys, by row. Divided by rows or pooled only when the rows are known."""

    exists: Tensor  # bool [B, 1 or H, L]: the row may read such a key
    weight: Tensor  # [B, H, L]
    contribution: Tensor
    even: Tensor  # what the contribution would be if the row read its allowed keys evenly


class Asked(NamedTuple):
    """What is wanted of a call's rows. q, k and v are float32 or better."""

    call: AttentionCall
    text: Text
    # [B, H, S, C]: numbers of keys, to be summed with the weights; the first are the keys' norms
    columns: Tensor
    # [B, P, L]: key numbers whose weights are wanted by themselves; none for numbers that aren't
    # keys
    places: Tensor
    pairs: list[str]  # "duplicate", "induction"
    causal: bool
    capture: Capture | None
    watches: Sequence[Watch]
    own: list[Added]  # a user's statistics of whole rows
    mixing: bool  # whether the output is wanted


class Passed(NamedTuple):
    """What was taken from them; weights, not powers."""

    out: Tensor  # [B, H, L, Ev], empty where it wasn't wanted
    # [B, H, L]: of the whole row: 1, or less beside a sink, or 0 where nothing may be read
    weight: Tensor
    entropy: Tensor
    largest: Tensor
    distance: Tensor | None
    sums: Tensor  # [C, B, H, L]
    picked: Tensor  # [P, B, H, L]
    pairs: dict[str, Mass]  # `even` as a sum, not yet divided by the keys allowed
    own: list[Tensor]  # [B, H, L]
    received: Tensor  # [B, H, S]


def passed(asked: Asked) -> Passed:
    """By the kernels where they can and it is worth it, else by blocks."""
    call = asked.call
    if cpu.refuses(call.q, 0.0, False) or cpu.unsuited(call.q, call.k, call.v):
        return by_blocks(asked)
    return by_kernels(asked)


def by_kernels(asked: Asked) -> Passed:
    """In one pass, and a second for what wants to see weights."""
    from ..ops.backends.kernels.stats import DISTANCE, ENTROPY, LARGEST, PAIRED, SINGLE, WEIGHT

    call, text = asked.call, asked.text
    ids = None
    if asked.pairs:
        assert text.ids is not None and text.key_ids is not None and text.before_ids is not None
        ids = (text.ids, text.key_ids, text.before_ids)
    out, _, stats, received = cpu.observe(
        call, asked.columns, asked.places, text.offset or 0, ids, text.real
    )
    places = asked.places.shape[1]
    picked, paired, sums = stats[SINGLE:].split(
        [places, 2 * PAIRED, len(stats) - SINGLE - places - 2 * PAIRED]
    )
    pairs = {}
    for name, (weight, contribution, norms, number) in zip(
        ("duplicate", "induction"), paired.split(PAIRED), strict=True
    ):
        if name in asked.pairs:
            pairs[name] = Mass(number > 0, weight, contribution, norms)
    return Passed(
        out,
        stats[WEIGHT],
        stats[ENTROPY],
        stats[LARGEST],
        None if text.offset is None else stats[DISTANCE],
        sums,
        picked,
        pairs,
        _shown(asked),
        received,
    )


def _shown(asked: Asked) -> list[Tensor]:
    """Shows weights to what wants to see them: the rows that it names or, a block at a time, all;
    gives a user's statistics.
    """
    call = asked.call
    own: list[list[Tensor]] = [[] for _ in asked.own]
    (batch, heads, length), keys = call.q.shape[:3], call.k.shape[2]
    step = rows_per_block(batch * heads, keys)
    if asked.capture is not None:
        capture = asked.capture
        _begin(capture, asked.text, length)
        chosen = torch.tensor(capture.heads)
        of_heads = call.slice(head=chosen)
        for rows in torch.tensor(capture.numbers).split(max(step, step * heads // len(chosen))):
            _captured(capture, cpu.weights(of_heads.slice(query=rows)), asked.columns[..., 0])
    for sample in asked.watches:
        if isinstance(sample, Sample):
            for b in sample.document.unique().tolist():
                here = (sample.document == b).nonzero()[:, 0]
                rows = call.slice(batch=slice(b, b + 1), query=sample.row[here])
                sample.into[here] = cpu.weights(rows)[0].transpose(0, 1)
    watches = [watch for watch in asked.watches if not isinstance(watch, Sample)]
    for seen in _blocks(call, asked.text, step) if watches or own else ():
        for watch in watches:
            watch(seen)
        for a, found in zip(asked.own, own, strict=True):
            found.append(_of_row(a, seen))
    return [torch.cat(found, 2) for found in own]


def _blocks(call: AttentionCall, text: Text, step: int) -> Iterator[Weights]:
    """All rows, a block at a time, against the keys that any of them may read."""
    length, keys = call.q.shape[2], call.k.shape[2]
    for i in range(0, length, step):
        rows, columns, may = slice(i, min(i + step, length)), slice(0, keys), None
        here = call.slice(query=rows)
        if here.start is not None and here.stop is not None:
            some = here.stop > here.start
            if bool(some.any()):
                columns = slice(int(here.start[some].min()), int(here.stop[some].max()))
            first, number = columns.start, torch.arange(columns.start, columns.stop)
            if int(here.start.max()) > first or int(here.stop.min()) < columns.stop:
                may = allowed(here.start, here.stop, number)[:, None]
            here = here.slice(key=columns)
        elif here.mask is not None:
            may = here.mask
        yield Weights(cpu.weights(here), rows, columns, may, text)


def by_blocks(asked: Asked) -> Passed:
    """In plain torch, on any device."""
    call, text, columns, causal = asked.call, asked.text, asked.columns, asked.causal
    q, k, v = call.q, call.k, call.v
    batch, heads, length, keys = *q.shape[:3], k.shape[2]
    norms = columns[..., 0]
    pairs = {name: _nothing(norms, length) for name in asked.pairs}
    own: list[list[Tensor]] = [[] for _ in asked.own]
    if asked.capture is not None:
        _begin(asked.capture, text, length)
    out = q.new_empty(batch, heads, length, v.shape[-1]) if asked.mixing else q.new_empty(0)
    # sums of powers, of each row of a block as it passes; divided by the row's total once, at the
    # end
    columns = torch.cat([columns, torch.zeros_like(norms[..., None])], -1)  # the last for distances
    sums = norms.new_empty(columns.shape[-1], batch, heads, length)
    picked = norms.new_empty(asked.places.shape[1], batch, heads, length)
    totals, spread, largest, apart = (norms.new_ones(batch, heads, length) for _ in range(4))
    weight = totals if call.sinks is None else torch.empty_like(totals)
    received = torch.zeros_like(norms)
    for block in blocks(
        q,
        k,
        call.to_mask(),
        bias=call.added(q.dtype),
        scale=call.scale,
        softcap=call.softcap,
        sinks=call.sinks,
        passing=True,
    ):
        here, there, total, powers = block.rows, block.keys, block.total, block.powers
        number = torch.arange(there.start, there.stop, device=q.device)
        totals[..., here] = total
        if asked.mixing:
            out[:, :, here] = mix(block, v)
        # sum_j A_ij (o - j), o the block's first row: from farther away small distances would drown
        if causal:
            columns[:, :, there, -1] = (here.start + (text.offset or 0) - number).to(q.dtype)
            apart[..., here] = torch.arange(here.stop - here.start, device=q.device).to(
                q.dtype
            )  # of the row from o
        sums[..., here] = (powers @ columns[:, :, there]).permute(3, 0, 1, 2)
        if len(picked):
            place = (asked.places[:, :, here] - there.start).clamp_(
                0, powers.shape[-1] - 1
            )  # [B, P, rows]
            picked[..., here] = powers.gather(
                -1, place.transpose(1, 2)[:, None].expand(-1, heads, -1, -1)
            ).permute(3, 0, 1, 2)
        for name, mass in pairs.items():
            _pairs(mass, name, block, text, norms)
        received[:, :, there] += ((text.real[:, None, here] / total)[:, :, None] @ powers)[:, :, 0]
        if text.offset is not None and not causal:
            at = torch.arange(here.start, here.stop, device=q.device) + text.offset
            apart[..., here] = (powers * (at[:, None] - number).abs().to(q.dtype)).sum(-1)
        if asked.capture is not None:
            _capture(asked.capture, block, norms, keys)
        if asked.watches or own:
            seen = Weights(powers / total[..., None], here, there, block.allowed, text)
            for watch in asked.watches:
                watch(seen)
            for a, found in zip(asked.own, own, strict=True):
                found.append(_of_row(a, seen))
        if call.sinks is not None:
            largest[..., here], weight[..., here] = block.shifted.amax(-1).exp(), powers.sum(-1)
        spread[..., here] = block.shifted.mul_(powers).sum(-1)  # last, for it overwrites the scores
    part = 1 / totals  # 0 of a row with nothing allowed, whose total is infinite
    sums *= part
    empty = totals.isinf()
    weight = torch.where(empty, 0, weight * part)
    # -sum A log A = log(total) sum A - sum A (s - top)
    entropy = torch.where(empty, 0, totals.log()) * weight - spread * part
    distance = (
        None if text.offset is None else sums[-1] + apart * weight if causal else apart * part
    )
    pairs = {
        name: Mass(mass.exists, mass.weight * part, mass.contribution * part, mass.even)
        for name, mass in pairs.items()
    }
    return Passed(
        out,
        weight,
        entropy,
        largest * part,
        distance,
        sums[:-1],
        picked * part,
        pairs,
        [torch.cat(found, 2) for found in own],
        received,
    )


def _of_row(a: Added, weights: Weights) -> Tensor:
    assert a.row is not None
    want, dtype = weights.weights.shape[:-1], weights.weights.dtype
    try:
        found = a.row(weights)
    except Exception as error:
        error.add_note(
            f"in row= of the statistic {a.name!r}, for rows {weights.rows.start} to"
            f" {weights.rows.stop - 1}"
        )
        raise
    if not isinstance(found, Tensor) or found.shape != want:
        shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise MultiheadError(
            f"statistic {a.name!r}: its row= gave {shape}, expected a tensor {list(want)} [B, H,"
            " rows]"
        )
    return found.to(dtype)


def _nothing(norms: Tensor, length: int) -> Mass:
    zero = norms.new_zeros(*norms.shape[:2], length)
    return Mass(
        torch.zeros(norms.shape[0], norms.shape[1], length, dtype=torch.bool, device=norms.device),
        zero,
        zero.clone(),
        zero.clone(),
    )


def _pairs(mass: Mass, name: str, block: Block, text: Text, norms: Tensor) -> None:
    """Sums of powers on earlier keys that hold the same token (duplicate), or follow one that does
    (induction).

    Such pairs are few, so they are gathered one by one instead of multiplied through the whole
    block.
    """
    here, there, heads = block.rows, block.keys, norms.shape[1]
    b, i, j = _same(name, here, there, text)
    batch, rows, keys = block.powers.shape[0], here.stop - here.start, there.stop - there.start
    head = torch.arange(heads, device=b.device)
    may = None
    if block.allowed is not None:
        seen = block.allowed[(None,) * (4 - block.allowed.ndim)].expand(batch, -1, rows, keys)
        may = seen[b, :, i, j].expand(-1, heads)
    weight = _flat(
        block.powers, (b[:, None] * heads + head) * (rows * keys) + (i * keys + j)[:, None]
    )
    norm = _flat(norms, (b[:, None] * heads + head) * norms.shape[-1] + (j + there.start)[:, None])
    if may is not None:
        weight, norm = weight * may, norm * may
    where = b * rows + i

    def by_row(values: Tensor) -> Tensor:
        flat = norms.new_zeros(batch * rows, heads).index_add_(0, where, values.to(norms.dtype))
        return flat.view(batch, rows, heads).transpose(1, 2)

    mass.weight[..., here] = by_row(weight)
    mass.contribution[..., here] = by_row(weight * norm)
    mass.even[..., here] = by_row(norm)
    mass.exists[..., here] = by_row(torch.ones_like(weight) if may is None else may) > 0


def _same(name: str, rows: slice, keys: slice, text: Text) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs of a block: text, row and key, counted from the block's first.

    The keys are sorted by (token, place) once a pass, so a row's are a run of them, and nothing of
    rows x keys is looked at.
    """
    sought = text.key_ids if name == "duplicate" else text.before_ids
    assert sought is not None and text.ids is not None and text.offset is not None
    size, known = sought.shape[1], (name, text.offset, sought.shape[1])
    if known not in text.found:
        text.found[known] = (
            (sought.long() * size + torch.arange(size, device=sought.device)).sort(-1).values
        )
    in_order, token = text.found[known], text.ids[:, rows].long() * size
    place = torch.arange(rows.start, rows.stop, device=token.device) + text.offset
    low = torch.searchsorted(in_order, token + keys.start)
    number = (
        torch.searchsorted(in_order, token + place.clamp(keys.start, keys.stop)) - low
    ).flatten()
    where = torch.arange(len(number), device=number.device).repeat_interleave(number)
    first = low.flatten() - (
        number.cumsum(0) - number
    )  # of a row's run, less the pairs ahead of it
    b, i = where // token.shape[1], where % token.shape[1]
    at = torch.arange(len(where), device=number.device) + first[where]
    return b, i, in_order[b, at] - token.flatten()[where] - keys.start


def _flat(values: Tensor, at: Tensor) -> Tensor:
    return values.reshape(-1).index_select(0, at.reshape(-1)).view(at.shape)


def _begin(capture: Capture, text: Text, length: int) -> None:
    capture.numbers = sorted(set(range(length) if capture.rows is None else capture.rows))
    if capture.numbers and not 0 <= capture.numbers[0] <= capture.numbers[-1] < length:
        odd = next(n for n in capture.numbers if not 0 <= n < length)
        raise MultiheadError(
            f"rows: {odd} isn't a row of this text; its rows are 0 to {length - 1}"
        )
    capture.ids = None if text.ids is None else text.ids[0]
    capture.key_ids = None if text.key_ids is None else text.key_ids[0]


def _capture(capture: Capture, block: Block, norms: Tensor, keys: int) -> None:
    assert capture.numbers is not None
    inside = [
        n - block.rows.start for n in capture.numbers if block.rows.start <= n < block.rows.stop
    ]
    if not inside:
        return
    row = (block.powers[:, capture.heads] / block.total[:, capture.heads, :, None])[:, :, inside]
    _captured(
        capture, torch.nn.functional.pad(row, (block.keys.start, keys - block.keys.stop)), norms
    )


def _captured(capture: Capture, row: Tensor, norms: Tensor) -> None:
    """Some of its rows, `[B, heads, rows, S]`."""
    row = row[..., : capture.keys].clone() if capture.keys is not None else row
    capture.weights.append(row)
    capture.contributions.append(row * norms[:, capture.heads, None, : capture.keys])
