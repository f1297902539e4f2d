"""KV caches: keys and values of earlier tokens, so that a step computes only those of its tokens.

One cache belongs to one attention layer and is passed to each call. The sequences of a batch may
differ in length: padding, on either side, isn't stored, so that the position of a token is the
number of tokens before it.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..errors import MultiheadError
from ..ops.masks import runs
from ..ops.modes import transformed
from ..ops.tensors import TensorLike, as_plain_int, require_tensor, to_integers
from .visible_keys import VisibleKeys, longest, to_column, to_valid, valid_span, write_tokens

__all__ = ["Cache", "WindowCache"]

State = tuple[int | Tensor, Tensor | None, Tensor | None, Tensor | None, bool]


class Cache:
    """Keys and values of all tokens so far, in memory that grows or is reserved once.

    Steps of any size give what one pass over everything gives. Keys `[B, G, L, E]` and values
    `[B, G, L, Ev]` come with each `update`; the first one decides on B, G, the widths, dtype and
    device. Gradients flow through it, also where some steps are computed under `torch.no_grad()`
    or in inference mode: those give constant keys. If keys require gradients each step copies the
    memory, so generate under `torch.no_grad()`; `detach_()` cuts the graph between two backward
    passes. Copies and pickled caches hold the numbers alone.

    Args:
        max_length: number of tokens to reserve memory for at the first update; None to grow, by
            doubling.

    Raises:
        MultiheadError: an update beyond `max_length`, with both numbers, or of other sizes than
            the first.

    >>> from multihead import MultiHeadAttention
    >>> from multihead.masks import causal
    >>> layer, x, cache = MultiHeadAttention(8, 2), torch.randn(1, 5, 8), Cache()
    >>> steps = [layer(x[:, i : i + 1], mask=causal(), cache=cache) for i in range(5)]
    >>> torch.allclose(torch.cat(steps, 1), layer(x, mask=causal()), atol=1e-6)
    True
    """

    def __init__(self, max_length: int | None = None) -> None:
        max_length = as_plain_int(max_length)  # type: ignore[assignment]
        is_int = isinstance(max_length, int) and not isinstance(max_length, bool)
        if max_length is not None and (not is_int or max_length < 1):
            raise MultiheadError(
                f"max_length={max_length!r}: expected a number of tokens of at least 1, or None to"
                " grow"
            )
        self.max_length = max_length
        self.lengths: int | Tensor = 0  # tokens so far; [B] if the sequences differ
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        # positions of the keys that the last call read, where those aren't the stored ones
        self._columns: Tensor | None = None
        self._is_saved = False  # whether a graph holds the memory, which then mustn't change
        self._owner: int | None = None  # id of the layer that filled it; copies have none

    def __repr__(self) -> str:
        return f"{type(self).__name__}(length={self.length}, memory={self.nbytes / 2**20:.1f} MiB)"

    def __getstate__(self) -> dict[str, Any]:
        state = {n: x.detach() if isinstance(x, Tensor) else x for n, x in self.__dict__.items()}
        return state | {"_owner": None, "_is_saved": False}

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache:
        # clones, which transforms of torch.func take and copy.deepcopy of their tensors doesn't
        made = type(self).__new__(type(self))
        for name, x in self.__getstate__().items():
            setattr(made, name, x.clone() if isinstance(x, Tensor) else copy.deepcopy(x, memo))
        return made

    def __copy__(self) -> Cache:
        return copy.deepcopy(self)  # two caches that write to one memory would mix their tokens

    def claim(self, layer: object) -> None:
        """Take the cache for a layer.

        Raises:
            MultiheadError: another layer has filled it.
        """
        if self._owner not in (None, id(layer)) and self.length:
            raise MultiheadError(
                "cache holds the keys of another layer; create one cache for each layer (of a"
                " copied model, a copy.deepcopy of its cache)"
            )
        self._owner = id(layer)

    @property
    def length(self) -> int:
        """Number of tokens so far, of the longest sequence."""
        return longest(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of reserved memory."""
        return sum(x.numel() * x.element_size() for x in (self._k, self._v) if x is not None)

    def offset(self, valid: TensorLike | None = None) -> int | Tensor:
        """Position of the first query of the next call; with padding on the left (`valid`, bool
        `[B, L]`), that of the first token minus the padding.
        """
        valid = None if valid is None else to_valid(valid)
        # of a tensor without values, on the device "meta", all are taken to be real
        return (
            self.lengths if valid is None or valid.is_meta else self._after(-valid_span(valid)[0])
        )

    def _after(self, count: int | Tensor) -> int | Tensor:
        """The lengths after `count` more tokens."""
        if isinstance(self.lengths, Tensor) and isinstance(count, Tensor):
            return self.lengths.to(count.device) + count
        return self.lengths + count

    def update(self, k: Tensor, v: Tensor, valid: TensorLike | None = None) -> VisibleKeys:
        """Store the keys `[B, G, L, E]` and values `[B, G, L, Ev]` of new tokens, and return all.

        Args:
            k: keys.
            v: values.
            valid: bool `[B, L]`, the tokens that are real; contiguous in each sequence.

        Raises:
            MultiheadError: too many tokens, or sizes that differ from those stored.
            TypeError: keys or values that aren't tensors, a `valid` that isn't bool.
        """
        real = self._check(k, v, valid)
        with self._recording():
            return self._append(k, v, real)

    def _append(self, k: Tensor, v: Tensor, valid: Tensor | None) -> VisibleKeys:
        offset, before = self.offset(valid), self.lengths
        start, stop = (None, None) if valid is None else valid_span(valid)
        count = None if start is None or stop is None else stop - start
        after = self._after(k.shape[2] if count is None else count)
        total = longest(after)
        if self.max_length is not None and total > self.max_length:
            raise MultiheadError(
                f"the cache holds {self.length} of at most max_length={self.max_length} tokens, and"
                f" {k.shape[2]} more would make {total}; give a larger max_length, crop it, or use"
                " Cache() or WindowCache"
            )
        old = self._writable(k, v) or (x.new_zeros(*x.shape[:2], 0, x.shape[3]) for x in (k, v))
        new_k, new_v = (self._grow(x, like, total) for x, like in zip(old, (k, v)))
        if isinstance(before, int) and count is None:
            new_k[:, :, before:total], new_v[:, :, before:total] = k, v
        else:
            if start is not None:  # move the real tokens of each sequence to its front
                shift = torch.arange(k.shape[2], device=k.device) + start[:, None]
                index = (shift % max(k.shape[2], 1))[:, None, :, None]
                k, v = (x.gather(2, index.expand_as(x)) for x in (k, v))
            first = to_column(before, k.device).expand(k.shape[0], 1)[:, 0]
            for buffer, new in ((new_k, k), (new_v, v)):
                write_tokens(buffer, new, first, count=count)
        self.lengths, self._k, self._v = after, new_k, new_v
        lengths = after if isinstance(after, Tensor) else None
        return VisibleKeys(new_k[:, :, :total], new_v[:, :, :total], offset, total, lengths)

    def state(self) -> State:
        """The state that `restore` returns to, before later updates: a layer restores it if its
        call fails.
        """
        return self.lengths, self._k, self._v, self._columns, self._is_saved

    def restore(self, state: State) -> None:
        self.lengths, self._k, self._v, self._columns, self._is_saved = state

    def detach_(self) -> None:
        """Cut the graph: gradients of later calls don't reach the calls so far. For backward passes
        after every few steps, as in truncated backpropagation through time.
        """
        if self._k is not None and self._v is not None:
            self._k, self._v = self._k.detach(), self._v.detach()
            self._is_saved = True  # by the graphs so far

    def hold(self) -> None:
        """Keep the memory as it is for the backward pass of the last call, though keys and values
        have no gradient: the next call copies it. A layer whose output has a gradient calls it.
        """
        self._is_saved = True

    @property
    def key_positions(self) -> Tensor:
        """Positions of the keys that the last call read, `[1 or B, S]`, -1 for empty slots: column
        j of its weights is the key at `key_positions[:, j]`. After `crop` and `reorder` those of
        the stored keys, which the next call reads first.
        """
        return self._stored_positions() if self._columns is None else self._columns

    def _stored_positions(self) -> Tensor:
        device = None if self._k is None else self._k.device
        index = torch.arange(self.length, device=device)[None]
        if isinstance(self.lengths, int):
            return index
        return index.masked_fill(index >= to_column(self.lengths, index.device), -1)

    def reorder(self, rows: TensorLike) -> None:
        """Replace sequence b by sequence `rows[b]`: integers `[B']`, for beam search, or to drop
        and duplicate sequences.

        Raises:
            TypeError: anything but integers `[B']`.
            MultiheadError: numbers of sequences that don't exist.
        """
        rows = to_integers("rows", rows, "[B]", (1,))
        if self._k is None or self._v is None:
            return
        if (
            rows.numel()
            and not rows.is_meta
            and not (int(rows.min()) >= 0 and int(rows.max()) < self._k.shape[0])
        ):
            raise MultiheadError(
                f"rows={rows.tolist()}: expected numbers of sequences, 0..{self._k.shape[0] - 1}"
            )
        with self._recording():
            self._k, self._v = (x.index_select(0, rows.to(x.device)) for x in (self._k, self._v))
        self._columns = None
        if isinstance(self.lengths, Tensor):
            self.lengths = self.lengths[rows.to(self.lengths.device)]

    def crop(self, length: int | TensorLike) -> None:
        """Keep the first `length` tokens: one number, or integers `[B]` (0 frees a sequence).

        Raises:
            TypeError: anything but integers.
            MultiheadError: more tokens than are stored.
        """
        stored, wanted = self._wanted_lengths(length)
        if bool((wanted < 0).any()) or bool((wanted > stored).any()):
            raise MultiheadError(
                f"length={wanted.tolist()}: expected 0 up to the {stored.tolist()} tokens that are"
                " stored"
            )
        self.lengths = int(wanted) if wanted.ndim == 0 else wanted
        self._columns = None

    def _wanted_lengths(self, length: int | TensorLike) -> tuple[Tensor, Tensor]:
        """The stored lengths, and a copy of those that are asked for."""
        stored = self.lengths
        if isinstance(stored, int):
            stored = torch.tensor(stored, device="cpu")  # whatever the default device is
        if isinstance(length, bool | float | None):
            raise TypeError(f"length={length!r}: expected an int, or integers of shape [B]")
        number = torch.tensor(length, device="cpu") if isinstance(length, int) else length
        wanted = to_integers("length", number, "[B], or an int", (0, 1))
        if wanted.ndim and self._k is not None and wanted.shape[0] != self._k.shape[0]:
            raise MultiheadError(
                f"length={wanted.tolist()}: expected one number, or one for each of the"
                f" {self._k.shape[0]} sequences"
            )
        return stored, wanted.to(stored.device, torch.int64)

    def _recording(self) -> AbstractContextManager[object]:
        """Context in which the memory is written. The memory outlives the mode of one step: keys
        with gradients keep them through a step without, and a step in inference mode leaves memory
        that can be trained with.
        """
        tracked = any(x is not None and x.requires_grad for x in (self._k, self._v))
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            return torch.inference_mode(False)  # which enables gradients too
        if tracked and not torch.is_grad_enabled():
            return torch.enable_grad()
        return nullcontext()

    def _writable(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """The memory, copied where gradients or inference mode need the old one unchanged."""
        if self._k is None or self._v is None:
            return None
        old = (self._k, self._v)
        is_saved, self._is_saved = self._is_saved, False
        if not torch.compiler.is_compiling() and transformed():
            # memory of the transform's tensors: that from before it can't be written to
            made = [x.new_zeros(memory.shape) for x, memory in zip((k, v), old)]
            return made[0].copy_(old[0]), made[1].copy_(old[1])
        if is_saved or (torch.is_grad_enabled() and any(x.requires_grad for x in (k, v, *old))):
            return old[0].clone(), old[1].clone()
        leaves_inference = not torch.compiler.is_compiling() and self._k.is_inference()
        if leaves_inference and not torch.is_inference_mode_enabled():
            return old[0].clone(), old[1].clone()
        return old

    def _check(self, k: Tensor, v: Tensor, valid: TensorLike | None) -> Tensor | None:
        """`valid` as a tensor next to the keys; None where all tokens are real.

        Raises `MultiheadError` unless keys, values and `valid` fit each other and the memory.
        """
        require_tensor("k", k)
        require_tensor("v", v)
        if k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3]:
            raise MultiheadError(
                f"k{list(k.shape)}, v{list(v.shape)}: expected k[B, G, L, E] and v[B, G, L, Ev]"
            )
        for name, x, old in (("k", k, self._k), ("v", v, self._v)):
            if old is not None:
                self._check_fit(name, x, old)
        if valid is None:
            return None
        found = to_valid(valid, k.shape[0], k.shape[2], k.device)
        if found.is_meta:  # has no values, and the shapes are those of a call without padding
            return None
        if not bool(runs(found)[2].all()):
            raise MultiheadError(
                "valid has holes: a cache takes padding only on the left and on the right of a"
                " sequence's tokens"
            )
        return found

    def _check_fit(self, name: str, x: Tensor, old: Tensor) -> None:
        """Raise unless keys or values x fit those stored."""
        fits = old.shape[:2] == x.shape[:2] and old.shape[3] == x.shape[3]
        if not fits or old.dtype != x.dtype:
            raise MultiheadError(
                f"{name}{list(x.shape)} of {x.dtype} doesn't fit the cache, which holds [B, G,"
                f" tokens, width] = {[*old.shape[:2], self.length, old.shape[3]]} of {old.dtype};"
                " every layer and every batch needs a separate cache, and one dtype (also under"
                " autocast)"
            )

    def _grow(self, buffer: Tensor, like: Tensor, total: int) -> Tensor:
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
    memory of constant size.

    Gives what one pass gives whose queries read the `left` keys before their own and the first
    `sinks` (Xiao et al. 2023, but with positions as in the sequence). With `sinks=0` that is
    `causal() & window(left=left)`, which needn't be passed as well. Returned weights have a column
    for each key that the call read, in the order of `key_positions`: the memory, and after it the
    tokens of a call of several.

    Args:
        left: number of keys before its own that a query reads.
        sinks: number of first keys that every query reads as well.

    Raises:
        MultiheadError: numbers below 0.

    >>> cache = WindowCache(left=2, sinks=1)
    >>> k = torch.randn(1, 1, 7, 4)
    >>> visible = cache.update(k, k)
    >>> cache.update(k[:, :, :1], k[:, :, :1]).positions.tolist()  # keys of the query at position 7
    [[0, 7, 5, 6]]
    """

    def __init__(self, left: int, *, sinks: int = 0) -> None:
        super().__init__()
        left, sinks = as_plain_int(left), as_plain_int(sinks)  # type: ignore[assignment]
        for name, value in (("left", left), ("sinks", sinks)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise MultiheadError(f"{name}={value!r}: expected a number of tokens of at least 0")
        self.left, self.sinks = left, sinks

    @property
    def _ring(self) -> int:
        """Number of slots after the sinks, which are reused in turn."""
        return self.left + 1

    def _append(self, k: Tensor, v: Tensor, valid: Tensor | None) -> VisibleKeys:
        visible = self._write(k, v, valid)
        self._columns = torch.atleast_2d(visible.key_positions())
        return visible

    def _write(self, k: Tensor, v: Tensor, valid: Tensor | None) -> VisibleKeys:
        """Store new tokens; one token replaces the one `left + 1` before it."""
        offset, before, length = self.offset(valid), self.lengths, k.shape[2]
        after = self._after(length)
        if valid is not None:
            start, stop = valid_span(valid)
            after = self._after(stop - start)
        total, is_first, device = longest(after), self._k is None, k.device
        slots = self.sinks + self._ring
        old_k, old_v = self._writable(k, v) or (
            x.new_zeros(*x.shape[:2], slots, x.shape[3]) for x in (k, v)
        )
        positions = self._slot_positions(after, device)
        if length == 1 and valid is None and not is_first:
            at = to_column(before, device).expand(k.shape[0], 1)[:, 0]
            slot = torch.where(at < self.sinks, at, self.sinks + (at - self.sinks) % self._ring)
            # The token that is overwritten isn't read by any later query, so that nothing is lost
            # even if this step is undone.
            for buffer, new in ((old_k, k), (old_v, v)):
                write_tokens(buffer, new, slot)
            self.lengths, self._k, self._v = after, old_k, old_v
            return VisibleKeys(old_k, old_v, offset, total, None, positions, self.left, self.sinks)
        old_positions = self._slot_positions(before, device)
        new_k, new_v = self._refill((old_k, old_v), (k, v), positions, offset)
        self.lengths, self._k, self._v = after, new_k, new_v
        if is_first and valid is None:
            return VisibleKeys(k, v, offset, length, None, None, self.left, self.sinks)
        own = torch.arange(length, device=device) + to_column(offset, device)
        own = own if valid is None else own.masked_fill(~valid, -1)
        batch = torch.broadcast_shapes(old_positions.shape[:1], own.shape[:1])
        return VisibleKeys(
            torch.cat([old_k, k], 2),
            torch.cat([old_v, v], 2),
            offset,
            total,
            None,
            torch.cat([old_positions.expand(*batch, -1), own.expand(*batch, -1)], 1),
            self.left,
            self.sinks,
        )

    def _refill(
        self,
        old: tuple[Tensor, Tensor],
        new: tuple[Tensor, Tensor],
        positions: Tensor,
        offset: int | Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The memory after several tokens: each slot has the token of its position, a new one or
        the one that was there.
        """
        length, device = new[0].shape[2], new[0].device
        if not length:
            return old
        source = (positions - to_column(offset, device)).clamp(0, length - 1)
        source = source.expand(new[0].shape[0], -1)[:, None, :, None]
        is_new = (positions >= to_column(self.lengths, device))[:, None, :, None]
        k, v = (
            torch.where(is_new, x.gather(2, source.expand(-1, x.shape[1], -1, x.shape[3])), buffer)
            for buffer, x in zip(old, new)
        )
        return k, v

    def _stored_positions(self) -> Tensor:
        device = torch.device("cpu") if self._k is None else self._k.device
        return self._slot_positions(self.lengths, device)

    def crop(self, length: int | TensorLike) -> None:
        """Keep the first `length` tokens, as in `Cache`; of a sequence that has evicted tokens all
        or none, since those can't come back.
        """
        stored, wanted = self._wanted_lengths(length)
        # Also of a full ring: a step that was undone may have overwritten its first token.
        evicted = (stored > self.sinks + self.left) & (wanted != 0) & (wanted < stored)
        if bool(evicted.any()):
            raise MultiheadError(
                f"crop({length}): this cache evicts tokens between the first {self.sinks} and the"
                f" last {self._ring}, so a full sequence can only be emptied, crop(0), or kept as"
                " it is"
            )
        super().crop(length)

    def _slot_positions(self, lengths: int | Tensor, device: torch.device) -> Tensor:
        """The position of the token in each slot after `lengths` tokens, -1 for none: `[1 or B,
        slots]`.
        """
        slots = torch.arange(self.sinks + self._ring, device=device)
        last = to_column(lengths, device) - 1
        # After the sinks, the latest position that falls on the slot.
        latest = last - (last - slots) % self._ring
        is_sink = slots < self.sinks
        is_filled = torch.where(is_sink, slots <= last, latest >= self.sinks)
        return torch.where(is_sink, slots, latest).masked_fill(~is_filled, -1)
