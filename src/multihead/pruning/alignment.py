"""The mathematics of sharing: changes of basis that leave attention as it is, and the one key and
value that do best for several.

A head's values may be turned by any invertible map, which W_O undoes. So may its keys where nothing
stands between W_K and the scores, and the queries undo it. Under rotary positions a key is made of
pairs of numbers that turn together, and what commutes
with turning is a turn and a scaling of each pair: in complex numbers, one factor a pair. Everything
    here is told in these
terms: keys are blocks, either all numbers of a head (real) or pairs (one complex number each).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..models.introspect import tolerance
from ..ops.call import AttentionCall
from ..ops.functional import compute_weights

__all__ = [
    "Geometry",
    "align",
    "fit_keys",
    "fit_values",
    "geometry",
    "key_moments",
    "principal",
    "start_keys",
    "value_moments",
]

ROUNDS = 6  # of alternating least squares; the error falls at each
EVEN = 0.5  # of the weights by which keys count
STEPS = 12  # of conjugate gradients in each


@dataclass(frozen=True)
class Geometry:
    """Which changes of basis the keys of a site allow.

    `pairs` [p, 2]: numbers of a head that rotary positions turn together. `free`: those that any
    invertible map may mix.
    Neither: something that isn't linear (a norm) stands between W_K and the scores, and no change
        is allowed.
    """

    pairs: Tensor
    free: Tensor

    @property
    def fixed(self) -> bool:
        return not len(self.pairs) and not len(self.free)

    def blocks(self, x: Tensor) -> list[Tensor]:
        """`[..., E]` -> the pairs `[..., p, 1]` as complex numbers, and the free numbers `[..., 1,
        f]`.
        """
        found = []
        if len(self.pairs):
            found.append(
                torch.complex(x[..., self.pairs[:, 0]], x[..., self.pairs[:, 1]])[..., None]
            )
        if len(self.free):
            found.append(x[..., self.free][..., None, :])
        return found

    def matrix(self, parts: Sequence[Tensor], width: int) -> Tensor:
        """Maps of each block `[..., blocks, e, e]` -> real maps `[..., E, E]` of a head's numbers,
        as row vectors take them.
        """
        parts = list(parts)
        found = torch.zeros(*parts[0].shape[:-3], width, width, dtype=torch.float64)
        if len(self.pairs):
            factor = parts.pop(0)[..., 0, 0]
            a, b = self.pairs.T
            found[..., a, a] = found[..., b, b] = factor.real
            found[..., a, b], found[..., b, a] = factor.imag, -factor.imag
        if len(self.free):
            found[..., self.free[:, None], self.free] = parts.pop(0)[..., 0, :, :]
        return found


def geometry(before: Tensor, after: Tensor, queries: tuple[Tensor, Tensor]) -> Geometry:
    """Found by looking: `before` `[B, G, S, E]` are keys as they left W_K, `after` those in the
    scores; queries likewise.

    A scaling by one number for all (of queries: one for all heads) counts as nothing. Numbers that
    turn in pairs keep the length of each pair, whether pairs lie half a head apart (Llama) or side
    by side (GPT-J), in all of a head or in a part.
    """
    nothing = Geometry(torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, dtype=torch.long))
    if before.shape != after.shape or queries[0].shape != queries[1].shape:
        return nothing
    both = [_scaled(before, after, (1, 2)), _scaled(*queries, (1,))]
    if None in both:
        return nothing
    width = before.shape[-1]
    turned = torch.stack([_differs(x, y, ()) for x, y in both]).any(0)  # type: ignore[misc]
    where = turned.nonzero().flatten()
    if not len(where):
        return Geometry(nothing.pairs, torch.arange(width))
    for numbers in (torch.arange(width), torch.arange(int(where[0]), int(where[-1]) + 1)):
        if len(numbers) % 2:
            continue
        for pairs in (numbers.view(2, -1).T, numbers.view(-1, 2)):
            if not any(_differs(x, y, pairs).any() for x, y in both):  # type: ignore[misc]
                free = torch.ones(width, dtype=torch.bool)
                free[numbers] = False
                return Geometry(pairs, free.nonzero().flatten())
    return nothing


def _scaled(before: Tensor, after: Tensor, over: tuple[int, ...]) -> tuple[Tensor, Tensor] | None:
    """Both in float64 with the scaling taken out; None where it isn't one number over these
    axes.
    """
    x, y = before.double(), after.double()
    ratio = y.norm(dim=-1, keepdim=True) / x.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    mean = ratio.mean(over, keepdim=True)
    if bool((ratio - mean).abs().max() > tolerance(before.dtype, 10) * mean.abs().max()):
        return None
    return x * mean, y


def _differs(x: Tensor, y: Tensor, pairs: Tensor | tuple[()]) -> Tensor:
    """Which numbers, or pairs' lengths, differ: bool `[E]` or `[pairs]`."""
    allowed = tolerance(y.dtype, 10) * y.square().mean().sqrt()
    if isinstance(pairs, Tensor):
        x, y = x[..., pairs].norm(dim=-1), y[..., pairs].norm(dim=-1)
    return ((x - y).abs() > allowed).flatten(0, -2).any(0)


