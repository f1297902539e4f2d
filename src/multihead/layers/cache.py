"""Caches: the keys and values of the tokens so far, so that each step computes those of its own
tokens only.

One cache belongs to one attention layer and is passed to each call. Each row of the batch has its
own length: padding, on either side, is left out when keys are stored, so that the position of a
token is the number of tokens before it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import MultiheadError
from ..ops.masks import IntervalMask, allowed, padding, runs, window

__all__ = ["Cache", "Step", "WindowCache", "write"]


class Step(NamedTuple):
    """What the rows of one call may read: the keys so far and their own."""

    k: Tensor  # [B, G, S, E]
    v: Tensor  # [B, G, S, Ev]
    offset: (
        int | Tensor
    )  # the position of the first row; of padding on the left less than that, and so negative
    total: int  # positions so far, of the longest row
    lengths: Tensor | None = None  # [B], where the rows differ: keys from there on are nothing
    positions: Tensor | None = (
        None  # [1 or B, S] of each key, -1 for nothing; None where key j is at position j
    )
    left: int | None = None  # rows read that many keys before their own, themselves, and
    sinks: int = 0  # this many first ones

    def mask(
        self, mask: IntervalMask | Tensor | None, bias: object, length: int
    ) -> IntervalMask | Tensor | None:
        """The mask of a call, which speaks of positions, as one of the keys at hand.

        Where a key's place isn't its position for all rows alike, only masks of distances have a
        meaning: others are refused.
        """
        device = self.k.device
        if self.lengths is not None or self.left is not None:
            given = (
                "attn_bias" if bias is not None else "mask" if isinstance(mask, Tensor) else None
            )
            if given or (isinstance(mask, IntervalMask) and mask.rules):
                raise MultiheadError(
                    f"{given or 'mask'} speaks of single keys, but this cache lets keys go, or its"
                    " rows have different lengths, so that a key's place isn't its position; give"
                    " a mask of distances, causal() or window(...), or a PositionBias"
                )
        if self.positions is None and not (self.sinks and self.left is not None):
            rules = IntervalMask() if self.lengths is None else padding(self.lengths)
            if self.left is not None:
                rules = rules & window(left=self.left, right=0, offset=self.offset)
            if isinstance(mask, IntervalMask):
                return rules & mask.after(self.offset)
            if rules.static(length, self.k.shape[2]) == "all":
                return mask
            return rules
        assert not isinstance(mask, Tensor)
        at = torch.arange(length, device=device) + _column(self.offset, device)
        positions = (
            torch.arange(self.k.shape[2], device=device)[None]
            if self.positions is None
            else self.positions
        )
        start, stop = (IntervalMask() if mask is None else mask.after(self.offset)).bounds(
            length, self.total, device
        )
        may = allowed(start, stop, positions[:, None]) & (positions >= 0)[:, None]
        if self.left is not None:
            distance = at[..., None] - positions[:, None]
            may = (
                may
                & (distance >= 0)
                & ((distance <= self.left) | (positions < self.sinks)[:, None])
            )
        return may[:, None]


class Cache:
    """Keys and values of all tokens so far: in memory that grows as needed, or reserved once for
    `max_length` tokens.

    Steps of any size give what one pass over everything gives. Shapes: k `[B, G, L, E]` and v `[B,
    G, L, Ev]` come in at each `update`; the first one decides on B, G, the widths, dtype and
    device.

    Args:
        max_length: tokens to reserve memory for at the first update; None to let it grow (by
            doubling).

    Gradients flow through it: with keys that need them each step copies what is there, so generate
        under `torch.no_grad()`.

    Raises:
        ValueError: an update beyond `max_length`, with both numbers, or of other sizes than the
            first.

    >>> from multihead import MultiHeadAttention
    >>> from multihead.masks import causal
    >>> layer, x, cache = MultiHeadAttention(8, 2), torch.randn(1, 5, 8), Cache()
    >>> steps = [layer(x[:, i : i + 1], mask=causal(), cache=cache) for i in range(5)]
    >>> torch.allclose(torch.cat(steps, 1), layer(x, mask=causal()), atol=1e-6)
    True
    """

    def __init__(self, max_length: int | None = None) -> None:
        if max_length is not None and (
            not isinstance(max_length, int) or isinstance(max_length, bool) or max_length < 1
        ):
            raise MultiheadError(
                f"max_length={max_length!r}: expected a number of tokens of at least 1, or None to"
                " grow"
            )
        self.max_length = max_length
        self.lengths: int | Tensor = 0  # tokens so far: one number, or [B] where the rows differ
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        self._owner: int | None = None  # of the layer that filled it; copies have none

    def __repr__(self) -> str:
        return f"{type(self).__name__}(length={self.length}, memory={self.nbytes / 2**20:.1f} MiB)"

    def __getstate__(self) -> dict[str, Any]:
        state = {
            name: x.detach() if isinstance(x, Tensor) else x for name, x in self.__dict__.items()
        }
        return state | {"_owner": None}

    def belongs_to(self, layer: object) -> None:
        """Raises `ValueError` where another layer filled it: its keys would be read as this
        one's.
        """
        if self._owner not in (None, id(layer)) and self.length:
            raise MultiheadError(
                "cache holds the keys of another layer; make one cache for each layer (of a copied"
                " model, a copy.deepcopy of its cache)"
            )
        self._owner = id(layer)

    @property
    def length(self) -> int:
        """Tokens so far, of the longest row."""
        return _longest(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return sum(x.numel() * x.element_size() for x in (self._k, self._v) if x is not None)

    def offset(self, valid: Tensor | None = None) -> int | Tensor:
        """The position of the first row of the next call, whose real tokens `valid`, bool `[B, L]`,
        names (None: all).
        """
        return self.lengths if valid is None else self.lengths - _span(valid)[0]

    def update(self, k: Tensor, v: Tensor, valid: Tensor | None = None) -> Step:
        """Stores the keys and values of new tokens, and returns all that are there."""
        self.check(k, v, valid)
        offset, before = self.offset(valid), self.lengths
        count = k.shape[2] if valid is None else _span(valid)[1] - _span(valid)[0]
        after = before + count
        total = _longest(after)
        if self.max_length is not None and total > self.max_length:
            raise MultiheadError(
                f"the cache holds {self.length} of at most max_length={self.max_length} tokens, and"
                f" {k.shape[2]} more would make {total}; make it with a larger max_length, crop it,"
                " or use Cache() or WindowCache"
            )
        old = self._writable(k, v)
        new_k, new_v = (
            self._grown(x, like, total)
            for x, like in zip(old or (k[:, :, :0], v[:, :, :0]), (k, v))
        )
        if isinstance(before, int) and valid is None:
            new_k[:, :, before:total], new_v[:, :, before:total] = k, v
        else:
            at = (
                before
                if isinstance(before, Tensor)
                else torch.full((k.shape[0],), before, device=k.device)
            )
            if (
                valid is not None
            ):  # the real tokens of each row come first, and only those are written
                turned = (
                    torch.arange(k.shape[2], device=k.device) + _span(valid)[0][:, None]
                ) % max(k.shape[2], 1)
                k, v = (x.gather(2, turned[:, None, :, None].expand_as(x)) for x in (k, v))
            for buffer, new in ((new_k, k), (new_v, v)):
                write(buffer, new, at, count=None if valid is None else count)  # type: ignore[arg-type]
        self.lengths, self._k, self._v = after, new_k, new_v
        lengths = after if isinstance(after, Tensor) else None
        return Step(new_k[:, :, :total], new_v[:, :, :total], offset, total, lengths)

    def state(self) -> tuple[int | Tensor, Tensor | None, Tensor | None]:
        """What `restore` takes to forget the updates since: a layer does so whose call fails after
        one.
        """
        return self.lengths, self._k, self._v

    def restore(self, state: tuple[int | Tensor, Tensor | None, Tensor | None]) -> None:
        self.lengths, self._k, self._v = state

    @property
    def key_positions(self) -> Tensor:
        """The position of each key that is here, `[1 or B, S]`, -1 for nothing: what the columns of
        weights are, if the call before brought one token.
        """
        number = (
            torch.arange(self.length)[None]
            if self._k is None
            else torch.arange(self.length, device=self._k.device)[None]
        )
        return (
            number
            if isinstance(self.lengths, int)
            else number.masked_fill(number >= self.lengths[:, None], -1)
        )

    def reorder(self, rows: Tensor) -> None:
        """Row b becomes what row `rows[b]` was: integers `[B']`, for beam search, or to drop and
        double rows.
        """
        if not isinstance(rows, Tensor):
            raise TypeError(f"rows={rows!r}: expected a tensor of integers [B]")
        if rows.is_floating_point() or rows.dtype == torch.bool or rows.ndim != 1:
            raise TypeError(
                f"rows is {rows.dtype} {list(rows.shape)}: expected integers of shape [B]"
            )
        if self._k is None or self._v is None:
            return
        if rows.numel() and not (int(rows.min()) >= 0 and int(rows.max()) < self._k.shape[0]):
            raise MultiheadError(
                f"rows={rows.tolist()}: expected numbers of rows, 0..{self._k.shape[0] - 1}"
            )
        self._k, self._v = (x.index_select(0, rows.to(x.device)) for x in (self._k, self._v))
        if isinstance(self.lengths, Tensor):
            self.lengths = self.lengths[rows.to(self.lengths.device)]

    def crop(self, length: int | Tensor) -> None:
        """Forgets all but the first `length` tokens: one number, or `[B]` integers (0 frees a row
        for another text).
        """
        have, wanted = self._wanted(length)
        if bool((wanted < 0).any()) or bool((wanted > have).any()):
            raise MultiheadError(
                f"length={wanted.tolist()}: expected 0 up to the {have.tolist()} tokens that are"
                " there"
            )
        self.lengths = int(wanted) if wanted.ndim == 0 else wanted

    def _wanted(self, length: int | Tensor) -> tuple[Tensor, Tensor]:
        """The lengths that are there, and a copy of those asked for."""
        have = torch.as_tensor(self.lengths)
        try:
            wanted = torch.as_tensor(length)
        except (TypeError, ValueError, RuntimeError):
            wanted = torch.zeros((), dtype=torch.bool)
        if wanted.is_floating_point() or wanted.dtype == torch.bool or wanted.ndim > 1:
            raise TypeError(f"length={length!r}: expected an int, or integers of shape [B]")
        if wanted.ndim and self._k is not None and wanted.shape[0] != self._k.shape[0]:
            raise MultiheadError(
                f"length={wanted.tolist()}: expected one number, or one for each of the"
                f" {self._k.shape[0]} rows"
            )
        return have, wanted.to(have.device, torch.int64, copy=True)

    def _writable(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """What is there, in memory that may be written: a copy where gradients or inference mode
        want the old one as it was.
        """
        if self._k is None or self._v is None:
            return None
        old = (self._k, self._v)
        if torch.is_grad_enabled() and any(x.requires_grad for x in (k, v, *old)):
            return old[0].clone(), old[1].clone()
        if (
            not torch.compiler.is_compiling()
            and self._k.is_inference()
            and not torch.is_inference_mode_enabled()
        ):
            return old[0].clone(), old[1].clone()
        return old

    def check(self, k: Tensor, v: Tensor, valid: Tensor | None) -> None:
        if k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3]:
            raise MultiheadError(
                f"k{list(k.shape)}, v{list(v.shape)}: expected k[B, G, L, E] and v[B, G, L, Ev]"
            )
        for name, x, old in (("k", k, self._k), ("v", v, self._v)):
            if old is not None and (
                old.shape[:2] != x.shape[:2] or old.shape[3] != x.shape[3] or old.dtype != x.dtype
            ):
                raise MultiheadError(
                    f"{name}{list(x.shape)} of {x.dtype} doesn't fit the cache, which holds [B, G,"
                    f" tokens, width] = {[*old.shape[:2], self.length, old.shape[3]]} of"
                    f" {old.dtype}; every layer and every batch needs a cache of its own, and a"
                    " dtype (or autocast) that stays"
                )
        if valid is not None:
            check_valid(valid, k.shape[0], k.shape[2])
            if not bool(runs(valid)[2].all()):
                raise MultiheadError(
                    "valid has holes in a row: a cache takes padding on the left and on the right"
                    " of a row's tokens"
                )

    def _grown(self, buffer: Tensor, like: Tensor, total: int) -> Tensor:
        """The buffer with room for `total` tokens."""
        room = buffer.shape[2]
        if room >= total and room >= (self.max_length or 0):
            return buffer
        size = self.max_length or max(total, 2 * room)
        larger = like.new_zeros(*like.shape[:2], size, like.shape[3])
        larger[:, :, :room] = buffer
        return larger


class WindowCache(Cache):
    """Keys and values of the last `left` tokens before the next one, and of the first `sinks`:
    memory that never grows.

    Gives what one pass over everything gives whose rows read the `left` keys before their own and
    the first `sinks` (Xiao et al. 2023, but with positions as they are in the text): with `sinks=0`
    that is `causal() & window(left=left)`, which needs not be said again. Weights asked for have
    their columns in the order of the memory, see `key_positions`; a call of several tokens has its
    own behind those.

    >>> cache = WindowCache(left=2, sinks=1)
    >>> k = torch.randn(1, 1, 7, 4)
    >>> step = cache.update(k, k)
    >>> cache.update(k[:, :, :1], k[:, :, :1]).positions.tolist()  # of the keys that the row at position 7 may read
    [[0, 7, 5, 6]]
    """

    def __init__(self, left: int, *, sinks: int = 0) -> None:
        super().__init__()
        for name, value in (("left", left), ("sinks", sinks)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise MultiheadError(f"{name}={value!r}: expected a number of tokens of at least 0")
        self.left, self.sinks = left, sinks

    def update(self, k: Tensor, v: Tensor, valid: Tensor | None = None) -> Step:
        self.check(k, v, valid)
        offset, before, length = self.offset(valid), self.lengths, k.shape[2]
        after = before + (length if valid is None else _span(valid)[1] - _span(valid)[0])
        total, first, held = _longest(after), self._k is None, self._writable(k, v)
        old_k, old_v = held or (
            x.new_zeros(*x.shape[:2], self.sinks + self.left + 1, x.shape[3]) for x in (k, v)
        )
        now = self._positions(after, k.device)
        if (
            length == 1
            and valid is None
            and not first
            and bool((torch.as_tensor(before) >= self.sinks).all())
        ):
            at = (_column(before, k.device).expand(k.shape[0], 1)[:, 0] - self.sinks) % (
                self.left + 1
            )
            # over the token left + 1 before it, which no row from here on reads: even undone,
            # nothing is lost
            for buffer, new in ((old_k, k), (old_v, v)):
                write(buffer[:, :, self.sinks :], new, at, circular=True)
            self.lengths, self._k, self._v = after, old_k, old_v
            return Step(old_k, old_v, offset, total, None, now, self.left, self.sinks)
        old = self._positions(before, k.device)
        new_k, new_v = old_k, old_v
        # each slot holds the token that belongs there now: one of the new ones, or the one that was
        # there
        source = (
            (now - _column(offset, k.device))
            .clamp(0, max(length - 1, 0))
            .expand(k.shape[0], -1)[:, None, :, None]
        )
        fresh = (now >= _column(before, k.device))[:, None, :, None]
        if length:
            new_k, new_v = (
                torch.where(
                    fresh, new.gather(2, source.expand(-1, new.shape[1], -1, new.shape[3])), buffer
                )
                for buffer, new in ((old_k, k), (old_v, v))
            )
        self.lengths, self._k, self._v = after, new_k, new_v
        if first and valid is None:
            return Step(k, v, offset, length, None, None, self.left, self.sinks)
        mine = torch.arange(length, device=k.device) + _column(offset, k.device)
        if valid is not None:
            mine = mine.masked_fill(~valid, -1)
        both = torch.broadcast_shapes(old.shape[:1], mine.shape[:1])
        positions = torch.cat([old.expand(*both, -1), mine.expand(*both, -1)], 1)
        return Step(
            torch.cat([old_k, k], 2),
            torch.cat([old_v, v], 2),
            offset,
            total,
            None,
            positions,
            self.left,
            self.sinks,
        )

    @property
    def key_positions(self) -> Tensor:
        """The position of each key that is here, `[1 or B, S]`, -1 for nothing."""
        return self._positions(
            self.lengths, torch.device("cpu") if self._k is None else self._k.device
        )

    def crop(self, length: int | Tensor) -> None:
        """Forgets all but the first `length` tokens, as in `Cache`; of a row that has let tokens go
        all or none, since those can't come back.
        """
        have, wanted = self._wanted(length)
        # of a full ring too: a step that was undone may have written over its first token
        gone = (have > self.sinks + self.left) & (wanted != 0) & (wanted < have)
        if bool(gone.any()):
            raise MultiheadError(
                f"crop({length}): this cache lets go of tokens between the first {self.sinks} and"
                f" the last {self.left + 1}, so a full row can only be emptied, crop(0), or kept as"
                " it is"
            )
        super().crop(length)

    def _positions(self, lengths: int | Tensor, device: torch.device) -> Tensor:
        """The position of the token in each slot once `lengths` tokens have come, -1 for none: `[1
        or B, slots]`.
        """
        slots = torch.arange(self.sinks + self.left + 1, device=device)
        last = _column(lengths, device) - 1
        ring = last - (last - slots) % (
            self.left + 1
        )  # the latest that falls on the slot, of those after the sinks
        found = torch.where(slots < self.sinks, slots, ring)
        there = torch.where(slots < self.sinks, slots <= last, ring >= self.sinks)
        return found.masked_fill(~there, -1)


def write(
    buffer: Tensor, new: Tensor, at: Tensor, *, count: Tensor | None = None, circular: bool = False
) -> None:
    """Writes `new [B, G, L, E]` into `buffer [B, G, C, E]` in place: token i of row b to slot
    `at[b] + i`.

    `count`, integers `[B]`, says how many tokens of each row to write (None: all). `circular` goes
    on at slot 0 behind the last one. Raises `ValueError` where a token has no slot.

    >>> buffer = torch.zeros(1, 1, 3, 1)
    >>> write(buffer, torch.tensor([[[[1.0], [2.0]]]]), torch.tensor([2]), circular=True)
    >>> buffer.flatten().tolist()
    [2.0, 0.0, 1.0]
    """
    room, length = buffer.shape[2], new.shape[2]
    slots = at.to(new.device)[:, None] + torch.arange(length, device=new.device)
    if circular and length <= room:
        slots = slots % room
    real = (
        torch.ones_like(slots, dtype=torch.bool)
        if count is None
        else torch.arange(length, device=new.device) < count[:, None]
    )
    if bool((real & ((slots < 0) | (slots >= room))).any()):
        raise MultiheadError(
            f"at={at.tolist()}: {length} tokens from there on don't fit into the {room} slots of"
            " the buffer"
        )
    if count is None:
        buffer.scatter_(
            2, slots[:, None, :, None].expand(-1, buffer.shape[1], -1, buffer.shape[3]), new
        )
    else:
        row, token = real.nonzero(as_tuple=True)
        buffer[row, :, slots[row, token]] = new[row, :, token]


def check_valid(valid: Tensor, batch: int, length: int) -> None:
    if not isinstance(valid, Tensor) or valid.dtype != torch.bool or valid.shape != (batch, length):
        found = (
            f"{valid.dtype} {list(valid.shape)}"
            if isinstance(valid, Tensor)
            else type(valid).__name__
        )
        raise MultiheadError(
            f"valid is {found}: expected a bool tensor [B, S] = {[batch, length]}, True where there"
            " is text, of the keys of this call alone"
        )


def _longest(lengths: int | Tensor) -> int:
    if not isinstance(lengths, Tensor):
        return lengths
    return int(lengths.max()) if lengths.numel() else 0


def _column(value: int | Tensor, device: torch.device) -> Tensor:
    return torch.as_tensor(value, device=device).reshape(-1, 1)


def _span(valid: Tensor) -> tuple[Tensor, Tensor]:
    start, stop, _ = runs(valid)
    return start, stop
