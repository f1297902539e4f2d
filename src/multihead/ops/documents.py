"""Masks of packed sequences: several documents in one, by ids, by flash-attn's cumulative lengths,
or by positions that start again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import MultiheadError
from .masks import IntervalMask, bounds_to_dense
from .modes import is_exporting_onnx, known, require
from .tensors import TensorLike, to_integers

__all__ = ["DocumentMasks", "documents"]


class DocumentMasks:
    """Several documents packed into one sequence: each query attends to the keys of its document.

    `documents(ids)`: `ids`, integers `[S]` or `[B, S]`, give the document of each position; the
    positions of a document must be neighbours. With interleaved documents attending raises; use the
    mask's `.dense(L, S)` then. `documents.from_cu_seqlens` and `documents.from_position_ids` take
    what flash-attn and transformers have instead.
    Raises: TypeError for other ids.

    >>> from multihead.masks import causal, documents
    >>> (documents([4, 4, 7]) & causal()).dense(3, 3).int().tolist()
    [[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]]
    """

    def __repr__(self) -> str:
        return "<documents(ids), documents.from_cu_seqlens, documents.from_position_ids>"

    def __call__(self, ids: TensorLike) -> IntervalMask:
        ids = to_integers("ids", ids, "[S] or [B, S], one a position", (1, 2))
        ids = ids if ids.ndim == 2 else ids[None]
        if not ids.shape[1]:
            return IntervalMask((_Documents(ids, ids, ids, True),))
        number = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        differs = ids[:, 1:] != ids[:, :-1]
        edge = torch.ones_like(ids[:, :1], dtype=torch.bool)
        start = number.where(torch.cat([edge, differs], 1), 0).cummax(1).values
        stop = (
            number.add(1)
            .where(torch.cat([differs, edge], 1), ids.shape[1])
            .flip(1)
            .cummin(1)
            .values.flip(1)
        )
        distinct = ids.sort(1).values.diff(dim=1).ne(0).sum(1)
        return IntervalMask((_Documents(ids, start, stop, known(differs.sum(1) == distinct)),))

    def from_cu_seqlens(
        self,
        cu_seqlens: TensorLike,
        cu_seqlens_k: TensorLike | None = None,
        *,
        mask: IntervalMask | None = None,
    ) -> IntervalMask:
        """The mask of packed sequences whose cumulative lengths are those of flash-attn's
        `flash_attn_varlen_func`, or of transformers' `cu_seq_lens_q` and `cu_seq_lens_k`.

        Queries `cu_seqlens[b] .. cu_seqlens[b + 1] - 1` attend to the keys `cu_seqlens_k[b] ..
        cu_seqlens_k[b + 1] - 1`. A sequence may be empty; queries whose sequence has no key give 0.

        Args:
            cu_seqlens: integers `[B + 1]` from 0 to the number L of queries, none below the one
                before.
            cu_seqlens_k: those of the keys, `[B + 1]`, from 0 to S; the same unless given.
            mask: one of distances, `causal()`, `window(...)` or both, inside each sequence, where
                the last query is at the position of the last key (flash-attn from 2.1 on: aligned
                bottom right): query i of `n_q` attends to keys 0 .. i + n_k - n_q with `causal()`.

        Raises:
            MultiheadError: lengths that don't start at 0, decrease, are of different numbers of
                sequences, or, when attending, don't end at L and S; a `mask` of single keys. With
                other `cu_seqlens_k` also `& causal()` and the like, which count over all
                sequences: give them as `mask`.
            TypeError: lengths that aren't integers `[B + 1]`, a mask of another type.

        >>> from multihead.masks import causal, documents
        >>> mask = documents.from_cu_seqlens([0, 1, 3], [0, 2, 4], mask=causal())
        >>> mask.dense(3, 4)[0, 0].int().tolist()  # one query of two keys, two queries of two
        [[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
        """
        q = _to_cumulative("cu_seqlens", cu_seqlens)
        k = None
        if cu_seqlens_k is not None and cu_seqlens_k is not cu_seqlens:
            k = _to_cumulative("cu_seqlens_k", cu_seqlens_k)
            if q.shape != k.shape:
                raise MultiheadError(
                    f"cu_seqlens has {len(q) - 1} sequences and cu_seqlens_k has {len(k) - 1}:"
                    " expected one number of them"
                )
            if known(q == k.to(q.device)) is True:
                k = None
        if mask is None:
            mask = IntervalMask()
        if not isinstance(mask, IntervalMask):
            raise TypeError(
                f"mask is a {type(mask).__name__}: expected causal(), window(...) or both"
            )
        if mask.rules:
            raise MultiheadError(
                "mask is one of single keys or with an offset for each sequence: expected"
                " causal(), window(...) or both, which all sequences share; combine others with"
                " the result, documents.from_cu_seqlens(...) & mask"
            )
        return IntervalMask((_Packed(q, k, mask.low, mask.high),))

    def from_position_ids(self, position_ids: TensorLike) -> IntervalMask:
        """The mask of packed sequences from the positions of their tokens, integers `[S]` or
        `[B, S]`, as transformers' `DataCollatorWithFlattening` gives them: a sequence starts where
        a position isn't the one before it plus 1.

        Raises:
            TypeError: others than integers of these shapes.

        >>> from multihead.masks import documents
        >>> documents.from_position_ids([0, 1, 0]).dense(3, 3)[0, 0].int().tolist()
        [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
        """
        expected = "[S] or [B, S], one a token"
        found = to_integers("position_ids", position_ids, expected, (1, 2)).to(torch.int64)
        starts = found[..., 1:] != found[..., :-1] + 1
        first = torch.ones_like(found[..., :1], dtype=torch.bool)
        return self(torch.cat([first, starts], -1).to(torch.int64).cumsum(-1))


documents = DocumentMasks()


def _to_cumulative(name: str, given: TensorLike) -> Tensor:
    """Cumulative lengths, int64 `[B + 1]`."""
    found = to_integers(name, given, "[B + 1], cumulative lengths", (1,)).to(torch.int64)
    if not len(found):
        raise MultiheadError(f"{name} is empty: expected [B + 1] numbers, the first of them 0")
    for holds, what in (
        (found[:1] == 0, "doesn't start at 0: expected the starts of all sequences and the end"),
        (found.diff() >= 0, "decreases: expected cumulative lengths, cumsum of the lengths"),
    ):
        result = known(holds)
        if result is False:
            raise MultiheadError(f"{name}={_show(found)} {what}")
        require(result, f"{name} {what}")
    return found


def _show(numbers: Tensor) -> str:
    shown = [str(n) for n in numbers[:8].tolist()]
    return f"[{', '.join(shown + ['...'] * (len(numbers) > 8))}]"


@dataclass(frozen=True, eq=False)
class _Documents:
    ids: Tensor  # [B or 1, S]
    start: Tensor  # [B or 1, S], of the document that each position belongs to
    stop: Tensor
    interval: bool | Tensor
    follows = True

    def bounds(self, at: Tensor, keys: int) -> tuple[Tensor, Tensor]:
        require(
            self.interval,
            "documents(ids) has a document in several pieces, so its keys aren't one interval; pass"
            " mask.dense(L, S) as a dense mask instead",
        )
        here, at, outside = self._here(at, keys)
        start, stop = (x.to(at.device).expand(here) for x in (self.start, self.stop))
        if not keys:
            return torch.zeros_like(at), torch.zeros_like(at)
        return start.gather(1, at).masked_fill(outside, 0), stop.gather(1, at).masked_fill(
            outside, 0
        )

    def dense(self, at: Tensor, keys: int) -> Tensor:
        here, at, outside = self._here(at, keys)
        ids = self.ids.to(at.device).expand(here)
        if not keys:
            return torch.zeros(*at.shape, 0, dtype=torch.bool, device=at.device)
        return (ids.gather(1, at)[..., None] == ids[:, None]) & ~outside[..., None]

    def _here(self, at: Tensor, keys: int) -> tuple[tuple[int, int], Tensor, Tensor]:
        """Positions of the queries within `ids`, and which of them are outside and so belong to no
        document.
        """
        count = self.ids.shape[1]
        if count != keys:
            raise MultiheadError(
                f"ids{list(self.ids.shape)} is for {count} keys, but there are S = {keys}"
            )
        batch = at.shape[0] if self.ids.shape[0] == 1 else self.ids.shape[0]
        if at.shape[0] not in (1, batch):
            raise MultiheadError(
                f"ids{list(self.ids.shape)} is for a batch of {batch}, but the offset for one of"
                f" {at.shape[0]}"
            )
        at = at.expand(batch, -1)
        return (batch, count), at.clamp(0, max(count - 1, 0)), (at < 0) | (at >= count)


@dataclass(frozen=True, eq=False)
class _Packed:
    """Sequences by their cumulative lengths. Nothing is looked up before the call, so that a
    compiled graph serves any lengths.
    """

    queries: Tensor  # int64 [B + 1]
    keys: Tensor | None  # the same, or None for those of the queries
    low: int | None  # query i of a sequence attends to keys i + low <= j < i + high, aligned at
    high: int | None  # the last of both

    @property
    def follows(self) -> bool:
        return self.keys is None

    @property
    def why_no_distances(self) -> str | None:
        """Why this rule can't be joined with masks of distances, if it can't."""
        if self.keys is None:
            return None
        return (
            "cu_seqlens_k differs from cu_seqlens, so the distance of a query to a key, which"
            " causal(), window(...) and prefix(...) count, is another in each sequence: give"
            " documents.from_cu_seqlens(cu_seqlens, cu_seqlens_k, mask=causal())"
        )

    def bounds(self, at: Tensor, keys: int) -> tuple[Tensor, Tensor]:
        of_queries = self.queries.to(at.device)
        of_keys = of_queries if self.keys is None else self.keys.to(at.device)
        if self.keys is None:
            self._check("cu_seqlens", "keys, S", of_keys, keys)
            self._check("cu_seqlens", "queries, L", of_queries, 0, at)
        else:
            self._check("cu_seqlens", "queries, L", of_queries, at.shape[-1])
            self._check("cu_seqlens_k", "keys, S", of_keys, keys)
        if len(of_queries) == 1:
            return torch.zeros_like(at), torch.zeros_like(at)
        # The sequence of a query: the number of sequences that end at or before it.
        ends = of_queries[1:]
        if is_exporting_onnx():  # which has no such search
            number = (at[..., None] >= ends).sum(-1)
        else:
            number = torch.searchsorted(ends, at.contiguous(), right=True)
        outside = (at < 0) | (number >= len(of_queries) - 1)
        number = number.clamp(max=len(of_queries) - 2)
        start, stop = of_keys[number], of_keys[number + 1]
        place = at - of_queries[number + 1] + stop  # the key at the query's position
        if self.high is not None:
            stop = torch.minimum(stop, place + self.high)
        if self.low is not None:
            start = torch.maximum(start, place + self.low)
        return start, stop.masked_fill(outside, 0)

    def dense(self, at: Tensor, keys: int) -> Tensor:
        return bounds_to_dense(*self.bounds(at, keys), torch.arange(keys, device=at.device))

    @staticmethod
    def _check(
        name: str, what: str, cumulative: Tensor, count: int, at: Tensor | None = None
    ) -> None:
        """Raise unless the sequences end at `count`, or have a place for each of `at`."""
        end = cumulative[-1]
        result = known(torch.eq(end, count) if at is None else at < end)
        if result is False:
            actual = count if at is None else int(at.max()) + 1
            raise MultiheadError(
                f"{name}={_show(cumulative)} ends at {int(end)}, but there are {actual} {what}:"
                " expected the packed sequences [1, H, total, E], and lengths that sum to total"
            )
        require(result, f"{name} doesn't end at the number of {what}")