# ---- moments over a calibration text


def key_moments(
    calls: Sequence[AttentionCall],
    shape: Geometry,
    members: Sequence[int],
    heads: Sequence[int],
    out: Tensor,
) -> list[tuple[Tensor, Tensor]]:
    """What an error in the scores costs, for each kind of block: `M` [heads, blocks, n*e, n*e] and
    `Q` [heads, blocks, e, e].

    To second order a row's weights change by the variance of the errors of its scores, taken over
    the keys with the weights
    that it gives them: what all keys have in common costs nothing, and a key counts as it is read.
        So M are the covariances
    within rows of the keys of `members`, each row with the weight of what its values differ by
    behind W_O (`out` [heads, Ev, D]) and, for pairs, of its query's squared length. Q are the
    second moments of the queries. Errors aren't small, and a key
    that nobody reads must stay so: half of the weights are spread evenly over what a row may read.
    """
    grams = out.double() @ out.double().mT  # [heads, Ev, Ev]
    found: list[list[Tensor]] = []
    for call in calls:
        weights = _softened(compute_weights(call)[:, list(heads)])
        each = call.q.shape[1] // call.k.shape[1]
        parts = zip(
            shape.blocks(call.q[:, list(heads)]),
            shape.blocks(call.k[:, list(members)]),
            strict=True,
        )
        rows = []
        for at, h in enumerate(heads):
            v, gram = call.v[:, h // each], grams[at].to(call.v)
            o = weights[:, at] @ v
            spread = weights[:, at] @ ((v @ gram) * v).sum(-1, keepdim=True) - ((o @ gram) * o).sum(
                -1, keepdim=True
            )
            rows.append(spread.squeeze(-1).clamp(min=0))  # [B, L]
        for kind, (q, k) in enumerate(parts):
            b, n, s, blocks, e = k.shape
            pairs = q.is_complex()
            stacked = k.permute(0, 2, 3, 1, 4).reshape(b, s, blocks, n * e)
            sums: list[list[Tensor]] = [[], []]
            for at in range(len(heads)):
                p, r, mine = (
                    weights[:, at],
                    rows[at],
                    q[:, at],
                )  # [B, L, S], [B, L], [B, L, blocks, e]
                w = (
                    r[..., None] * mine.abs().square().sum(-1)
                    if pairs
                    else r[..., None].expand(-1, -1, blocks)
                )
                mean = torch.einsum("bls,bskx->blkx", p.to(stacked.dtype), stacked)
                read = p.mT @ w  # [B, S, blocks]
                whole = torch.einsum(
                    "bskx,bsk,bsky->kxy", stacked.conj(), read.to(stacked.dtype), stacked
                )
                whole = whole - torch.einsum(
                    "blkx,blk,blky->kxy", mean.conj(), w.to(mean.dtype), mean
                )
                sums[0].append(whole)
                sums[1].append(
                    w.sum((0, 1))[:, None, None].to(q.dtype)
                    if pairs
                    else torch.einsum("blkx,bl,blky->kxy", mine.conj(), r, mine)
                )
            new = [torch.stack(x).to(torch.complex128 if pairs else torch.float64) for x in sums]
            if kind == len(found):
                found.append(new)
            else:
                found[kind] = [x + y for x, y in zip(found[kind], new, strict=True)]
    result = []
    for moment, query in found:
        moment = _floored(moment)
        if query.is_complex():  # the query's length is in M already
            result.append((moment, torch.ones_like(query)))
        else:
            result.append((moment, query))
    return result


def _softened(weights: Tensor) -> Tensor:
    may = (weights > 0).to(weights)
    return (1 - EVEN) * weights + EVEN * may / may.sum(-1, keepdim=True).clamp(min=1)


def value_moments(
    calls: Sequence[AttentionCall],
    members: Sequence[int],
    heads: Sequence[int],
    target: Sequence[Tensor] | None,
) -> tuple[Tensor, Tensor | None]:
    """Second moments of what `heads` would give with each of `members`' values: `[heads, n*Ev,
    heads, n*Ev]`, and with the `target` (by call, [rows, D]) `[heads, n*Ev, D]`. Without a target
    the sum over heads of each with itself, `[n*Ev, n*Ev]`.
    """
    total, cross = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for number, call in enumerate(calls):
        stacked = call.v[:, list(members)].permute(0, 2, 1, 3).flatten(2)  # [B, S, n*Ev]
        f = compute_weights(call)[:, list(heads)] @ stacked[:, None]  # [B, heads, L, n*Ev]
        if target is None:
            total = total + (f.mT @ f).double().sum((0, 1))
            continue
        f = f.permute(0, 2, 1, 3).flatten(0, 1).flatten(1)
        total = total + (f.mT @ f).double()
        cross = cross + (f.mT @ target[number]).double()
    total = _floored(total)
    if target is None:
        return total, None
    width = total.shape[0] // len(heads)
    return total.view(len(heads), width, len(heads), width), cross.view(len(heads), width, -1)


# ---- one for several


def principal(moment: Tensor, weight: Tensor, width: int) -> Tensor:
    """`B` [..., n*e, width] of the k' = k B from which least squares give k best: the first
    principal components of k in the metric `weight` [..., n, e, e], k having the second moments
    `moment` [..., n*e, n*e]. (Eckart, Young 1936.)
    """
    values, vectors = torch.linalg.eigh(weight)
    root = (
        vectors * values.clamp(min=0).sqrt()[..., None, :].to(vectors.dtype)
    ) @ vectors.mH  # [..., n, e, e]
    n, e = root.shape[-3], root.shape[-1]
    large = torch.zeros(*root.shape[:-3], n, e, n, e, dtype=root.dtype)
    for m in range(n):
        large[..., m, :, m, :] = root[..., m, :, :]
    large = large.flatten(-4, -3).flatten(-2)
    inner = large @ moment @ large
    found: Tensor = large @ torch.linalg.eigh((inner + inner.mH) / 2)[1][..., -width:]
    return found


def align(moment: Tensor, n: int) -> Tensor:
    """Turns and scalings `[..., n, e, e]` that bring n heads' numbers as near to one another as
    they come, on average over what `moment` [..., n*e, n*e] was taken of: each to the mean of all,
    until it settles. (Generalised Procrustes analysis, Gower 1975.)
    """
    e = moment.shape[-1] // n
    blocks = moment.unflatten(-1, (n, e)).unflatten(-3, (n, e))  # [..., n, e, n, e]
    size = torch.stack(
        [blocks[..., m, :, m, :].diagonal(dim1=-2, dim2=-1).real.sum(-1) for m in range(n)], -1
    )
    lead = int(size.flatten(0, -2).sum(0).argmax()) if size.ndim > 1 else int(size.argmax())
    eye = torch.eye(e, dtype=moment.dtype).expand(*moment.shape[:-2], e, e)
    turns = [eye] * n
    goal = [
        eye if m == lead else torch.zeros_like(eye) for m in range(n)
    ]  # of which the common one is the sum
    for _ in range(ROUNDS):
        for m in range(n):
            if m == lead:
                continue
            u, _, v = torch.linalg.svd(
                torch.stack([blocks[..., m, :, j, :] @ goal[j] for j in range(n)]).sum(0)
            )  # E[k_m^H k']
            length = (
                size[..., lead] / size[..., m].clamp(min=1e-30)
            ).sqrt()  # as long as the leading one's
            turns[m] = u @ v * length[..., None, None].to(u.dtype)
        goal = [turn / n for turn in turns]
    return torch.stack(turns, -3)


def start_keys(moment: Tensor, query: Tensor, member_of: Sequence[int], n: int) -> Tensor:
    """A first B `[blocks, n*e, e]` for `fit_keys`: principal components, as if all heads read the
    keys alike.
    """
    e = query.shape[-1]
    weight = torch.zeros(moment.shape[1], n, e, e, dtype=moment.dtype)
    for h, m in enumerate(member_of):
        size = (
            moment[h].diagonal(dim1=-2, dim2=-1).real.sum(-1)[:, None, None]
            if query.is_complex()
            else 1
        )
        weight[:, m] += query[h] * size
    return principal(moment.sum(0), weight, e)


def fit_keys(
    moment: Tensor, query: Tensor, member_of: Sequence[int], b: Tensor
) -> tuple[Tensor, Tensor]:
    """From a first `b` [blocks, n*e, e] -> B and the maps `T` [heads, blocks, e, e] with k of each
    head's member ~ k B T_h, that minimise sum_h tr(Q_h (e_m - B T_h)^H M_h (e_m - B T_h)), by
    alternating least squares.
    """
    e = query.shape[-1]
    mine = torch.stack(
        [moment[h][..., m * e : (m + 1) * e] for h, m in enumerate(member_of)]
    )  # M_h e_m

    def maps(b: Tensor) -> Tensor:
        inner = b.mH @ moment @ b
        ridge = (
            1e-9 * inner.diagonal(dim1=-2, dim2=-1).real.mean(-1).clamp(min=1e-30)[..., None, None]
        )
        return torch.linalg.solve(inner + ridge * torch.eye(e), b.mH @ mine)

    t = maps(b)
    for _ in range(ROUNDS):

        def apply(x: Tensor, outer: Tensor = t @ query @ t.mH) -> Tensor:
            return (moment @ x @ outer).sum(0)

        b = _gradients(apply, (mine @ query @ t.mH).sum(0), b)
        t = maps(b)
    b, back = torch.linalg.qr(b)  # as large as one of the heads
    return b, back @ t


def fit_values(
    total: Tensor, cross: Tensor, b: Tensor, ridge: float = 1e-4
) -> tuple[Tensor, Tensor]:
    """From a first `b` [n*Ev, Ev] -> B and W_O `[heads, Ev, D]` for which sum_h F_h B W_O^(h) is
    nearest the target, given the moments of F (see `value_moments`); by alternating least
    squares.
    """
    out = solve_out(total, cross, b, ridge)
    for _ in range(ROUNDS):
        gram = torch.einsum("hed,gfd->hegf", out, out)

        def apply(x: Tensor, gram: Tensor = gram) -> Tensor:
            right = torch.einsum("xe,gehf->xghf", x, gram)  # [n*Ev, g, h, f]
            return torch.einsum("hxgy,yghf->xf", total, right)

        b = _gradients(apply, torch.einsum("hxd,hed->xe", cross, out), b)
        out = solve_out(total, cross, b, ridge)
    b, back = torch.linalg.qr(b)  # as large as one of the heads
    return b, back @ out


def solve_out(total: Tensor, cross: Tensor, b: Tensor, ridge: float) -> Tensor:
    """W_O `[heads, Ev, D]` by least squares, with a ridge in proportion."""
    inner = torch.einsum("hxgy,xe,yf->hegf", total, b, b)
    heads, e = inner.shape[:2]
    inner = inner.reshape(heads * e, heads * e)
    inner = inner + ridge * inner.diagonal().mean().clamp(min=1e-30) * torch.eye(len(inner))
    return torch.linalg.solve(inner, torch.einsum("hxd,xe->hed", cross, b).flatten(0, 1)).view(
        heads, e, -1
    )


def _floored(moment: Tensor) -> Tensor:
    """Sums of float32 products leave directions that nothing varies in a little below zero, which
    no least squares bears.
    """
    size = moment.diagonal(dim1=-2, dim2=-1).real.mean(-1).clamp(min=1e-30)[..., None, None]
    return moment + 1e-6 * size * torch.eye(moment.shape[-1], dtype=moment.dtype)


def _gradients(apply: Callable[[Tensor], Tensor], right: Tensor, x: Tensor) -> Tensor:
    """Conjugate gradients for apply(x) = right, from x on: any number of steps gives something no
    worse.
    """
    rest = right - apply(x)
    step = rest
    size = rest.abs().square().sum((-2, -1), keepdim=True)
    first = size
    for _ in range(STEPS):
        if bool((size <= 1e-16 * first).all()):
            break
        moved = apply(step)
        along = (step.conj() * moved).sum((-2, -1), keepdim=True).real
        rate = torch.where(along > 0, size / along.clamp(min=1e-300), 0)
        x, rest = x + rate * step, rest - rate * moved
        before, size = size, rest.abs().square().sum((-2, -1), keepdim=True)
        step = rest + torch.where(before > 0, size / before.clamp(min=1e-300), 0) * step
    return x
