"""Read out the weights that a callable really uses, whatever its code does in between.

What W_O takes is linear in what the value projection returned: `z_i = sum_j A_hij v_j` for head h.
So `d z_i / d v_j` is A_hij for every feature of the head and 0 for all others. It is measured by
adding a small matrix to W_V that changes the values of one token alone, so modules, functions and
arrays of NumPy are read alike. z is what W_O receives, or, where that can't be seen, the output
times the pseudoinverse of W_O. Whatever doesn't depend on the values (a residual, a bias) drops
out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .callee import PLAIN, Callee, CallSpec
from .projections import Assignment, Matrix, find_matrices

MAX_PROBES, MAX_CANDIDATES, MAX_SECONDS = 480, 6, 5.0
# Share of the derivative that may lie where the definition has zeros.
STRAY = 1e-4


class CannotRead(Exception):
    """The weights can't be read out; the message is the reason.

    >>> str(CannotRead("its values can't be found"))
    "its values can't be found"
    """


@dataclass(frozen=True)
class Readout:
    """Weights as read out of one sequence.

    Attributes:
        weights: A, float64 `[H, L, S]`.
        kv_heads: the value head that each head reads.
        spread: how much the features of one head differ in their weights, relative to them: above
            0 where there is a gate for each feature.
        queries, keys: what W_Q and W_K return, `[L, heads * E]`.
        rest: the output without what the values contribute by these weights, `[L, D]`.
    """

    weights: Tensor
    kv_heads: tuple[int, ...]
    spread: float
    queries: Tensor
    keys: Tensor
    rest: Tensor


@dataclass
class WeightReader:
    """Reads out weights with one assignment of matrices and one number of heads.

    >>> from multihead.checks.discover import find_callee
    >>> from multihead.checks.projections import assignments
    >>> with torch.no_grad():
    ...     callee = find_callee(nn.MultiheadAttention(8, 2, batch_first=True), {}, None)
    ...     reader = WeightReader(callee, next(assignments(callee, [2])), 2)
    ...     weights = reader.read(callee.x(1)).weights
    >>> weights.shape, bool((weights.sum(-1) - 1).abs().max() < 1e-9)
    (torch.Size([2, 5, 5]), True)
    """

    callee: Callee
    assignment: Assignment
    num_heads: int

    @property
    def head_dims(self) -> tuple[int, int]:
        """Widths of a head of queries and of values.

        Raises:
            CannotRead: the matrices don't divide into so many heads.
        """
        q, k, v = (m.weight.shape[1] for m in (self.assignment.q, self.assignment.k, self.v))
        head_dim = q // self.num_heads
        groups = k // head_dim if head_dim else 0
        if not groups or q % self.num_heads or k % head_dim or v % groups:
            raise CannotRead(f"W_Q, W_K and W_V don't divide into {self.num_heads} heads")
        return head_dim, v // groups

    @property
    def v(self) -> Matrix:
        return self.assignment.v

    def read(self, x: Tensor, spec: CallSpec = PLAIN) -> Readout:
        """The weights for `x [1, L, D]`.

        Raises:
            CannotRead: the values don't reach the output in the way of attention.
        """
        _, v_dim = self.head_dims
        seen, z, out = self._run(x, spec)
        a = self.assignment.double()
        width, num_tokens = self.v.weight.shape[1], len(seen["v"])
        if torch.linalg.matrix_rank(seen["v"]) < num_tokens:
            raise CannotRead(f"{num_tokens} tokens are more than the width of the values' input")
        if z.shape[-1] % v_dim:
            raise CannotRead("W_O doesn't take a multiple of the width of a head's values")
        step = -(-width * num_tokens // MAX_PROBES)
        channels = range(0, width, step)
        change = self._changes(x, spec, seen["v"], channels)
        weights, kv_heads, spread = _to_heads(change, channels, v_dim)
        values = a.v(seen["v"]).unflatten(-1, (-1, v_dim))[:, list(kv_heads)]
        merged = torch.einsum("hls,shd->lhd", weights, values).flatten(1)
        rest = out - (merged if a.o is None else merged @ a.o.weight)
        return Readout(weights, kv_heads, spread, a.q(seen["q"]), a.k(seen["k"]), rest)

    def _changes(self, x: Tensor, spec: CallSpec, u: Tensor, channels: Sequence[int]) -> Tensor:
        """`d z_i / d v_jc`, `[S, channels, L, H * Ev]`."""
        target = _find_target(self.callee, self.v)
        tokens = torch.linalg.pinv(u)  # [D, S]: u @ tokens[:, j] is 1 for token j, 0 for others
        columns = list(range(self.v.weight.shape[1]))
        if self.v.index is not None:
            columns = self.v.index.tolist()
        before, (_, z, _) = target.clone(), self._run(x, spec)
        if not z.isfinite().all():
            raise CannotRead("its output isn't finite")

        def changed(token: int, channel: int, size: float = 1.0) -> Tensor:
            target[:, columns[channel]] += size * tokens[:, token].to(target)
            try:
                return self._run(x, spec)[1] - z
            finally:
                target.copy_(before)

        changes = torch.stack(
            [torch.stack([changed(j, c) for c in channels]) for j in range(tokens.shape[1])]
        )
        largest = changes.abs().max()
        if not largest > 1e-9:
            raise CannotRead(f"{self.v.name} has no influence on what W_O takes")
        for j in range(tokens.shape[1]):
            twice = changed(j, channels[0], 2.0)
            if not (twice - 2 * changes[j, 0]).abs().max() <= STRAY * largest:
                raise CannotRead("the output isn't linear in the values")
        return changes

    def _run(self, x: Tensor, spec: CallSpec) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Inputs of W_Q, W_K and W_V, `[L, D]`; what W_O takes, `[L, H * Ev]`; the output."""
        modules = {} if self.callee.module is None else dict(self.callee.module.named_modules())
        a, handles, seen = self.assignment, [], {}

        def catch(who: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
                if args:
                    seen[who] = args[0].detach()

            return hook

        for who, matrix in {"q": a.q, "k": a.k, "v": a.v, "o": a.o}.items():
            module = modules.get(matrix.name) if matrix is not None else None
            if module is not None:
                handles.append(module.register_forward_pre_hook(catch(who)))
        try:
            out = self.callee(x, spec=spec)[0]
        finally:
            for handle in handles:
                handle.remove()
        keys, values = self.callee.keys(x)
        direct = {"q": x[0], "k": keys[0], "v": values[0]}
        inputs = {}
        for who, matrix in {"q": a.q, "k": a.k, "v": a.v}.items():
            got = _as_rows(seen.get(who, direct[who]), matrix.weight.shape[0])
            inputs[who] = direct[who] if got is None else got
            if inputs[who].shape[1] != matrix.weight.shape[0]:
                raise CannotRead(f"{matrix.name} takes something else than the inputs")
        z = None
        if a.o is not None and "o" in seen:
            z = _as_rows(seen["o"], a.o.weight.shape[0])
            z = z if z is not None and len(z) == len(out) else None
        if z is None:
            z = out if a.o is None else _undo(out, a.o)
        return inputs, z, out


def find_reader(
    callee: Callee, options: Sequence[Assignment], head_counts: Sequence[int]
) -> WeightReader:
    """The first assignment and number of heads with which weights can be read out.

    Raises:
        CannotRead: none; the message is the reason of the first.
    """
    reasons: list[str] = []
    deadline = time.monotonic() + MAX_SECONDS
    for assignment in _distinct(options):
        for num_heads in head_counts:
            reader = WeightReader(callee, assignment, num_heads)
            try:
                # Heads of one feature can be read out of everything, a gate included.
                if len(head_counts) > 1 and reader.head_dims[1] == 1:
                    continue
                if reader.read(callee.x(1, size=0.5)).spread < STRAY:
                    return reader
                reasons.append("the features of a head have different weights, as with a gate")
            except CannotRead as error:
                reasons.append(str(error))
            except (RuntimeError, IndexError) as error:  # shapes that don't fit
                reasons.append(" ".join(str(error).split())[:100])
            if time.monotonic() > deadline:
                break
    raise CannotRead(reasons[0] if reasons else "no value projection was found")


def _distinct(options: Sequence[Assignment]) -> Iterator[Assignment]:
    """The first of those that differ in their values or W_O."""
    seen: set[Any] = set()
    for each in options:
        index = None if each.v.index is None else tuple(each.v.index.tolist())
        how = "" if each.how != "transposed" else each.how
        key = (each.v.name, index, each.o and each.o.name, how)
        if key not in seen and len(seen) < MAX_CANDIDATES:
            seen.add(key)
            yield each


def _find_target(callee: Callee, matrix: Matrix) -> Tensor:
    """The matrix that the callable multiplies with, to be changed in place.

    Raises:
        CannotRead: it is made of several, or only a copy of it can be had.
    """
    fused = next((m for m in find_matrices(callee) if m.name == matrix.name), None)
    if fused is None:
        raise CannotRead(f"{matrix.name} can't be changed")
    return (matrix.weight if matrix.index is None else fused.weight).detach()


def _as_rows(t: Tensor, width: int) -> Tensor | None:
    """What a module took, of one sequence, as `[L, width]`; None where it isn't that."""
    if t.ndim == 3 and t.shape[-1] != width and t.shape[1] == width:  # Conv1d
        t = t.mT
    return t.reshape(-1, width).double() if t.ndim >= 2 and t.shape[-1] == width else None


def _undo(out: Tensor, o: Matrix) -> Tensor:
    """What W_O took, up to what doesn't depend on it.

    Raises:
        CannotRead: W_O loses some of it.
    """
    weight = o.weight.detach().double()
    if out.shape[-1] != weight.shape[1] or torch.linalg.matrix_rank(weight) < weight.shape[0]:
        raise CannotRead(f"what {o.name} takes can't be derived from the output")
    return out @ torch.linalg.pinv(weight)


def _to_heads(
    changes: Tensor, channels: Sequence[int], v_dim: int
) -> tuple[Tensor, tuple[int, ...], float]:
    """Weights `[H, L, S]`, the value head of each head, and the spread among a head's features.

    Raises:
        CannotRead: features influence others than those of their place in a head.
    """
    num_heads = changes.shape[-1] // v_dim
    groups = sorted({c // v_dim for c in channels})
    used, weights, kv_heads, spread = 0.0, [], [], 0.0
    for h in range(num_heads):
        by_group = {
            g: torch.stack(
                [
                    changes[:, n, :, h * v_dim + c % v_dim].mT
                    for n, c in enumerate(channels)
                    if c // v_dim == g
                ]
            )
            for g in groups
        }
        g = max(by_group, key=lambda g: float(by_group[g].square().sum()))
        a = by_group[g].mean(0)
        used += float(by_group[g].square().sum())
        spread = max(spread, float((by_group[g] - a).norm() / by_group[g].norm().clamp_min(1e-30)))
        weights.append(a)
        kv_heads.append(g)
    stray = max(0.0, 1 - used / float(changes.square().sum())) ** 0.5
    if stray > STRAY:
        raise CannotRead(
            f"features of the values reach others than their own, by {stray:.2g} of the derivative"
        )
    return torch.stack(weights), tuple(kv_heads), spread
