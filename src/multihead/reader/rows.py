"""One attention call, observed: the output, and for every query row of every head what its weights did.

Everything is taken from a block of rows on the way past; no probabilities are kept. What comes out are numbers a row,
`[B, H, L]`, and nothing larger.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..models.interface import Call
from ..operator.backends.blocks import Block, blocks, exact, merged, mix
from ..operator.masks import IntervalMask

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

    def latest(self) -> Tensor:
        """The last key that each row may read, -1 for none: `[B, 1 or H, L]`."""
        if self.may is None:
            return torch.where(self.stop > self.start, self.stop - 1, -1)[:, None]
        number = torch.arange(self.may.shape[-1], device=self.may.device)
        return torch.where(self.may, number, -1).amax(-1)


def readable(call: Call) -> Tensor:
    """Keys that some row of a text may read: bool `[B, S]`."""
    batch, length, keys = call.q.shape[0], call.q.shape[2], call.k.shape[2]
    if isinstance(call.mask, Tensor):
        return call.mask[(None,) * (4 - call.mask.ndim)].expand(batch, -1, length, keys).flatten(1, 2).any(1)
    start, stop = (IntervalMask(()) if call.mask is None else call.mask).bounds(length, keys, call.q.device)
    some = stop > start
    low, high = torch.where(some, start, keys).amin(-1, keepdim=True), torch.where(some, stop, 0).amax(-1, keepdim=True)
    number = torch.arange(keys, device=call.q.device)
    return ((number >= low) & (number < high)).expand(batch, -1)


def observe(call: Call, text: Text, factors: Tensor, wanted: frozenset[str],
            capture: Capture | None = None, watches: Sequence[Watch] = ()) -> tuple[Tensor, Rows]:
    """The call's output `[B, H, L, Ev]`, and what its rows did. `factors` `[H, Ev, r]` give ||v W_O^(h)|| = ||v factors_h||."""
    with exact(call.q):
        return _observe(call, text, factors, wanted, capture, watches)


def _observe(call: Call, text: Text, factors: Tensor, wanted: frozenset[str],
             capture: Capture | None, watches: Sequence[Watch]) -> tuple[Tensor, Rows]:
    dtype = call.q.dtype
    work = torch.promote_types(dtype, torch.float32)
    q, k, v = (merged(x.to(work)) for x in (call.q, call.k, call.v))
    batch, heads, length, keys = *q.shape[:3], k.shape[2]
    norms = value_norms(v.detach(), factors.to(work), heads)
    special = None
    if text.special is not None and "special" in wanted:
        special = text.special[:, None, :].to(work)
    columns = torch.stack([norms] if special is None else [norms, norms * special, special.expand_as(norms)], -1)
    mask = _Keys(call, columns[..., : 1 if special is None else 2])
    count = mask.count.clamp(min=1)
    even = mask.total() / count
    at = None if text.offset is None else torch.arange(length, device=q.device).expand(batch, -1) + text.offset
    causal = at is not None and bool((mask.latest() <= at[:, None]).all())
    single: dict[str, Tensor] = {}  # masses on one key a row: which
    if at is not None:
        single = {name: at + step for name, step in OFFSETS.items() if name in wanted}
    if "first" in wanted:
        single["first"] = text.first[:, None].expand(batch, length)
    masses = {name: _single(norms, mask, count, which) for name, which in single.items()}
    pairs: list[str] = [name for name in ("duplicate", "induction") if name in wanted and at is not None and text.ids is not None]
    for name in pairs:
        masses[name] = _nothing(norms, length)

    if capture is not None:
        _begin(capture, text, length)
    out = q.new_empty(batch, heads, length, v.shape[-1])
    outs: list[Tensor] = []
    tracked = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    rows = {name: norms.new_empty(batch, heads, length) for name in ("entropy", "confidence", "distance")}
    sums = norms.new_empty(columns.shape[-1], batch, heads, length)
    for block in blocks(q, k, call.mask, bias=call.bias, scale=call.scale, softcap=call.softcap, sinks=call.sinks):
        mixed = _mix(block, v, call.dropout)
        if tracked:
            outs.append(mixed)
        else:
            out[:, :, block.rows] = mixed
        block = block._replace(shifted=block.shifted.detach(), powers=block.powers.detach(), total=block.total.detach())
        here, total, powers = block.rows, block.total, block.powers
        sums[..., here] = ((powers @ columns[:, :, block.keys]) / total[..., None]).permute(3, 0, 1, 2)
        for name, which in single.items():
            mass = masses[name]
            column = (which[:, here] - block.keys.start).clamp(0, powers.shape[-1] - 1)[:, None, :, None]
            found = powers.gather(-1, column.expand(-1, heads, -1, 1))[..., 0] / total
            mass.weight[..., here] = torch.where(mass.exists[..., here], found, 0)
        for name in pairs:
            _pairs(masses[name], name, block, text, norms, count)
        if at is not None:
            rows["distance"][..., here] = _distance(block, at[:, here], causal)
        if capture is not None:
            _capture(capture, block, norms, keys)
        for watch in watches:
            watch(block)
        # last, for it overwrites the scores: -sum A log A = log(total) sum A - sum A (s - top)
        largest = 1.0 if call.sinks is None else block.shifted.amax(-1).exp()
        rows["confidence"][..., here] = largest / total
        weight = (powers.sum(-1) if call.sinks is not None else torch.where(total.isinf(), 0, total)) / total
        spread = (block.shifted * powers if tracked else block.shifted.mul_(powers)).sum(-1) / total
        rows["entropy"][..., here] = torch.where(total.isinf(), 0, total.log()) * weight.nan_to_num() - spread
    for name, which in single.items():  # c of one key is its weight times its norm
        masses[name].contribution = masses[name].weight * _take(norms, which)
    if special is not None:
        exists = _special_exists(mask, special, heads)
        masses["special"] = Mass(exists, sums[2], sums[1], even[1])
    result = Rows(mask.count, rows["entropy"], rows["confidence"], rows["distance"] if at is not None else None,
                  sums[0], even[0], masses, causal)
    return (torch.cat(outs, 2) if tracked else out).to(dtype), result


