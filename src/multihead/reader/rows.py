"""One attention call, observed: the output, and for every query row of every head what its weights did.

Everything is taken from a block of rows on the way past; no probabilities are kept. What comes out are numbers a row,
`[B, H, L]`, and nothing larger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..models.interface import Call, compute
from ..operator.backends.blocks import Block, blocks, exact, merged, mix
from ..operator.masks import IntervalMask
from .statistics import Added

Watch = Callable[[Block], None]  # is handed each block of rows, ready to be read: powers / total are the weights
OFFSETS = {"previous": -1, "self": 0, "next": 1}


@dataclass
class Text:
    """What is known of the positions of one attention call. Query row i is key number `offset + i`."""

    real: Tensor  # bool [B, L]: query rows that are text
    key_real: Tensor  # bool [B, S]
    first: Tensor  # [B]: the first key that is text (a left-padded text begins later); below 0 once a cache dropped it
    ids: Tensor | None  # [B, L] token ids of the rows
    key_ids: Tensor | None  # [B, S]
    before_ids: Tensor | None  # [B, S]: id of the token before each key, -1 where there is none
    special: Tensor | None  # bool [B, S]: keys that are special tokens
    offset: int | None  # None: rows and keys are of two sequences (cross-attention)
    reason: str = ""  # why ids are missing
    continues: bool = False  # the rows go on with the texts of the last pass, from its cache
    found: dict[tuple[object, ...], Tensor] = field(default_factory=dict)  # keys by token, sorted once a pass


class Weights(NamedTuple):
    """A block of query rows as a user's statistic sees it."""

    weights: Tensor  # [B, H, rows, keys]: A_ij
    rows: slice
    keys: slice
    allowed: Tensor | None  # bool [B or 1, 1 or H, rows, keys]; None where every row may read all these keys
    text: Text


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
    """The mask, asked three ways: how many keys a row may read, sums of key columns over those, whether it may read one."""

    def __init__(self, call: Call, columns: Tensor) -> None:
        batch, length, keys = call.q.shape[0], call.q.shape[2], call.k.shape[2]
        self.columns = columns  # [B, H, S, C]
        self.may: Tensor | None = None
        if isinstance(call.mask, Tensor):
            may = call.mask[(None,) * (4 - call.mask.ndim)]
            self.may = may.expand(-1, -1, length, keys)
            self.count = self.may.sum(-1)
            return
        mask = call.mask if isinstance(call.mask, IntervalMask) else IntervalMask(())
        start, stop = mask.bounds(length, keys, call.q.device)
        self.start, self.stop = start.expand(batch, -1), stop.expand(batch, -1)
        self.count = (self.stop - self.start)[:, None]
        self.sums = torch.nn.functional.pad(columns.double().cumsum(2), (0, 0, 1, 0))

    def total(self) -> Tensor:
        """Sums of the columns over each row's allowed keys: `[C, B, H, L]`."""
        if self.may is not None:
            return (self.may.to(self.columns.dtype) @ self.columns).permute(3, 0, 1, 2).double()
        heads, width = self.columns.shape[1], self.columns.shape[3]
        high, low = (x[:, None, :, None].expand(-1, heads, -1, width) for x in (self.stop, self.start))
        return (self.sums.gather(2, high) - self.sums.gather(2, low)).permute(3, 0, 1, 2)

    def reads(self, at: Tensor) -> Tensor:
        """Whether row i may read key at[b, i]: `[B, 1 or H, L]`; False for a number that isn't a key."""
        if self.may is None:
            return ((at >= self.start) & (at < self.stop))[:, None]
        keys = self.may.shape[-1]
        found = self.may.expand(at.shape[0], -1, -1, -1).gather(
            -1, at.clamp(0, keys - 1)[:, None, :, None].expand(-1, self.may.shape[1], -1, 1))[..., 0]
        return found & ((at >= 0) & (at < keys))[:, None]

    def readers(self, real: Tensor) -> Tensor:
        """How many of the real rows `[B, L]` may read each key: `[B, 1 or H, S]`."""
        if self.may is not None:
            return (self.may & real[:, None, :, None]).sum(2)
        change = torch.zeros(real.shape[0], self.columns.shape[2] + 1, dtype=torch.int64, device=real.device)
        step = (real & (self.stop > self.start)).long()
        change.scatter_add_(1, self.start, step).scatter_add_(1, self.stop, -step)
        return change.cumsum(1)[:, None, :-1]

    def any(self, which: Tensor) -> Tensor:
        """Whether a row may read at least one of the keys `which` (bool `[B, S]`): `[B, 1 or H, L]`."""
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


