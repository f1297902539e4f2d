"""Judge how weights follow from queries and keys: the scale, heads, soft cap and biases."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .evidence import Evidence, Judged
from .finding import BugName
from .kernels import Kernel
from .linear_terms import MAX_WIDTH, count_inputs, fit_terms
from .mixing import undo_mixed_scores
from .position_terms import describe_bias, find_curve
from .readout import CannotRead, find_target
from .recompute import CAPS
from .rotations import Rotations, judge_rotations
from .scores import ScoreFit, fit_cap, fit_scores
from .value_terms import find_table

TEMPERATURES = r"temp(erature)?s?$|logit_scale|(^|[._])tau|(^|[._])(log_)?scale[sr]?$|(^|[._])beta$"
MIN_PROBES = 100  # of each of many inputs, of which one was read in full
CLOSE = 1e-2  # relative, of a scale
LOOK_SCALE = (
    "Scores are multiplied by 1 / sqrt(E), E the width of a head, once. Pass scale=... if another"
    " scale is intended."
)


def judge_scores(
    judged: Judged, evidence: Evidence, scales: Sequence[float | None], kernel: Kernel | None
) -> None:
    """log A against q k': the scale, and which head of q meets which head of k."""
    if kernel is not None:
        if kernel.is_rectified:  # which has no scale that is the right one
            judged.passed.append(f"they are q k' times {kernel.slopes[0]:.4g}, in head 0")
        else:
            _judge_scale(judged, evidence, kernel.slopes, scales, "")
        return
    queries, keys = evidence.heads
    if (queries.shape[2], keys.shape[2]) != tuple(evidence.weights.shape[-2:]):
        judged.unjudged.append(
            f"how the weights follow from queries and keys: W_Q makes {queries.shape[2]} queries"
            f" and W_K {keys.shape[2]} keys, and {evidence.weights.shape[-2]} queries read"
            f" {evidence.weights.shape[-1]} keys"
        )
        return
    fit = fit_scores(queries, keys, evidence.weights)
    if fit.added:
        judged.find(
            BugName.ADDED,
            "The weights of head 0 follow from the sum of the scores of"
            f" {evidence.reader.num_heads // keys.shape[1]} heads of queries, instead of those of"
            f" head 0 alone. W_Q makes {evidence.reader.num_heads} heads, and W_O takes"
            f" {len(fit.slopes)}.",
            evidence.example,
            "Every axis of the scores that belongs to a head must be kept until W_O:"
            " 'blhgd,bshd->bhgls'.",
        )
    elif fit.holds and fit.pairs:
        _judge_pairs(judged, evidence, fit, keys.shape[1])
    elif fit.holds:
        _judge_missing_cap(judged, evidence, fit)
        bias = ""
        if fit.bias is not None:
            bias = describe_bias(judged, evidence, fit.bias)
        _judge_scale(judged, evidence, fit.slopes, scales, bias)
    elif not any(attempt(judged, evidence, scales) for attempt in ATTEMPTS):
        judged.unjudged.append(
            "how the weights follow from queries and keys: their logarithms aren't products q k'"
            " times a scale, with or without a bias by position (rotary positions, a norm, a soft"
            " cap or a kernel may be the reason)"
        )