def value_norms(v: Tensor, factors: Tensor, heads: int) -> Tensor:
    """||v_j W_O^(h)|| for every key and query head: `[B, H, S]` from v `[B, G, S, Ev]` and factors `[H, Ev, r]`."""
    groups = v.shape[1]
    grouped = factors.unflatten(0, (groups, heads // groups))
    return torch.stack([(v @ grouped[:, n]).norm(dim=-1) for n in range(heads // groups)], 2).flatten(1, 2)


def _special_exists(mask: _Keys, special: Tensor, heads: int) -> Tensor:
    """Rows that may read at least one special key."""
    if mask.may is not None:
        return (mask.may & (special > 0)[:, :, None]).any(-1)
    sums = torch.nn.functional.pad(special[:, 0].long().cumsum(-1), (1, 0)).expand(mask.stop.shape[0], -1)
    return (sums.gather(1, mask.stop) > sums.gather(1, mask.start))[:, None]


def _mix(block: Block, v: Tensor, dropout: float) -> Tensor:
    if dropout:
        block = block._replace(powers=torch.nn.functional.dropout(block.powers, dropout))
    return mix(block, v)


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


def _single(norms: Tensor, mask: _Keys, count: Tensor, which: Tensor) -> Mass:
    """A mass on one key a row: the even part is known beforehand, the weights come block by block."""
    exists = mask.reads(which)
    zero = norms.new_zeros(*norms.shape[:2], which.shape[1])
    return Mass(exists, zero, zero, torch.where(exists, _take(norms, which) / count, 0))


def _pairs(mass: Mass, name: str, block: Block, text: Text, norms: Tensor, count: Tensor) -> None:
    """Masses on earlier keys that hold the same token (duplicate), or follow one that does (induction).

    Such pairs are few, so they are gathered one by one instead of multiplied through the whole block.
    """
    assert text.ids is not None and text.offset is not None
    here, cut = block.rows, block.keys
    number = torch.arange(cut.start, cut.stop, device=norms.device)
    sought = text.key_ids if name == "duplicate" else text.before_ids
    assert sought is not None
    same = text.ids[:, here, None] == sought[:, None, cut]
    same &= number < (torch.arange(here.start, here.stop, device=norms.device) + text.offset)[:, None]
    b, i, j = same.nonzero(as_tuple=True)
    heads = norms.shape[1]
    if block.allowed is None:
        may = torch.ones(len(b), 1, dtype=torch.bool, device=norms.device)
    else:
        seen = block.allowed[(None,) * (4 - block.allowed.ndim)]
        seen = seen.expand(same.shape[0], -1, *same.shape[1:])
        may = seen[b, :, i, j]
    may = may.expand(-1, heads)
    weight = block.powers[b, :, i, j] * may
    norm = norms[b, :, j + cut.start] * may
    each = count.expand(same.shape[0], heads, -1)[b, :, i + here.start]
    total = block.total[b, :, i]
    where = b * same.shape[1] + i

    def by_row(values: Tensor) -> Tensor:
        flat = norms.new_zeros(same.shape[0] * same.shape[1], heads).index_add_(0, where, values.to(norms.dtype))
        return flat.view(same.shape[0], same.shape[1], heads).transpose(1, 2)

    mass.weight[..., here] = by_row(weight / total)
    mass.contribution[..., here] = by_row(weight * norm / total)
    mass.even[..., here] = by_row(norm / each)
    mass.exists[..., here] = by_row(may) > 0


def _distance(block: Block, at: Tensor, causal: bool) -> Tensor:
    """sum_j A_ij |i - j|. For causal rows one product with the key numbers, counted from the block so that none is large."""
    powers, total = block.powers, block.total
    number = torch.arange(block.keys.start, block.keys.stop, device=powers.device)
    if causal:
        origin = at[0, 0]
        back = powers @ (origin - number).to(powers.dtype)
        return (back + (at - origin)[:, None] * powers.sum(-1)) / total
    apart = (at[:, :, None] - number).abs().to(powers.dtype)
    return (powers * apart[:, None]).sum(-1) / total


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
