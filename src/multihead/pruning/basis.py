"""Changes of basis that leave attention unchanged, and the one key and value head that fit several
heads best.

Values of a head may be multiplied by any invertible matrix, which W_O undoes. So may its keys if
nothing lies between W_K and the scores; the queries undo it. With rotary positions a key consists
of pairs of numbers that rotate together, and only a rotation and a scaling of each pair commutes
with that: multiplication by one complex number a pair. So keys are handled as blocks `[blocks, e]`:
either one real block with all numbers of a head, or pairs, each of one complex number.
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
    "KeyBasis",
    "align_heads",
    "find_key_basis",
    "fit_keys",
    "fit_values",
    "init_keys",
    "key_moments",
    "principal_components",
    "value_moments",
]

ROUNDS = 6  # of alternating least squares; the error falls in each
CG_STEPS = 12  # of conjugate gradients, in each round
UNIFORM_SHARE = 0.5  # of the weights with which keys count, spread evenly


@dataclass(frozen=True)
class KeyBasis:
    """The changes of basis that the keys of a site allow.

    Attributes:
        pairs: int `[p, 2]`, numbers of a head that rotary positions rotate together.
        free: int `[f]`, numbers that any invertible matrix may mix.

    With neither, something that isn't linear (a norm) lies between W_K and the scores, and no
    change is allowed.
    """

    pairs: Tensor
    free: Tensor

    @classmethod
    def none_allowed(cls) -> KeyBasis:
        return cls(
            torch.zeros(0, 2, dtype=torch.long, device="cpu"),
            torch.zeros(0, dtype=torch.long, device="cpu"),
        )

    @property
    def is_fixed(self) -> bool:
        return not len(self.pairs) and not len(self.free)

    def to_blocks(self, x: Tensor) -> list[Tensor]:
        """`[..., E]` -> pairs `[..., p, 1]`, complex, and the free numbers `[..., 1, f]`; each if
        there are any.
        """
        blocks = []
        if len(self.pairs):
            pair = torch.complex(x[..., self.pairs[:, 0]], x[..., self.pairs[:, 1]])
            blocks.append(pair[..., None])
        if len(self.free):
            blocks.append(x[..., self.free][..., None, :])
        return blocks

    def to_matrix(self, parts: Sequence[Tensor], width: int) -> Tensor:
        """Maps of each block `[..., blocks, e, e]` -> real maps `[..., E, E]` of a head's numbers,
        for row vectors.
        """
        parts = list(parts)
        matrix = torch.zeros(*parts[0].shape[:-3], width, width, dtype=torch.float64, device="cpu")
        if len(self.pairs):
            factor = parts.pop(0)[..., 0, 0]
            a, b = self.pairs.T
            matrix[..., a, a] = matrix[..., b, b] = factor.real
            matrix[..., a, b], matrix[..., b, a] = factor.imag, -factor.imag
        if len(self.free):
            matrix[..., self.free[:, None], self.free] = parts.pop(0)[..., 0, :, :]
        return matrix


# ---- finding the basis


def find_key_basis(raw_k: Tensor, k: Tensor, raw_q: Tensor, q: Tensor) -> KeyBasis:
    """Find the allowed changes by comparing keys and queries as they left W_K and W_Q (`raw_k`,
    `raw_q`) with those in the scores, each `[B, heads, L, E]`.

    A scaling by one number for all keys (for queries: one a position) counts as no change. Numbers
    that rotate in pairs keep the length of each pair; pairs lie half a head apart (Llama) or next
    to each other (GPT-J), in all of a head or in a part of it.
    """
    if raw_k.shape != k.shape or raw_q.shape != q.shape:
        return KeyBasis.none_allowed()
    keys, queries = _rescale(raw_k, k, (1, 2)), _rescale(raw_q, q, (1,))
    if keys is None or queries is None:
        return KeyBasis.none_allowed()
    both = keys, queries
    width = raw_k.shape[-1]
    is_rotated = torch.stack([_differs(x, y) for x, y in both]).any(0)
    rotated = is_rotated.nonzero().flatten()
    if not len(rotated):
        return KeyBasis(
            torch.zeros(0, 2, dtype=torch.long, device="cpu"), torch.arange(width, device="cpu")
        )
    for numbers in (
        torch.arange(width, device="cpu"),
        torch.arange(int(rotated[0]), int(rotated[-1]) + 1, device="cpu"),
    ):
        if len(numbers) % 2:
            continue
        for pairs in (numbers.view(2, -1).T, numbers.view(-1, 2)):
            if not any(_differs(x, y, pairs).any() for x, y in both):
                is_free = torch.ones(width, dtype=torch.bool, device="cpu")
                is_free[numbers] = False
                return KeyBasis(pairs, is_free.nonzero().flatten())
    return KeyBasis.none_allowed()


def _rescale(before: Tensor, after: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor] | None:
    """Both in float64, the first scaled to the length of the second; None unless the scale is one
    number over these dimensions.
    """
    x, y = before.double(), after.double()
    ratio = y.norm(dim=-1, keepdim=True) / x.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    mean = ratio.mean(dims, keepdim=True)
    if bool((ratio - mean).abs().max() > tolerance(before.dtype, 10) * mean.abs().max()):
        return None
    return x * mean, y


def _differs(x: Tensor, y: Tensor, pairs: Tensor | None = None) -> Tensor:
    """Mask of the numbers, or lengths of pairs, that differ: bool `[E]` or `[pairs]`."""
    allowed = tolerance(y.dtype, 10) * y.square().mean().sqrt()
    if pairs is not None:
        x, y = x[..., pairs].norm(dim=-1), y[..., pairs].norm(dim=-1)
    return ((x - y).abs() > allowed).flatten(0, -2).any(0)


# ---- second moments over the calibration text


def key_moments(
    calls: Sequence[AttentionCall],
    basis: KeyBasis,
    members: Sequence[int],
    heads: Sequence[int],
    out: Tensor,
) -> list[tuple[Tensor, Tensor]]:
    """The cost of errors in the scores, by kind of block: `M` [heads, blocks, n*e, n*e] and `Q`
    [heads, blocks, e, e], for key/value heads `members` read by query heads `heads`.

    To second order the output of a query changes by the variance of the errors of its scores over
    its keys, weighted as it attends: what all keys have in common costs nothing. So `M` are the
    covariances, within queries, of the keys of `members`; each query counts by the variance of what
    its values contribute after W_O (`out` [heads, Ev, D]) and, for pairs, by its squared length.
    `Q` are second moments of the queries. As errors aren't small, and a key without attention must
    stay without, half of the weights are spread evenly over the keys that a query may attend to.
    """
    grams = out.double() @ out.double().mT  # [heads, Ev, Ev]
    sums: list[list[Tensor]] = []
    for call in calls:
        weights = _with_uniform(compute_weights(call)[:, list(heads)])
        size = call.q.shape[1] // call.k.shape[1]
        spreads = [
            _spread(weights[:, i], call.v[:, h // size], grams[i]) for i, h in enumerate(heads)
        ]
        blocks = zip(
            basis.to_blocks(call.q[:, list(heads)]),
            basis.to_blocks(call.k[:, list(members)]),
            strict=True,
        )
        for kind, (q, k) in enumerate(blocks):
            new = _block_moments(q, k, weights, spreads)
            if kind == len(sums):
                sums.append(new)
            else:
                sums[kind] = [x + y for x, y in zip(sums[kind], new, strict=True)]
    # of pairs, the length of the query is in M already
    return [
        (_floor(moment), torch.ones_like(query) if query.is_complex() else query)
        for moment, query in sums
    ]


def _with_uniform(weights: Tensor) -> Tensor:
    may_attend = (weights > 0).to(weights)
    uniform = may_attend / may_attend.sum(-1, keepdim=True).clamp(min=1)
    return (1 - UNIFORM_SHARE) * weights + UNIFORM_SHARE * uniform


def _spread(weights: Tensor, v: Tensor, gram: Tensor) -> Tensor:
    """Variance of the values a query attends to, after W_O: `[B, L]` of weights `[B, L, S]`, values
    `[B, S, Ev]` and W_O W_O^T `[Ev, Ev]`.
    """
    gram = gram.to(v)
    o = weights @ v
    squares = weights @ ((v @ gram) * v).sum(-1, keepdim=True)
    return (squares - ((o @ gram) * o).sum(-1, keepdim=True)).squeeze(-1).clamp(min=0)


def _block_moments(
    q: Tensor, k: Tensor, weights: Tensor, spreads: Sequence[Tensor]
) -> list[Tensor]:
    """M and Q of one call and one kind of block: q `[B, heads, L, blocks, e]`, k `[B, n, S, blocks,
    e]`, weights `[B, heads, L, S]`.
    """
    b, n, s, blocks, e = k.shape
    is_pairs = q.is_complex()
    stacked = k.permute(0, 2, 3, 1, 4).reshape(b, s, blocks, n * e)
    moments, queries = [], []
    for i, spread in enumerate(spreads):
        p, x = weights[:, i], q[:, i]  # [B, L, S], [B, L, blocks, e]
        w = (
            spread[..., None] * x.abs().square().sum(-1)
            if is_pairs
            else spread[..., None].expand(-1, -1, blocks)
        )
        mean = torch.einsum("bls,bskx->blkx", p.to(stacked.dtype), stacked)
        read = p.mT @ w  # [B, S, blocks]
        whole = torch.einsum("bskx,bsk,bsky->kxy", stacked.conj(), read.to(stacked.dtype), stacked)
        moments.append(
            whole - torch.einsum("blkx,blk,blky->kxy", mean.conj(), w.to(mean.dtype), mean)
        )
        queries.append(
            w.sum((0, 1))[:, None, None].to(q.dtype)
            if is_pairs
            else torch.einsum("blkx,bl,blky->kxy", x.conj(), spread, x)
        )
    dtype = torch.complex128 if is_pairs else torch.float64
    return [torch.stack(part).to(dtype) for part in (moments, queries)]


def value_moments(
    calls: Sequence[AttentionCall],
    members: Sequence[int],
    heads: Sequence[int],
    target: Sequence[Tensor] | None,
) -> tuple[Tensor, Tensor | None]:
    """Second moments of what `heads` would give with the values of each of `members`: `[heads,
    n*Ev, heads, n*Ev]`, and with `target` (by call, `[rows, D]`): `[heads, n*Ev, D]`.

    Without a target only the sum over heads of each with itself, `[n*Ev, n*Ev]`.
    """
    total, cross = (
        torch.zeros((), dtype=torch.float64, device="cpu"),
        torch.zeros((), dtype=torch.float64, device="cpu"),
    )
    for number, call in enumerate(calls):
        stacked = call.v[:, list(members)].permute(0, 2, 1, 3).flatten(2)  # [B, S, n*Ev]
        f = compute_weights(call)[:, list(heads)] @ stacked[:, None]  # [B, heads, L, n*Ev]
        if target is None:
            total = total + (f.mT @ f).double().sum((0, 1))
            continue
        f = f.permute(0, 2, 1, 3).flatten(0, 1).flatten(1)
        total = total + (f.mT @ f).double()
        cross = cross + (f.mT @ target[number]).double()
    total = _floor(total)
    if target is None:
        return total, None
    width = total.shape[0] // len(heads)
    return total.view(len(heads), width, len(heads), width), cross.view(len(heads), width, -1)


def _floor(moment: Tensor) -> Tensor:
    """Add a little to the diagonal: sums of float32 products leave directions without variance
    slightly negative, which least squares can't solve.
    """
    size = moment.diagonal(dim1=-2, dim2=-1).real.mean(-1).clamp(min=1e-30)[..., None, None]
    return moment + 1e-6 * size * torch.eye(moment.shape[-1], dtype=moment.dtype, device="cpu")


# ---- one head for several


def principal_components(moment: Tensor, metric: Tensor, width: int) -> Tensor:
    """`B` [..., n*e, width], for which k' = k B predicts k best by least squares: the first
    principal components of k with second moments `moment` [..., n*e, n*e], in the metric [..., n,
    e, e] (Eckart and Young 1936).
    """
    values, vectors = torch.linalg.eigh(metric)
    scaled = vectors * values.clamp(min=0).sqrt()[..., None, :].to(vectors.dtype)
    root = scaled @ vectors.mH  # [..., n, e, e]
    n, e = root.shape[-3], root.shape[-1]
    diagonal = torch.zeros(*root.shape[:-3], n, e, n, e, dtype=root.dtype, device="cpu")
    for m in range(n):
        diagonal[..., m, :, m, :] = root[..., m, :, :]
    diagonal = diagonal.flatten(-4, -3).flatten(-2)
    inner = diagonal @ moment @ diagonal
    components: Tensor = diagonal @ torch.linalg.eigh((inner + inner.mH) / 2)[1][..., -width:]
    return components


def align_heads(moment: Tensor, n: int) -> Tensor:
    """Rotations and scalings `[..., n, e, e]` that bring the numbers of n heads as close to each
    other as possible, given their second moments [..., n*e, n*e]: each in turn to the mean of all
    (generalised Procrustes analysis, Gower 1975).
    """
    e = moment.shape[-1] // n
    blocks = moment.unflatten(-1, (n, e)).unflatten(-3, (n, e))  # [..., n, e, n, e]
    size = torch.stack(
        [blocks[..., m, :, m, :].diagonal(dim1=-2, dim2=-1).real.sum(-1) for m in range(n)], -1
    )
    lead = int(size.flatten(0, -2).sum(0).argmax()) if size.ndim > 1 else int(size.argmax())
    eye = torch.eye(e, dtype=moment.dtype, device="cpu").expand(*moment.shape[:-2], e, e)
    turns = [eye] * n
    # the common head is the sum of the heads times these
    goal = [eye if m == lead else torch.zeros_like(eye) for m in range(n)]
    for _ in range(ROUNDS):
        for m in range(n):
            if m == lead:
                continue
            common = torch.stack([blocks[..., m, :, j, :] @ goal[j] for j in range(n)]).sum(0)
            u, _, v = torch.linalg.svd(common)  # of E[k_m^H k']
            # as long as the leading head's
            length = (size[..., lead] / size[..., m].clamp(min=1e-30)).sqrt()
            turns[m] = u @ v * length[..., None, None].to(u.dtype)
        goal = [turn / n for turn in turns]
    return torch.stack(turns, -3)


def init_keys(moment: Tensor, query: Tensor, member_of: Sequence[int], n: int) -> Tensor:
    """An initial B `[blocks, n*e, e]` for `fit_keys`: principal components, as if all heads read
    the keys alike.
    """
    e = query.shape[-1]
    metric = torch.zeros(moment.shape[1], n, e, e, dtype=moment.dtype, device="cpu")
    for h, m in enumerate(member_of):
        size = (
            moment[h].diagonal(dim1=-2, dim2=-1).real.sum(-1)[:, None, None]
            if query.is_complex()
            else 1
        )
        metric[:, m] += query[h] * size
    return principal_components(moment.sum(0), metric, e)


def fit_keys(
    moment: Tensor, query: Tensor, member_of: Sequence[int], b: Tensor
) -> tuple[Tensor, Tensor]:
    """Fit B `[blocks, n*e, e]` and maps `T` [heads, blocks, e, e] with k of each head's member ~
    k B T_h, from an initial `b`.

    Minimises sum_h tr(Q_h (e_m - B T_h)^H M_h (e_m - B T_h)) by alternating least squares.
    """
    e = query.shape[-1]
    own = torch.stack(
        [moment[h][..., m * e : (m + 1) * e] for h, m in enumerate(member_of)]
    )  # M_h e_m

    def solve_maps(b: Tensor) -> Tensor:
        inner = b.mH @ moment @ b
        size = inner.diagonal(dim1=-2, dim2=-1).real.mean(-1).clamp(min=1e-30)
        return torch.linalg.solve(
            inner + 1e-9 * size[..., None, None] * torch.eye(e, device="cpu"), b.mH @ own
        )

    t = solve_maps(b)
    for _ in range(ROUNDS):

        def apply(x: Tensor, outer: Tensor = t @ query @ t.mH) -> Tensor:
            return (moment @ x @ outer).sum(0)

        b = _conjugate_gradients(apply, (own @ query @ t.mH).sum(0), b)
        t = solve_maps(b)
    b, back = torch.linalg.qr(b)  # of the size of one head's keys
    return b, back @ t


def fit_values(
    total: Tensor, cross: Tensor, b: Tensor, ridge: float = 1e-4
) -> tuple[Tensor, Tensor]:
    """Fit B `[n*Ev, Ev]` and W_O `[heads, Ev, D]` for which sum_h F_h B W_O^(h) is closest to the
    target, from an initial `b` and the moments of F (see `value_moments`); by alternating least
    squares.
    """
    out = _solve_out(total, cross, b, ridge)
    for _ in range(ROUNDS):
        gram = torch.einsum("hed,gfd->hegf", out, out)

        def apply(x: Tensor, gram: Tensor = gram) -> Tensor:
            right = torch.einsum("xe,gehf->xghf", x, gram)  # [n*Ev, g, h, f]
            return torch.einsum("hxgy,yghf->xf", total, right)

        b = _conjugate_gradients(apply, torch.einsum("hxd,hed->xe", cross, out), b)
        out = _solve_out(total, cross, b, ridge)
    b, back = torch.linalg.qr(b)  # of the size of one head's values
    return b, back @ out


def _solve_out(total: Tensor, cross: Tensor, b: Tensor, ridge: float) -> Tensor:
    """W_O `[heads, Ev, D]` by least squares, with a ridge in proportion to the moments."""
    inner = torch.einsum("hxgy,xe,yf->hegf", total, b, b)
    heads, e = inner.shape[:2]
    inner = inner.reshape(heads * e, heads * e)
    inner = inner + ridge * inner.diagonal().mean().clamp(min=1e-30) * torch.eye(
        len(inner), device="cpu"
    )
    right = torch.einsum("hxd,xe->hed", cross, b).flatten(0, 1)
    return torch.linalg.solve(inner, right).view(heads, e, -1)


def _conjugate_gradients(apply: Callable[[Tensor], Tensor], right: Tensor, x: Tensor) -> Tensor:
    """Improve `x` as a solution of apply(x) = right; after any number of steps it is no worse."""
    rest = right - apply(x)
    step = rest
    size = rest.abs().square().sum((-2, -1), keepdim=True)
    first = size
    for _ in range(CG_STEPS):
        if bool((size <= 1e-16 * first).all()):
            break
        moved = apply(step)
        along = (step.conj() * moved).sum((-2, -1), keepdim=True).real
        rate = torch.where(along > 0, size / along.clamp(min=1e-300), 0)
        x, rest = x + rate * step, rest - rate * moved
        before, size = size, rest.abs().square().sum((-2, -1), keepdim=True)
        step = rest + torch.where(before > 0, size / before.clamp(min=1e-300), 0) * step
    return x
