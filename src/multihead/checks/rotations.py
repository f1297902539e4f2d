"""Positions that enter by rotations of queries and keys, measured by other queries and keys.

Where log A is bilinear in q_i and k_j up to a constant of each row, with M_ij for each pair of
positions,

    log A_ij - log A_ir = q_i M_ij k_j' - q_i M_ir k_r' + c_ij,

M_ij follows from weights with many q_i and k_j, the key of one token r kept. What W_Q and W_K
return is changed for that, and A read in one run, with values that are 1 in the feature of their
token. Rotary positions (Su et al., 2021) have M_ij = s R^(i - j), R a rotation, s the scale.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .evidence import Evidence, Judged
from .finding import BugName
from .position_terms import describe_bias
from .readout import CannotRead

MAX_WIDTH, SPARE = 32, 20  # of a head; runs more than there are unknowns
FITS, CLOSE = 1e-5, 1e-4  # relative residual; relative difference of two matrices
LEAST = 1e-100  # of a weight that isn't 0
USUAL_BASES = (10000.0,)
SCALED = r"yarn|mscale|attention_(factor|scaling)|xpos|log_?n"
ROTARY_NAMES = r"rotary|rope|rotate_(half|every)"
LOOK = "Queries and keys must both be rotated, each by its own position and in the same direction."


@dataclass(frozen=True)
class Bilinear:
    """The value of log A for each pair of a query and a key, NaN where that isn't known.

    Attributes:
        matrices: M `[H, L, S, E, E]`.
        constants: c `[H, L, S]`.
        of_queries: the terms of the query alone, minus M_ir k_r', `[H, L, S, E]`.
        reference, kept: the token r, and its key `[H, E]`.
    """

    matrices: Tensor
    constants: Tensor
    of_queries: Tensor
    reference: int
    kept: Tensor


def measure_bilinear(evidence: Evidence) -> Bilinear | None:
    """M of each pair; None where log A isn't bilinear in queries and keys.

    Raises:
        CannotRead: queries, keys or values can't be changed.
    """
    base = evidence.readouts[0]
    # Finds the products again: the last run may have been one with other matrices.
    evidence.reader.read_queries_and_keys(evidence.inputs[0])
    length, size = base.weights.shape[1:]
    width = evidence.head_dim
    generator = torch.Generator().manual_seed(0)

    def draw(like: Tensor) -> Tensor:
        t = torch.randn(1, like.shape[1], generator=generator, dtype=torch.float64)
        return t.expand(len(like), -1).clone()

    same = _read(evidence, base.queries, base.keys)
    if same.shape != base.weights.shape or not torch.allclose(same, base.weights, atol=1e-9):
        return None  # something else is done with what W_Q, W_K and W_V return
    reads = _read(evidence, draw(base.queries), draw(base.keys)) > LEAST  # [H, L, S]
    reference = int(reads.all(0).sum(0).argmax())
    kept = draw(base.keys)[reference]
    queries, keys, weights = [], [], []
    for _ in range((width + 1) ** 2 + SPARE):
        q, k = draw(base.queries), draw(base.keys)
        k[reference] = kept
        queries.append(q)
        keys.append(k)
        weights.append(_read(evidence, q, k))
    reads &= (torch.stack(weights) > LEAST).all(0)
    logs = torch.stack(weights).clamp_min(LEAST).log()
    logs = logs - logs[..., reference : reference + 1]
    q_heads, k_heads = evidence.split(queries, keys)
    other = (reference + 1) % size
    known = reads & reads[..., reference : reference + 1]
    known[..., reference] = False
    if not known.any((1, 2)).all():
        return None
    shape = (len(reads), length, size)
    matrices = torch.full((*shape, width, width), torch.nan, dtype=torch.float64)
    of_queries, constants = matrices[..., 0].clone(), matrices[..., 0, 0].clone()
    k_heads = k_heads.repeat_interleave(len(reads) // k_heads.shape[1], 1)
    for h in range(len(reads)):
        q = q_heads[:, h, 0]
        k = k_heads[:, h, other]
        q, k = (torch.cat([t, torch.ones_like(t[:, :1])], 1) for t in (q, k))
        design = (q[:, :, None] * k[:, None]).flatten(1)
        target = logs[:, h][:, known[h]]
        solution = torch.linalg.lstsq(design, target).solution
        if not (design @ solution - target).norm() <= FITS * target.norm():
            return None
        found = solution.T.unflatten(-1, (width + 1, width + 1))
        if found[:, -1, :-1].abs().max() > FITS * found.abs().max():
            return None  # terms of keys alone
        matrices[h, known[h]] = found[:, :-1, :-1]
        of_queries[h, known[h]] = found[:, :-1, -1]
        constants[h, known[h]] = found[:, -1, -1]
    constants[..., reference] = torch.where(reads[..., reference], 0.0, torch.nan)
    return Bilinear(matrices, constants, of_queries, reference, k_heads[0, :, reference])


def _read(evidence: Evidence, q: Tensor, k: Tensor) -> Tensor:
    """A `[H, L, S]` with these queries and keys `[L, heads * E]`."""
    base, v_dim = evidence.readouts[0], evidence.reader.head_dims[1]
    size, width = base.values.shape
    weights = torch.zeros(len(base.weights), len(q), size, dtype=torch.float64)
    for start in range(0, size, v_dim):
        values = torch.zeros(size, width // v_dim, v_dim, dtype=torch.float64)
        some = range(start, min(start + v_dim, size))
        values[some, :, range(len(some))] = 1.0
        changes = {"q in": q - base.queries, "k in": k - base.keys}
        changes["v"] = values.flatten(1) - base.values
        z = evidence.reader.run_changed(evidence.inputs[0], changes)
        weights[..., some] = z.unflatten(-1, (-1, v_dim)).transpose(0, 1)[..., : len(some)]
    return weights


@dataclass(frozen=True)
class Rotations:
    """The rest to judge: the scale of each head `[H]`, and words of the rest."""

    slopes: Tensor
    words: str


def judge_rotations(judged: Judged, evidence: Evidence) -> Rotations | bool:
    """Judge whether positions enter by a rotation of i - j; False where they enter in another way,
    True where that is judged already.
    """
    if evidence.head_dim > MAX_WIDTH:
        return False
    try:
        found = measure_bilinear(evidence)
    except CannotRead:
        return False
    if found is None:
        return False
    m = found.matrices
    pairs = m.isfinite().flatten(3).all(-1).all(0)
    at: list[tuple[int, int]] = [(i, j) for i, j in pairs.nonzero().tolist()]
    size = m[:, pairs].norm(dim=(-2, -1)).mean(-1)[:, None, None]
    slopes = size[:, 0, 0] / evidence.head_dim**0.5

    def depends_on(group: Mapping[tuple[int, int], int]) -> bool:
        """Whether M is the same for pairs of the same group, each of several."""
        if len(set(group.values())) == len(group):
            return False
        first: dict[int, Tensor] = {}
        differences = [m[:, i, j] - first.setdefault(g, m[:, i, j]) for (i, j), g in group.items()]
        return bool(torch.stack(differences).abs().max() <= CLOSE * size.max())

    eye = torch.eye(evidence.head_dim, dtype=torch.float64)
    some = m[:, pairs]
    square = some.mT @ some / slopes.square()[:, None, None, None]
    distances = {(i, j): i - j for i, j in at}
    if not (square - eye).abs().max() <= CLOSE:
        # a factor of each pair (a temperature that grows with the position) is no wrong rotation
        factors = square.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        if bool(((square - factors * eye).abs() > CLOSE * factors).any()):
            return _judge_unturned(judged, evidence, m, at, depends_on(distances))
        return False
    if depends_on(dict.fromkeys(at, 0)) or len(set(distances.values())) == len(at):
        return False  # the same for all, or too few are known
    for words, group in (
        ("the query alone", {p: p[0] for p in at}),
        ("the key alone", {p: p[1] for p in at}),
        ("the sum i + j", {p: sum(p) for p in at}),
    ):
        if depends_on(group):
            (i, j), (k, l) = _show(at, group)
            judged.find(
                BugName.ROTARY,
                f"Scores are q M k' with a rotation M that depends on {words}, not on the distance"
                f" i - j: in head 0, M[0, 0] is {m[0, i, j, 0, 0]:.4g} for query {i} and key {j},"
                f" and {m[0, k, l, 0, 0]:.4g} for query {k} and key {l}.",
                evidence.example,
                LOOK,
            )
            return True
    if not depends_on(distances):
        judged.unjudged.append(
            "positions: they enter by rotations of queries and keys, but by no function of i - j"
        )
        return True
    by_distance = {i - j: m[:, i, j] / slopes[:, None, None] for i, j in at}
    for i, j in at:
        if (r := by_distance.get(i - found.reference)) is not None:
            expected = -slopes[:, None] * (r @ found.kept[..., None])[..., 0]
            if (
                not (found.of_queries[:, i, j] - expected).abs().max()
                <= CLOSE * expected.abs().max()
            ):
                return False  # further terms of the queries
    one = by_distance.get(1)
    powers = one is not None and all(
        (r @ one - by_distance[d + 1]).abs().max() <= CLOSE
        for d, r in by_distance.items()
        if d + 1 in by_distance
    )
    if one is None or not powers or not (by_distance.get(0, eye) - eye).abs().max() <= CLOSE:
        judged.unjudged.append(
            "positions: they enter by a rotation that depends on i - j alone, but not by that of"
            " one step, as often as there are steps"
        )
        return True
    angles = _angles(one)
    if (source := _name_angles(evidence.module, angles, evidence.head_dim)) is None:
        words = ", ".join(f"{a:.4g}" for a in angles[0].tolist())
        judged.unjudged.append(
            f"the angles of the rotation by which positions enter: {words} for a step, in head 0,"
            " are no powers of a base that the code states, and no parameter"
        )
    if names := evidence.declared(SCALED):
        judged.unjudged.append(f"the scale, {slopes[0]:.4g}: another may be meant ({names[0]})")
        return True
    bias = ""
    if found.constants.nan_to_num(0.0).abs().max() > CLOSE:
        bias = describe_bias(judged, evidence, found.constants)
    by = f" ({source})" if source else ""
    return Rotations(slopes, f", where positions enter by a rotation of i - j{by}{bias}")


def _judge_unturned(
    judged: Judged, evidence: Evidence, m: Tensor, at: list[tuple[int, int]], by_distance: bool
) -> bool:
    """Judge an M `[H, L, S, E, E]` that isn't a multiple of a rotation: wrong if the code names
    rotary positions and M isn't that of the distance either. Whether it was judged.
    """
    names = evidence.declared(ROTARY_NAMES)
    if not names or by_distance or evidence.declared(SCALED):
        return False
    first: dict[int, tuple[int, int]] = {}
    pairs = [(first.setdefault(i - j, (i, j)), (i, j)) for i, j in at]
    (i, j), (k, l) = max(pairs, key=lambda p: float((m[0][p[0]] - m[0][p[1]]).abs().max()))
    place = int((m[0, i, j] - m[0, k, l]).abs().argmax())
    row, column = divmod(place, m.shape[-1])
    judged.find(
        BugName.ROTARY,
        "Scores are q M k' with a matrix M that is no rotation and isn't that of the distance"
        f" i - j either, though the code has {names[0]}: in head 0, M[{row}, {column}] is"
        f" {m[0, i, j, row, column]:.4g} for query {i} and key {j}, and"
        f" {m[0, k, l, row, column]:.4g} for query {k} and key {l}.",
        evidence.example,
        LOOK,
    )
    return True


def _show(
    at: list[tuple[int, int]], group: Mapping[tuple[int, int], int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Two pairs of the same distance and of different groups; else the first and the last."""
    for a in at:
        for b in at:
            if a[0] - a[1] == b[0] - b[1] and group[a] != group[b]:
                return a, b
    return at[0], at[-1]