def observe(call: Call, text: Text, factors: Tensor, wanted: frozenset[str], capture: Capture | None = None,
            watches: Sequence[Watch] = (), added: Iterable[Added] = ()) -> tuple[Tensor, Rows]:
    """The call's output `[B, H, L, Ev]`, and what its rows did. `factors` `[H, Ev, r]` give ||v W_O^(h)|| = ||v factors_h||."""
    q, k, v = (merged(x.detach().to(torch.promote_types(x.dtype, torch.float32))) for x in (call.q, call.k, call.v))
    # dropout, and a graph that keeps no weights, are the operator's business
    inputs = (call.q, call.k, call.v, call.bias, call.sinks)
    tracked = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    out = compute(call) if tracked or call.dropout else None
    with exact(call.q), torch.no_grad():
        mixed, rows = _observe(call._replace(q=q, k=k, v=v), text, factors, wanted, capture, watches, added, mixing=out is None)
        return (mixed.to(call.q.dtype) if out is None else out), rows


def _observe(call: Call, text: Text, factors: Tensor, wanted: frozenset[str], capture: Capture | None, watches: Sequence[Watch],
             added: Iterable[Added], *, mixing: bool) -> tuple[Tensor, Rows]:
    q, k, v = call.q, call.k, call.v
    work = q.dtype
    batch, heads, length, keys = *q.shape[:3], k.shape[2]
    norms = value_norms(v, factors.to(work), heads)
    classes, numbers = _columns(text, wanted, added)
    columns = torch.stack([norms, *(norms * members[:, None] for members in classes.values()),
                           *(x.to(work)[:, None].expand_as(norms) for x in (*classes.values(), *numbers.values())),
                           torch.zeros_like(norms)], -1)
    mask = _Keys(call, columns[..., : 1 + len(classes)])
    count = mask.count.clamp(min=1)
    even = mask.total() / count
    at = None if text.offset is None else torch.arange(length, device=q.device).expand(batch, -1) + text.offset
    causal = at is not None and bool((mask.latest() <= at[:, None]).all())
    single: dict[str, Tensor] = {}  # masses on one key a row: which
    if at is not None:
        single = {name: at + step for name, step in OFFSETS.items() if name in wanted}
    if "first" in wanted:
        single["first"] = text.first[:, None].expand(batch, length)
    places = torch.stack(list(single.values()), -1) if single else None
    told = at is not None and text.ids is not None
    pairs: list[str] = [name for name in ("duplicate", "induction") if name in wanted and told]
    masses = {name: _nothing(norms, length) for name in pairs}
    own: list[tuple[Added, list[Tensor]]] = [(a, []) for a in added if a.row is not None]

    if capture is not None:
        _begin(capture, text, length)
    out = q.new_empty(batch, heads, length, v.shape[-1]) if mixing else q.new_empty(0)
    # sums of powers, of each row of a block as it passes; divided by the row's total once, at the end
    sums = norms.new_empty(columns.shape[-1], batch, heads, length)
    picked = norms.new_empty(batch, heads, length, len(single))
    totals, spread, largest, apart = (norms.new_ones(batch, heads, length) for _ in range(4))
    weight = totals if call.sinks is None else torch.empty_like(totals)
    received = torch.zeros_like(norms)
    for block in blocks(q, k, call.mask, bias=call.bias, scale=call.scale, softcap=call.softcap, sinks=call.sinks,
                        passing=True):
        here, there, total, powers = block.rows, block.keys, block.total, block.powers
        totals[..., here] = total
        if mixing:
            out[:, :, here] = mix(block, v)
        if causal:  # sum_j A_ij (o - j), o the block's first row: from farther away small distances would drown
            columns[:, :, there, -1] = (here.start + (text.offset or 0)
                                        - torch.arange(there.start, there.stop, device=q.device)).to(work)
            apart[..., here] = torch.arange(here.stop - here.start, device=q.device).to(work)  # of the row from o
        sums[..., here] = (powers @ columns[:, :, there]).permute(3, 0, 1, 2)
        if places is not None:
            column = (places[:, None, here] - there.start).clamp_(0, powers.shape[-1] - 1)
            picked[:, :, here] = powers.gather(-1, column.expand(-1, heads, -1, -1))
        for name in pairs:
            _pairs(masses[name], name, block, text, norms)
        received[:, :, there] += ((text.real[:, None, here] / total)[:, :, None] @ powers)[:, :, 0]
        if at is not None and not causal:
            steps = (at[:, here, None] - torch.arange(there.start, there.stop, device=q.device)).abs().to(work)
            apart[..., here] = (powers * steps[:, None]).sum(-1)
        if capture is not None:
            _capture(capture, block, norms, keys)
        for watch in watches:
            watch(block)
        for a, found in own:
            found.append(_of_row(a, Weights(powers / total[..., None], here, there, block.allowed, text), total))
        if call.sinks is not None:
            largest[..., here], weight[..., here] = block.shifted.amax(-1).exp(), powers.sum(-1)
        spread[..., here] = block.shifted.mul_(powers).sum(-1)  # last, for it overwrites the scores
    part = 1 / totals  # 0 of a row with nothing allowed, whose total is infinite
    sums *= part
    empty = totals.isinf()
    weight = torch.where(empty, 0, weight * part)  # of the whole row: 1, or less beside a sink
    # -sum A log A = log(total) sum A - sum A (s - top)
    entropy = torch.where(empty, 0, totals.log()) * weight - spread * part
    distance = None if at is None else sums[-1] + apart * weight if causal else apart * part
    for n, (name, which) in enumerate(single.items()):
        exists, norm = mask.reads(which), _take(norms, which)
        read = torch.where(exists, picked[..., n] * part, 0)  # c of one key is its weight times its norm
        masses[name] = Mass(exists, read, read * norm, torch.where(exists, norm / count, 0))
    for n, (name, members) in enumerate(classes.items(), 1):
        masses[name] = Mass(mask.any(members), sums[n + len(classes)], sums[n], even[n])
    for name in pairs:
        mass = masses[name]
        masses[name] = Mass(mass.exists, mass.weight * part, mass.contribution * part, mass.even / count)
    means = dict(zip(numbers, sums[1 + 2 * len(classes) : -1])) | {a.name: torch.cat(found, 2) for a, found in own}
    return out, Rows(mask.count, entropy, largest * part, distance, sums[0], even[0], masses, means, received,
                     mask.readers(text.real), causal)


