"""Interval masks: for each query one interval of keys, `start <= j < stop`, that it may attend to.

Causal, sliding window, padding, packed documents, prefix and their intersections let every query
attend to neighbouring keys only, so two integer arrays replace an L x S matrix. They compose with
`&`, and keys outside are never computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..errors import MultiheadError
from .modes import known, require
from .tensors import LARGEST, TensorLike, as_plain_int, copied, to_count, to_integers, to_tensor


class Rule(Protocol):
    """Keys, of `keys`, that queries at positions `at`, integers `[B or 1, L]`, may attend to."""

    @property
    def follows(self) -> bool:
        """Whether the rule depends on positions, and so moves with `after`; otherwise on keys or
        queries by number.
        """

    def bounds(self, at: Tensor, keys: int) -> tuple[Tensor, Tensor]:
        """`start` and `stop`, each broadcastable to `[B, L]`; raises where a query's keys aren't
        one interval.
        """

    def dense(self, at: Tensor, keys: int) -> Tensor:
        """Boolean, broadcastable to `[B, L, keys]`; defined for every rule."""


@dataclass(frozen=True, eq=False)
class IntervalMask:
    """An intersection of rules, each of which gives every query its interval of keys.

    Build one with `causal`, `window`, `padding`, `documents`, `prefix` or `intervals`, and combine
    them with `&`. The query at position i may attend to keys `i + low <= j < i + high` (None: no
    limit) that all further `rules` allow.

    >>> mask = causal() & window(left=1)
    >>> mask.dense(3, 3).int().tolist()
    [[[[1, 0, 0], [1, 1, 0], [0, 1, 1]]]]
    """

    rules: tuple[Rule, ...] = ()
    low: int | None = None
    high: int | None = None

    def __str__(self) -> str:
        """The calls that build it, as `causal() & window(left=7)`."""
        low, high = self.low, self.high
        left = [] if low is None else [f"left={-low}"]
        parts = ["causal()"] if high == 1 else []
        if high not in (None, 1):
            parts = [f"window({', '.join([*left, f'right={high - 1}'])})"]
        elif left:
            parts += [f"window({left[0]})"]
        parts += [f"{type(rule).__name__.strip('_').lower()}(...)" for rule in self.rules]
        return " & ".join(parts) or "IntervalMask()"

    def __and__(self, other: IntervalMask) -> IntervalMask:
        if not isinstance(other, IntervalMask):
            raise TypeError(
                f"mask & {type(other).__name__}: only interval masks combine with '&'; "
                "call .dense(L, S) on this one and use torch's & for boolean masks"
            )
        rules, bands = self.rules + other.rules, (self.low, self.high, other.low, other.high)
        if any(rule.follows for rule in rules) or any(x is not None for x in bands):
            for rule in rules:
                reason = getattr(rule, "why_no_distances", None)  # of documents.from_cu_seqlens
                if reason:
                    raise MultiheadError(reason)
        lows = [x for x in (self.low, other.low) if x is not None]
        highs = [x for x in (self.high, other.high) if x is not None]
        return IntervalMask(rules, max(lows) if lows else None, min(highs) if highs else None)

    def after(self, offset: int | TensorLike) -> IntervalMask:
        """The mask of queries that `offset` earlier positions precede (an int, or `[B]` integers):
        the next queries with a KV cache.

        >>> causal().after(2).dense(2, 4).int().tolist()
        [[[[1, 1, 1, 0], [1, 1, 1, 1]]]]
        """
        offset = _check_offset(offset)
        rules = tuple(_Moved(rule, offset) if rule.follows else rule for rule in self.rules)
        if isinstance(offset, Tensor):
            return IntervalMask((*rules, _Moved(_Band(self.low, self.high), offset)))
        return IntervalMask(
            rules,
            None if self.low is None else self.low + offset,
            None if self.high is None else self.high + offset,
        )

    def static(self, length: int, keys: int) -> str | None:
        """The kind of mask, as far as it is known without reading a tensor: "all" (every query
        attends to every key), "causal" (query i to keys 0..i), else None.
        """
        if (
            torch.compiler.is_exporting()
        ):  # an exported graph serves any length, so none may be compared
            if (
                self.rules
                or self.low is not None
                or isinstance(self.high, torch.SymInt)
                or self.high not in (None, 1)
            ):
                return None
            return "causal" if self.high else "all"
        if self.rules or not (self.low is None or length + self.low <= 1):
            return None
        if self.high is None or self.high >= keys:
            return "all"
        return "causal" if self.high == 1 else None

    def bounds(
        self, length: int, keys: int, device: torch.device | str = "cpu"
    ) -> tuple[Tensor, Tensor]:
        """`start` and `stop`, int64 `[B or 1, length]`, with 0 <= start <= stop <= keys (start =
        stop for a query without keys).

        Raises `MultiheadError` where a query's keys aren't one interval; `dense` is defined for
        such masks too.
        """
        length, keys = to_count("length", length), to_count("keys", keys)
        at = torch.arange(length, device=device)[None]
        start, stop = _Band(self.low, self.high).bounds(at, keys)
        for rule in self.rules:
            low, high = rule.bounds(at, keys)
            try:
                start, stop = torch.maximum(start, low), torch.minimum(stop, high)
            except RuntimeError as error:
                raise MultiheadError(
                    _meets(torch.broadcast_shapes(low.shape, high.shape), start.shape)
                ) from error
        stop = stop.clamp(0, keys)
        return torch.minimum(start.clamp(min=0), stop), stop

    def dense(self, length: int, keys: int, device: torch.device | str = "cpu") -> Tensor:
        """The mask as a boolean `[B or 1, 1, length, keys]`, True where a query may attend."""
        length, keys = to_count("length", length), to_count("keys", keys)
        at = torch.arange(length, device=device)[None]
        mask = _Band(self.low, self.high).dense(at, keys)
        for rule in self.rules:
            may = rule.dense(at, keys)
            try:
                mask = mask & may
            except RuntimeError as error:
                raise MultiheadError(_meets(may.shape[:-1], mask.shape[:-1])) from error
        return mask[:, None]


def bounds_to_dense(start: Tensor, stop: Tensor, keys: Tensor) -> Tensor:
    """`[..., L]` bounds and `[S]` (or `[..., 1, S]`) key numbers -> boolean `[..., L, S]`."""
    return (keys >= start[..., None]) & (keys < stop[..., None])


def causal(offset: int | TensorLike = 0) -> IntervalMask:
    """Causal mask: query i attends to keys 0 .. i + offset; `offset` keys precede the first query
    (an int, or `[B]` integers).
    Raises: TypeError for an offset of another type.

    >>> causal(offset=2).dense(2, 4).int().tolist()
    [[[[1, 1, 1, 0], [1, 1, 1, 1]]]]
    """
    return IntervalMask(high=1).after(offset)


def window(
    left: int | None = None, right: int | None = None, *, offset: int | TensorLike = 0
) -> IntervalMask:
    """Sliding window: query i attends to keys i + offset - left .. i + offset + right; None leaves
    that side open.

    Raises:
        TypeError, MultiheadError: a limit that isn't an int, or is negative.

    >>> window(left=1, right=0).dense(3, 3).int().tolist()
    [[[[1, 0, 0], [1, 1, 0], [0, 1, 1]]]]
    """
    left, right = as_plain_int(left), as_plain_int(right)  # type: ignore[assignment]
    for name, value in (("left", left), ("right", right)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise TypeError(f"{name}={value!r}: expected an int, or None for no limit")
        if value is not None and not 0 <= value < LARGEST:
            raise MultiheadError(
                f"{name}={value}: expected a number of keys of at least 0, or None for no limit"
            )
    return IntervalMask(
        low=None if left is None else -left, high=None if right is None else right + 1
    ).after(offset)


def padding(lengths: TensorLike | None = None, *, valid: TensorLike | None = None) -> IntervalMask:
    """Padding mask: valid keys are the first `lengths[b]` of each batch element, or those where
    the boolean `valid [B, S]` is True.

    A `valid` with holes isn't one interval of keys: attending with it raises; use its
    `.dense(L, S)` then.

    Raises:
        MultiheadError: both or neither of `lengths` and `valid`.
        TypeError: of another dtype or shape.

    >>> padding(valid=[[False, True, True]]).dense(1, 3).int().tolist()
    [[[[0, 1, 1]]]]
    """
    if (lengths is None) == (valid is None):
        raise MultiheadError("padding(lengths=..., valid=...): give exactly one of the two")
    if lengths is not None:
        stop = to_integers("lengths", lengths, "[B]", (1,))[:, None]
        return IntervalMask((_Padding(torch.zeros_like(stop), stop, None, True),))
    valid = to_tensor("valid", valid, "bool [B, S]", empty=torch.bool)
    if valid.dtype != torch.bool or valid.ndim != 2:
        raise TypeError(
            f"valid is {valid.dtype} {list(valid.shape)}: expected bool [B, S], True for tokens and"
            " False for padding; convert a 0/1 mask with valid.bool()"
        )
    valid = copied(valid)
    start, stop, interval = runs(valid)
    return IntervalMask((_Padding(start[:, None], stop[:, None], valid, known(interval)),))


def prefix(n: int | TensorLike) -> IntervalMask:
    """Causal mask of a prefix language model: every query may attend to the first `n` keys (an int,
    or `[B]` integers) too.
    Raises: TypeError for `n` of another type.

    >>> prefix(2).dense(3, 3).int().tolist()
    [[[[1, 1, 0], [1, 1, 0], [1, 1, 1]]]]
    """
    return IntervalMask((_Prefix(_check_offset(n, "n")),))


def intervals(start: TensorLike, stop: TensorLike) -> IntervalMask:
    """The mask whose query i attends to keys `start[b, i] <= j < stop[b, i]`; both integers
    `[B or 1, L]`.

    Raises:
        TypeError: bounds that aren't integers `[B or 1, L]`.

    >>> intervals([[0, 1]], [[2, 3]]).dense(2, 3).int().tolist()
    [[[[1, 1, 0], [0, 1, 1]]]]
    """
    start, stop = (
        to_integers(name, value, "[B or 1, L]", (2,))
        for name, value in (("start", start), ("stop", stop))
    )
    return IntervalMask((_Rows(start, stop),))


@dataclass(frozen=True, eq=False)
class _Band:
    low: int | None
    high: int | None
    follows = True

    def bounds(self, at: Tensor, keys: int) -> tuple[Tensor, Tensor]:
        start = torch.zeros_like(at) if self.low is None else at + self.low
        return start, torch.full_like(at, keys) if self.high is None else at + self.high

    def dense(self, at: Tensor, keys: int) -> Tensor:
        return bounds_to_dense(*self.bounds(at, keys), torch.arange(keys, device=at.device))


@dataclass(frozen=True, eq=False)
class _Moved:
    rule: Rule
    offset: int | Tensor
    follows = True

    def _at(self, at: Tensor) -> Tensor:
        return at + (
            self.offset.to(at.device).reshape(-1, 1)
            if isinstance(self.offset, Tensor)
            else self.offset
        )

    def bounds(self, at: Tensor, keys: int) -> tuple[Tensor, Tensor]:
        return self.rule.bounds(self._at(at), keys)

    def dense(self, at: Tensor, keys: int) -> Tensor:
        return self.rule.dense(self._at(at), keys)


@dataclass(frozen=True, eq=False)
class _Padding:
    start: Tensor  # [B, 1]
    stop: Tensor
    valid: Tensor | None  # [B, S]
    interval: bool | Tensor
    follows = False

    def bounds(self, at: Tensor, keys: int) -> tuple[Tensor, Tensor]:
        self._check(keys)
        row = ""
        if self.interval is False and self.valid is not None:
            row = f"[{int((~runs(self.valid)[2]).nonzero()[0, 0])}]"
        require(
            self.interval,
            f"padding(valid=...): valid{row} has holes, so it isn't one interval of keys; pass "
            "mask.dense(L, S) as a dense mask instead, or valid[:, None, None, :]",
        )
        return self.start.to(at.device), self.stop.to(at.device)

    def dense(self, at: Tensor, keys: int) -> Tensor:
        self._check(keys)
        if self.valid is not None:
            return self.valid.to(at.device)[:, None]
        return bounds_to_dense(
            self.start.to(at.device), self.stop.to(at.device), torch.arange(keys, device=at.device)
        )

    def _check(self, keys: int) -> None:
        if self.valid is not None and self.valid.shape[1] != keys:
            raise MultiheadError(
                f"valid{list(self.valid.shape)} is for {self.valid.shape[1]} keys, but there are"
                f" S = {keys}"
            )


@dataclass(frozen=True, eq=False)
class _Prefix:
    n: int | Tensor
    follows = True

    def bounds(self, at: Tensor, keys: int) -> tuple[Tensor, Tensor]:
        n = (
            self.n.to(at.device).reshape(-1, 1)
            if isinstance(self.n, Tensor)
            else torch.full_like(at[:, :1], self.n)
        )
        stop = torch.maximum(at + 1, n)
        return torch.zeros_like(stop), stop

    def dense(self, at: Tensor, keys: int) -> Tensor:
        return bounds_to_dense(*self.bounds(at, keys), torch.arange(keys, device=at.device))


@dataclass(frozen=True, eq=False)
class _Rows:
    start: Tensor  # [B or 1, L]
    stop: Tensor
    follows = False

    def bounds(self, at: Tensor, keys: int) -> tuple[Tensor, Tensor]:
        return self.start.to(at.device), self.stop.to(at.device)

    def dense(self, at: Tensor, keys: int) -> Tensor:
        return bounds_to_dense(*self.bounds(at, keys), torch.arange(keys, device=at.device))


def runs(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Boolean `[..., S]` -> first True, one past the last True (0, 0 where none), and whether all
    between are True.
    """
    if mask.shape[-1] == 0:
        zero = torch.zeros(mask.shape[:-1], dtype=torch.int64, device=mask.device)
        return zero, zero, zero == 0
    as_byte = mask.to(torch.uint8)
    count = as_byte.sum(-1, dtype=torch.int64)
    start = as_byte.argmax(-1)
    stop = torch.where(count > 0, mask.shape[-1] - as_byte.flip(-1).argmax(-1), start)
    return start, stop, stop - start == count


def _check_offset(offset: int | TensorLike, name: str = "offset") -> int | Tensor:
    """An int, or a copy of integers of shape [B]."""
    number = as_plain_int(offset)
    if isinstance(number, int) and not -LARGEST < number < LARGEST:
        raise MultiheadError(f"{name}={offset}: expected an int of at most 2**62")
    if isinstance(number, int | torch.SymInt) and not isinstance(number, bool):
        return number  # type: ignore[return-value]
    if number is None or isinstance(number, bool | float):
        raise TypeError(f"{name}={offset!r}: expected an int, or integers of shape [B]")
    return to_integers(name, offset, "[B], or an int", (0, 1))


def _meets(shape: tuple[int, ...], other: tuple[int, ...]) -> str:
    return (
        f"a mask for [batch, queries] = {list(shape)} was combined with {list(other)}: the batch"
        " and the number of queries must agree"
    )