def _angles(rotation: Tensor) -> Tensor:
    """The angles of rotations `[H, E, E]`, one of each plane, descending: `[H, E // 2]`."""
    angles = torch.linalg.eigvals(rotation).angle().abs()
    return angles.sort(-1, descending=True).values[:, ::2]


def _name_angles(module: nn.Module | None, angles: Tensor, width: int) -> str | None:
    """Where the angles are from: powers of a base that the code states, from 1 down, for the first
    planes or all; or a parameter.
    """
    if module is None or (angles - angles[0]).abs().max() > CLOSE:
        return None
    turning = angles[0][angles[0] > 1e-9]
    for name, p in module.named_parameters():
        values = p.detach().double().flatten().abs().sort(descending=True).values
        if len(values) == len(turning) and torch.allclose(values, turning, rtol=1e-3):
            return f"angles are {name}"
    planes = torch.arange(len(turning), dtype=torch.float64)
    for base in dict.fromkeys((*USUAL_BASES, *_numbers(module))):
        expected = base ** -(planes / len(turning))
        if torch.allclose(expected, turning, rtol=1e-3):
            part = "" if 2 * len(turning) == width else f" for {2 * len(turning)} features"
            return f"angles are powers of {base:.10g}, from 1{part}"
    return None


def _numbers(module: nn.Module) -> Iterator[float]:
    """Numbers above 1 that attributes, defaults and constants of the code state."""

    def found() -> Iterator[object]:
        for each in module.modules():
            yield from vars(each).values()
            for kind in type(each).__mro__:
                if kind.__module__.startswith("torch."):
                    continue
                yield from vars(kind).values()
                for f in vars(kind).values():
                    if isinstance(f, types.FunctionType):
                        yield from (*f.__code__.co_consts, *(f.__defaults__ or ()))
                        yield from (f.__kwdefaults__ or {}).values()

    for number in found():
        if isinstance(number, int | float) and not isinstance(number, bool) and number > 1:
            yield float(number)