def _columns(text: Text, wanted: frozenset[str], added: Iterable[Added]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Classes of keys (bool `[B, S]`) and numbers of keys, by the name of their statistic."""
    classes = {} if text.special is None or "special" not in wanted else {"special": text.special}
    numbers = {}
    for a in added:
        found = None if a.keys is None else a.keys(text)
        if found is None:
            continue
        if not isinstance(found, Tensor) or found.shape != text.key_real.shape:
            shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"statistic {a.name!r}: its keys= gave {shape}, expected a tensor "
                             f"{list(text.key_real.shape)} [B, S], booleans for a class of keys or floating numbers")
        if not bool(found.isfinite().all()):  # 0 * nan is nan: one such key would empty every row
            raise ValueError(f"statistic {a.name!r}: its keys= gave numbers that aren't finite; give 0 where there is nothing to "
                             "average, or None where it doesn't exist at all")
        found = found.to(text.key_real.device)
        if found.dtype == torch.bool:
            classes[a.name] = found
        else:
            numbers[a.name] = found
    return classes, numbers


def _of_row(a: Added, weights: Weights, like: Tensor) -> Tensor:
    assert a.row is not None
    try:
        found = a.row(weights)
    except Exception as error:
        error.add_note(f"in row= of the statistic {a.name!r}, for rows {weights.rows.start} to {weights.rows.stop - 1}")
        raise
    if not isinstance(found, Tensor) or found.shape != like.shape:
        shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"statistic {a.name!r}: its row= gave {shape}, expected a tensor {list(like.shape)} [B, H, rows]")
    return found.to(like.dtype)


def value_norms(v: Tensor, factors: Tensor, heads: int) -> Tensor:
    """||v_j W_O^(h)|| for every key and query head: `[B, H, S]` from v `[B, G, S, Ev]` and factors `[H, Ev, r]`."""
    groups = v.shape[1]
    grouped = factors.unflatten(0, (groups, heads // groups))
    return torch.stack([(v @ grouped[:, n]).norm(dim=-1) for n in range(heads // groups)], 2).flatten(1, 2)


def _nothing(norms: Tensor, length: int) -> Mass:
    zero = norms.new_zeros(*norms.shape[:2], length)
    return Mass(torch.zeros(norms.shape[0], norms.shape[1], length, dtype=torch.bool, device=norms.device),
                zero, zero.clone(), zero.clone())


def _take(norms: Tensor, which: Tensor) -> Tensor:
    """norms[b, h, which[b, i]], 0 for numbers that aren't keys."""
    keys = norms.shape[-1]
    inside = ((which >= 0) & (which < keys))[:, None]
    taken = norms.gather(-1, which.clamp(0, max(keys - 1, 0))[:, None].expand(-1, norms.shape[1], -1))
    return torch.where(inside, taken, 0)


def _pairs(mass: Mass, name: str, block: Block, text: Text, norms: Tensor) -> None:
    """Sums of powers on earlier keys that hold the same token (duplicate), or follow one that does (induction).

    Such pairs are few, so they are gathered one by one instead of multiplied through the whole block.
    """
    here, there, heads = block.rows, block.keys, norms.shape[1]
    b, i, j = _same(name, here, there, text)
    batch, rows, keys = block.powers.shape[0], here.stop - here.start, there.stop - there.start
    head = torch.arange(heads, device=b.device)
    may = None
    if block.allowed is not None:
        seen = block.allowed[(None,) * (4 - block.allowed.ndim)].expand(batch, -1, rows, keys)
        may = seen[b, :, i, j].expand(-1, heads)
    weight = _flat(block.powers, (b[:, None] * heads + head) * (rows * keys) + (i * keys + j)[:, None])
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

    The keys are sorted by (token, place) once a pass, so a row's are a run of them, and nothing of rows x keys is looked at.
    """
    sought = text.key_ids if name == "duplicate" else text.before_ids
    assert sought is not None and text.ids is not None and text.offset is not None
    size, known = sought.shape[1], (name, text.offset, sought.shape[1])
    if known not in text.found:
        text.found[known] = (sought.long() * size + torch.arange(size, device=sought.device)).sort(-1).values
    in_order, token = text.found[known], text.ids[:, rows].long() * size
    place = torch.arange(rows.start, rows.stop, device=token.device) + text.offset
    low = torch.searchsorted(in_order, token + keys.start)
    number = (torch.searchsorted(in_order, token + place.clamp(keys.start, keys.stop)) - low).flatten()
    where = torch.arange(len(number), device=number.device).repeat_interleave(number)
    first = low.flatten() - (number.cumsum(0) - number)  # of a row's run, less the pairs ahead of it
    b, i = where // token.shape[1], where % token.shape[1]
    at = torch.arange(len(where), device=number.device) + first[where]
    return b, i, in_order[b, at] - token.flatten()[where] - keys.start


def _flat(values: Tensor, at: Tensor) -> Tensor:
    return values.reshape(-1).index_select(0, at.reshape(-1)).view(at.shape)


def _begin(capture: Capture, text: Text, length: int) -> None:
    capture.numbers = sorted(set(range(length) if capture.rows is None else capture.rows))
    if capture.numbers and not 0 <= capture.numbers[0] <= capture.numbers[-1] < length:
        odd = next(n for n in capture.numbers if not 0 <= n < length)
        raise ValueError(f"rows: {odd} isn't a row of this text; its rows are 0 to {length - 1}")
    capture.ids = None if text.ids is None else text.ids[0]
    capture.key_ids = None if text.key_ids is None else text.key_ids[0]


def _capture(capture: Capture, block: Block, norms: Tensor, keys: int) -> None:
    assert capture.numbers is not None
    inside = [n - block.rows.start for n in capture.numbers if block.rows.start <= n < block.rows.stop]
    if not inside:
        return
    row = (block.powers[:, capture.heads] / block.total[:, capture.heads, :, None])[:, :, inside]
    row = torch.nn.functional.pad(row, (block.keys.start, keys - block.keys.stop))[..., : capture.keys]
    capture.weights.append(row)
    capture.contributions.append(row * norms[:, capture.heads, None, : capture.keys])