def _judge_pairs(judged: Judged, evidence: Evidence, fit: ScoreFit, num_keys: int) -> None:
    group = evidence.reader.num_heads // num_keys
    wrong = [(h, p) for h, p in enumerate(fit.pairs) if p != (h, h // group)]
    head, (query, key) = wrong[0]
    tiled = all(p == (h, h % num_keys) for h, p in enumerate(fit.pairs))
    judged.find(
        BugName.TILED if tiled and group > 1 else BugName.SLICES,
        f"The weights of head {head} follow from head {query} of the queries and head {key} of"
        f" the keys, instead of {head} and {head // group}.",
        evidence.example,
        "Head h of the queries meets head h // (H / G) of the keys: repeat_interleave, not repeat.",
    )


# ---- The scale


@dataclass(frozen=True)
class Scale:
    """A scale that parameters give: how, and its value in each head."""

    description: str
    values: Tensor


FUNCTIONS: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
    ("{}", lambda t: t),
    ("exp({})", torch.exp),
    ("exp({}), at most 100", lambda t: t.clamp(max=math.log(100)).exp()),
    ("1 / {}", torch.reciprocal),
    ("exp(-{})", lambda t: (-t).exp()),
    ("softplus({})", F.softplus),
    ("sigmoid({})", torch.sigmoid),
    ("{} squared", torch.square),
)


def _learned_scales(evidence: Evidence, num_heads: int) -> Iterator[Scale]:
    """Scales that a learned number, or one of each head, may give."""
    if evidence.module is None:
        return
    root = evidence.head_dim**-0.5
    for name, parameter in evidence.module.named_parameters():
        if parameter.numel() not in (1, num_heads) or not re.search(TEMPERATURES, name):
            continue
        values = parameter.detach().double().flatten().expand(num_heads)
        for form, function in FUNCTIONS:
            result = function(values)
            for factor, words in ((1.0, ""), (root, " / sqrt(E)")):
                yield Scale(form.format(name) + words, factor * result)


def _is_close(a: Tensor, b: Tensor) -> bool:
    return bool(((a - b).abs() <= CLOSE * b.abs()).all())


def _judge_scale(
    judged: Judged,
    evidence: Evidence,
    slopes: Tensor,
    scales: Sequence[float | None],
    bias: str,
    *,
    products: str = "q k'",
) -> None:
    right = [evidence.head_dim**-0.5 if s is None else s for s in scales]
    slopes = slopes.double()
    wrong = [
        h
        for h, slope in enumerate(slopes.tolist())
        if not any(abs(slope - s) <= CLOSE * abs(s) for s in right)
    ]
    if not wrong:
        judged.passed.append(
            f"their logarithms are {products} times {slopes[0]:.4g}{bias}, in every head"
        )
        return
    learned = list(_learned_scales(evidence, len(slopes)))
    for scale in learned:
        if _is_close(slopes, scale.values):
            judged.passed.append(
                f"their logarithms are {products} times {scale.description}, which is learned"
                f" ({slopes[0]:.4g} in head 0){bias}"
            )
            return
    if learned:
        name = re.sub(r" / sqrt\(E\)", "", learned[0].description)
        judged.unjudged.append(
            f"the scale of the scores, {slopes[wrong[0]]:.4g} in head {wrong[0]}: it is learned"
            f" ({name}), but it is no usual function of that"
        )
        return
    judged.find(
        BugName.SCALE,
        f"In head {wrong[0]} the logarithm of the weights grows with {products} by"
        f" {slopes[wrong[0]]:.4g} instead of {right[0]:.4g}{bias}.",
        evidence.example,
        LOOK_SCALE,
    )


# ---- Other forms of scores


def _declared_cap(evidence: Evidence) -> float | None:
    owner = evidence.module
    return next(
        (
            number
            for holder in (owner, getattr(owner, "config", None))
            if (number := _find_cap(holder)) is not None
        ),
        None,
    )


def _find_cap(holder: object) -> float | None:
    for name in CAPS:
        value = getattr(holder, name, None)
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            return float(value)
    return None


def _judge_missing_cap(judged: Judged, evidence: Evidence, fit: ScoreFit) -> None:
    """A soft cap that attributes state, and scores that have none."""
    stated = _declared_cap(evidence)
    if stated is None or evidence.products is None or not evidence.declared("soft|logit|attn"):
        return
    largest = float((fit.slopes.double()[:, None, None] * evidence.products).abs().max())
    lost = largest - stated * math.tanh(largest / stated)
    # Up to here a cap leaves the logarithms straight, to the precision of the regression.
    if lost > 1e-6 * largest and fit.residual < 1e-6:
        judged.find(
            BugName.CAP,
            f"Scores grow with q k' without a soft cap, up to {largest:.4g}; an attribute states"
            f" one of {stated:.4g}, by which that is {stated * math.tanh(largest / stated):.4g}.",
            evidence.example,
            "scores = softcap * tanh(scores / softcap), before the mask.",
        )


def _judge_swapped(judged: Judged, evidence: Evidence, scales: Sequence[float | None]) -> bool:
    """Whether the weights follow from k q', of projections that have names of two matrices."""
    queries, keys = evidence.heads
    if not _may_be_swapped(evidence):
        return False
    fit = fit_scores(keys, queries, evidence.weights)
    if not fit.holds or fit.pairs or fit.added:
        return False
    _find_swapped(judged, evidence)
    return True


def _may_be_swapped(evidence: Evidence) -> bool:
    a, (queries, keys) = evidence.reader.assignment, evidence.heads
    is_fused = a is None or a.q.index is not None or a.k.index is not None
    return not is_fused and queries.shape == keys.shape


def _find_swapped(judged: Judged, evidence: Evidence) -> None:
    judged.find(
        BugName.PROJECTIONS,
        "The weights follow from k q', not from q k': queries are computed with W_K, and keys with"
        " W_Q.",
        evidence.example,
        "q = self.q_proj(x), k = self.k_proj(x), and which of the two is transposed.",
    )


def _judge_cap(judged: Judged, evidence: Evidence, scales: Sequence[float | None]) -> bool:
    if evidence.products is None:
        return False
    fit = fit_cap(evidence.products, evidence.weights)
    if not fit.holds:
        return False
    cap, stated = float(fit.caps[0]), _declared_cap(evidence)
    if not _is_close(fit.caps, fit.caps[:1]):
        judged.unjudged.append("why the scores' soft caps differ among heads")
    elif stated is not None and abs(cap - stated) > CLOSE * stated:
        judged.find(
            BugName.CAP,
            f"The scores' soft cap is {cap:.4g} instead of {stated:.4g}, which an attribute"
            " states.",
            evidence.example,
            "scores = softcap * tanh(scores / softcap), before the mask.",
        )
        return True
    right = [evidence.head_dim**-0.5 if s is None else s for s in scales]
    slope = float(fit.slopes[0])
    inner = [s for s in right if abs(slope / cap - s) <= CLOSE * s]
    if inner and not any(abs(slope - s) <= CLOSE * s for s in right):
        judged.unjudged.append(
            f"whether scores are meant to be {cap:.4g} tanh(s), s of q k' times {inner[0]:.4g}: a"
            " soft cap is cap tanh(s / cap)"
        )
        return True
    _judge_scale(judged, evidence, fit.slopes, scales, f", with a soft cap of {cap:.4g}")
    return True


def _judge_cosines(judged: Judged, evidence: Evidence, scales: Sequence[float | None]) -> bool:
    queries, keys = (F.normalize(t, dim=-1) for t in evidence.heads)
    fit = fit_scores(queries, keys, evidence.weights)
    if not fit.holds or fit.added:
        return False
    if fit.pairs:
        _judge_pairs(judged, evidence, fit, keys.shape[1])
        return True
    bias = "" if fit.bias is None else describe_bias(judged, evidence, fit.bias)
    slopes = fit.slopes.double()
    if not any(_is_close(slopes, s.values) for s in _learned_scales(evidence, len(slopes))):
        if _is_close(slopes, slopes[:1]) and slopes[0] > 1.5:
            judged.passed.append(
                f"their logarithms are cosines of queries and keys times {slopes[0]:.4g}{bias}"
            )
        else:
            judged.unjudged.append(
                f"the scale of cosines of queries and keys, {slopes[0]:.4g} in head 0: a softmax of"
                " cosines times so little is nearly even"
            )
        return True
    _judge_scale(judged, evidence, slopes, (), bias, products="cosines of queries and keys")
    return True


def _judge_mixed(judged: Judged, evidence: Evidence, scales: Sequence[float | None]) -> bool:
    """Scores that are mixed over heads before the softmax."""
    queries, keys = evidence.heads
    for name, weights in undo_mixed_scores(evidence.module, evidence.weights):
        fit = fit_scores(queries, keys, weights)
        if fit.holds and not fit.pairs and not fit.added:
            bias = "" if fit.bias is None else describe_bias(judged, evidence, fit.bias)
            _judge_scale(
                judged, evidence, fit.slopes, scales, f"{bias}, mixed over heads by {name}"
            )
            return True
    return False


def read_with(evidence: Evidence, who: str, size: float) -> Tensor | None:
    """The weights of the first input with W_Q or W_K times a number; None if it's out of reach."""
    reader, assignment = evidence.reader, evidence.reader.assignment
    if assignment is None:
        return None
    matrix = assignment.q if who == "q" else assignment.k
    try:
        target = find_target(evidence.facts.callee, matrix)
    except CannotRead:
        return None
    columns = range(target.shape[1]) if matrix.index is None else matrix.index.tolist()
    before = target.clone()
    try:
        target[:, list(columns)] *= size
        return reader.read(evidence.inputs[0]).weights
    except CannotRead:
        return None
    finally:
        target.copy_(before)


def _judge_dependence(judged: Judged, evidence: Evidence, scales: Sequence[float | None]) -> bool:
    """Weights that stay as they are when W_Q, or W_K, is changed."""
    base, changed = evidence.readouts[0].weights, {}
    for who in ("queries", "keys"):
        weights = read_with(evidence, who[0], 1.5)
        if weights is None:
            return False
        changed[who] = weights
    sizes = {who: float((weights - base).abs().max()) for who, weights in changed.items()}
    bugs = {"queries": BugName.NO_QUERIES, "keys": BugName.NO_KEYS}
    missing = [who for who, size in sizes.items() if size <= 1e-9]
    for who in missing:
        other = "keys" if who == "queries" else "queries"
        judged.find(
            bugs[who],
            f"With W_{who[0].upper()} times 1.5 no weight changes by more than {sizes[who]:.2g};"
            f" with W_{other[0].upper()} times 1.5 they change by up to {sizes[other]:.2g}.",
            evidence.example,
            "Scores are q @ k.mT.",
        )
    return bool(missing)


def _judge_terms(judged: Judged, evidence: Evidence, scales: Sequence[float | None]) -> bool:
    """Terms of the scores that are linear in queries and keys, as of relative positions."""
    if evidence.products is None or evidence.head_dim > MAX_WIDTH:
        return False
    callee, reader = evidence.facts.callee, evidence.reader
    count = count_inputs(evidence.head_dim)
    try:
        more = [
            reader.read(callee.x(1, size=0.5, seed=seed), max_probes=MIN_PROBES)
            for seed in range(10, 10 + count)
        ]
    except CannotRead:
        return False
    queries, keys = evidence.split([r.queries for r in more], [r.keys for r in more])
    keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], 1)
    weights = torch.stack([r.weights for r in more])
    fit = fit_terms(queries, keys, weights)
    if not fit.holds and _may_be_swapped(evidence) and fit_terms(keys, queries, weights).holds:
        _find_swapped(judged, evidence)
        return True
    if not fit.holds:
        return False
    curves = [find_curve(terms) for terms in fit.terms]
    by_distance = all(curve is not None for curve in curves)
    for curve, slope in zip(curves[:1], fit.slopes.tolist(), strict=False):
        if curve is not None:
            vectors = curve.values[:-1].T
            table = find_table(evidence.module, curve.distances, vectors, slope)
            judged.unjudged += [table[1]] if table is not None and table[1] else []
    kind = "i - j" if by_distance else "position"
    _judge_scale(judged, evidence, fit.slopes, scales, f", with terms linear in q and k by {kind}")
    if not by_distance:
        judged.unjudged.append(
            "terms of the scores that are linear in queries: they depend on the position otherwise"
            " than by the distance i - j"
        )
    return True


def _judge_rotations(judged: Judged, evidence: Evidence, scales: Sequence[float | None]) -> bool:
    """Scores with queries and keys that are rotated by their positions."""
    found = judge_rotations(judged, evidence)
    if isinstance(found, Rotations):
        _judge_scale(judged, evidence, found.slopes, scales, found.words)
    return bool(found)


ATTEMPTS = (
    _judge_swapped,
    _judge_cap,
    _judge_cosines,
    _judge_mixed,
    _judge_dependence,
    _judge_rotations,
    _judge_terms,
)
