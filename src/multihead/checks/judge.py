"""Judge the weights that were read out: sums, signs, zeros, masks, and how they follow from q k'.

It is the judge of what the definition doesn't reproduce: a residual, positions of another kind,
sinks, or a bug that isn't known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .arguments import QUERY_KEY_SHAPES
from .callee import CallSpec
from .definition import normalize
from .extras import find_mixers
from .facts import Facts, format_shape
from .finding import READ_OUT, BugName, Finding
from .patterns import name_pattern
from .projections import find_norms
from .readers import open_reader
from .readout import CannotRead, Readout, WeightReader
from .scores import ScoreFit, fit_scores
from .signature import library_of
from .tokens import JOINS, learned_tokens

__all__ = ["Judged", "judge_weights"]

TOLERANCE = 1e-4
SEEDS = (0, 1, 2)  # of the inputs whose weights are read out
SINKS = (
    r"(^|_)sinks?(_|$)|bias_k|add_zero_attn|null_(k|kv|key)|add_one|off_?by_?one|"
    r"softmax_?(1|one)"
)
GATES = r"(^|_)gat(e|ed|ing)|(?-i:Gat(e|ed|ing))|sigmoid|silu|swish|lamb"
TEMPERATURES = r"temp(erature)?$|logit_scale|(^|_)tau|(^|_)scale$"


@dataclass
class Judged:
    """What the weights show.

    Attributes:
        findings: what is wrong with them.
        passed: what is right, as lines of the report.
        unjudged: what can't be judged from them.
    """

    findings: list[Finding] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)


def judge_weights(facts: Facts, scales: Sequence[float | None]) -> Judged:
    """Read out the weights and judge them; `scales` are those that are right, None 1 / sqrt(E).

    Raises:
        CannotRead: they can't be read out, with the reason.
    """
    callee = facts.callee
    reader = open_reader(callee)
    inputs = [callee.x(1, size=0.5, seed=seed) for seed in SEEDS]
    readouts = [reader.read(x) for x in inputs]
    judged = Judged()
    example = format_shape(callee, 1, facts.length)
    sums_hold = _judge_sums(judged, facts, readouts, example)
    _judge_signs(judged, facts, readouts, example)
    _judge_zeros(judged, readouts, example)
    _judge_sameness(judged, readouts, example)
    if sums_hold:
        _judge_masks(judged, facts, reader, inputs[0], readouts[0])
    if not judged.findings:
        _judge_scores(judged, facts, reader, readouts, scales, example)
        _judge_rest(judged, facts, inputs, readouts)
    return judged


def _first(wrong: Tensor) -> tuple[int, ...]:
    return tuple(wrong.nonzero()[0].tolist())


def _declared(facts: Facts, pattern: str) -> list[str]:
    """Names of attributes that are in use; in a user's code those of its code too."""
    module = facts.callee.module
    if facts.callee.library is None or module is None:
        return facts.find_names(pattern)
    owners = [owner for owner in module.modules() if library_of(owner) == facts.callee.library]
    return sorted(
        {
            name
            for owner in owners
            for name in (*vars(owner), *owner._parameters, *owner._modules)
            if re.search(pattern, name, re.IGNORECASE)
            and getattr(owner, name, None) is not None
            and getattr(owner, name) is not False
        }
    )


def _judge_sums(judged: Judged, facts: Facts, readouts: list[Readout], example: str) -> bool:
    """Whether the weights of each head and query sum to one, or to less with a sink."""
    weights = torch.stack([r.weights for r in readouts])  # [N, H, L, S]
    sums = weights.sum(-1)
    wrong = (sums - 1).abs() > TOLERANCE
    if not wrong.any():
        judged.passed.append("the weights of each head sum to one")
        return True
    if gates := _declared(facts, GATES):
        judged.unjudged.append(
            f"whether the weights sum to one: they are multiplied by a gate ({gates[0]})"
        )
        return False
    if mixers := find_mixers(facts.callee.module, weights.shape[1]):
        judged.unjudged.append(f"whether the weights sum to one: heads are mixed by {mixers[0]}")
        return False
    if _declared(facts, SINKS) and sums.max() <= 1 + TOLERANCE and weights.min() >= -TOLERANCE:
        judged.passed.append("the weights of each head sum to less than one, with a sink")
        return True
    more = learned_tokens(facts) or (facts.callee.form == "memory" and facts.find_names(JOINS))
    if more and sums.max() <= 1 + TOLERANCE and weights.min() >= -TOLERANCE:
        judged.unjudged.append(
            f"whether the weights sum to one: queries may read further keys too ({more[0]})"
        )
        return False
    axes: dict[str, int | tuple[int, ...]] = {
        "the queries, not the keys": -2,
        "the heads, not the keys": 1,
        "heads and keys together": (1, 3),
        "queries and keys together": (2, 3),
    }
    for over, axis in axes.items():
        if weights.shape[1] == 1 and axis in (1, (1, 3)):
            continue
        if ((weights.sum(axis) - 1).abs() <= TOLERANCE).all():
            n, h, i = _first(wrong)
            judged.findings.append(
                Finding(
                    BugName.AXIS,
                    f"The softmax runs over {over}: over these the weights sum to 1. In head {h}"
                    f" the weights of query {i} sum to {sums[n, h, i]:.4g} instead of 1.",
                    example,
                    "softmax(dim=-1) of scores [B, H, L, S], one for each head and query.",
                    [READ_OUT],
                )
            )
            return False
    factors = sums.mean((0, 2))
    if (sums - factors[:, None]).abs().max() <= TOLERANCE and factors.std() > TOLERANCE:
        judged.passed.append("the weights of each head sum to one, times a factor of the head")
        return True
    itself = weights - torch.eye(*weights.shape[-2:])
    if (sums - 2).abs().max() <= TOLERANCE and itself.min() >= -TOLERANCE:
        judged.unjudged.append("whether a token's own values are meant to be added to its output")
        return False
    n, h, i = _first(wrong)
    same = float((sums - sums.mean()).abs().max()) <= TOLERANCE
    message = (
        f"The weights of every head and query sum to {sums.mean():.4g} instead of 1."
        if same
        else f"In head {h} the weights of query {i} sum to {sums[n, h, i]:.4g} instead of 1."
    )
    judged.findings.append(
        Finding(
            BugName.NOT_NORMALISED,
            message,
            example,
            "Nothing may multiply or mask the weights between the softmax over the keys and the"
            " product with the values, nor the product itself.",
            [READ_OUT],
        )
    )
    return False


def _judge_signs(judged: Judged, facts: Facts, readouts: list[Readout], example: str) -> None:
    weights = torch.stack([r.weights for r in readouts])
    sums = weights.sum(-1)
    factors = sums.mean((0, 2))
    if (sums - factors[:, None]).abs().max() <= TOLERANCE < factors.abs().min():
        weights = weights / factors[:, None, None]
    if weights.min() >= -TOLERANCE:
        judged.passed.append("no weight is negative")
        return
    if names := facts.find_names("lambda|lamb|diff"):
        judged.unjudged.append(
            f"negative weights, as of a difference of two softmaxes ({names[0]})"
        )
        return
    if mixers := find_mixers(facts.callee.module, weights.shape[1]):
        judged.unjudged.append(f"negative weights, as of heads that are mixed ({mixers[0]})")
        return
    n, h, i, j = _first(weights < -TOLERANCE)
    judged.findings.append(
        Finding(
            BugName.NEGATIVE,
            f"In head {h} query {i} reads key {j} with the weight {weights[n, h, i, j]:.4g}; a"
            " softmax gives none below 0.",
            example,
            "What is done with the weights after the softmax, or instead of it.",
            [READ_OUT],
        )
    )


def _judge_zeros(judged: Judged, readouts: list[Readout], example: str) -> None:
    """Name the zero pattern of each head, called with the inputs alone."""
    reads = torch.stack([r.weights.abs() > 1e-9 for r in readouts]).any(0)
    if reads.shape[-1] != reads.shape[-2]:
        return
    patterns = [name_pattern(head) for head in reads]
    if len(set(patterns)) == 1:
        judged.passed.append(f"queries read {patterns[0].description}")
    else:
        parts = [f"head {h}: {p.description}" for h, p in enumerate(patterns)]
        judged.passed.append(f"queries read, by head, {'; '.join(parts)}")
    for h, pattern in enumerate(patterns):
        if pattern.name == "unknown":
            judged.unjudged.append(f"which keys queries read: head {h} {pattern.description}")
        if pattern.name not in ("strictly causal", "ahead"):
            continue
        is_strict = pattern.name == "strictly causal"
        later = BugName.NEXT_TOKEN if pattern.ahead == 1 else BugName.FUTURE
        judged.findings.append(
            Finding(
                BugName.NOT_ITSELF if is_strict else later,
                f"In head {h} queries read {pattern.description}: "
                + (
                    f"query 1 reads itself with the weight {readouts[0].weights[h, 1, 1]:.4g}."
                    if is_strict
                    else f"query 0 reads key {pattern.ahead} with the weight"
                    f" {readouts[0].weights[h, 0, pattern.ahead]:.4g} instead of 0."
                ),
                example,
                "Keys j <= i may be read: torch.tril(diagonal=0) of what may be read,"
                " torch.triu(diagonal=1) of what is hidden.",
                [READ_OUT],
            )
        )
        return


def _judge_sameness(judged: Judged, readouts: list[Readout], example: str) -> None:
    """Weights that are equal for all inputs, or in all heads."""
    weights = torch.stack([r.weights for r in readouts])
    wrong = []
    if (weights - weights[0]).abs().max() <= 1e-7:
        wrong.append((BugName.FIXED, "Two inputs have equal weights in every head."))
    elif weights.shape[1] > 1 and (weights - weights[:, :1]).abs().max() <= 1e-7:
        wrong.append((BugName.SAME_HEADS, "Every head has the weights of head 0."))
    for name, message in wrong:
        value = float(weights[0, -1, -1, 0])
        judged.findings.append(
            Finding(
                name,
                f"{message} The last query reads key 0 with the weight {value:.4g} each time.",
                example,
                "Scores are q k' of each head by itself: [B, H, L, S], made of the projections.",
                [READ_OUT],
            )
        )
    if not wrong:
        judged.passed.append("weights depend on the input and differ among heads")


def _masked_calls(facts: Facts) -> Iterator[tuple[str, Tensor, CallSpec]]:
    callee, length = facts.callee, facts.length
    at, triangle = torch.arange(length), torch.ones(length, length).tril().bool()
    default = triangle if facts.is_causal else torch.ones_like(triangle)
    if callee.causal_flag:
        yield callee.causal_flag, triangle, CallSpec(arguments={callee.causal_flag: True})
    if callee.mask is not None:
        some = (((at[:, None] * 2 + at) % 3 != 1) | torch.eye(length).bool()) & default
        yield callee.mask.description, some, CallSpec(allowed=some)
    if (form := callee.padding) is not None:
        valid = (at < length - 2).expand(1, -1)
        by_query = form.shape in QUERY_KEY_SHAPES
        spec = CallSpec(valid=valid[:, None].expand(-1, length, -1) if by_query else valid)
        yield form.description, valid & default, spec


def _judge_masks(
    judged: Judged, facts: Facts, reader: WeightReader, x: Tensor, plain: Readout
) -> None:
    """Weights are 0 where a mask hides, and sum to one over the rest."""
    has_sink = bool(((plain.weights.sum(-1) - 1).abs() > TOLERANCE).any())
    for description, allowed, spec in _masked_calls(facts):
        try:
            weights = reader.read(x, spec).weights
        except (CannotRead, RuntimeError) as error:
            judged.unjudged.append(f"{description}: {error}")
            continue
        if weights.shape[-2:] != allowed.shape:
            continue
        leaks = (weights.abs() > TOLERANCE) & ~allowed
        wrong = (weights.sum(-1) - 1).abs() > TOLERANCE
        example = format_shape(facts.callee, 1, facts.length)
        look = "masked_fill(~mask, -inf) on the scores, before the softmax."
        form = facts.callee.padding
        is_padding = form is not None and description == form.description
        if leaks.any():
            h, i, j = _first(leaks)
            message = (
                f"{description}: in head {h} query {i} reads the hidden key {j} with the weight"
                f" {weights[h, i, j]:.4g} instead of 0."
            )
            name = BugName.PADDING_LEAKS if is_padding else BugName.MASK_LEAKS
            judged.findings.append(Finding(name, message, example, look, [READ_OUT]))
        elif wrong.any() and not has_sink:
            h, i = _first(wrong)
            message = (
                f"{description}: in head {h} the weights of query {i} sum to"
                f" {weights[h, i].sum():.4g} instead of 1, and without the mask to 1."
            )
            name = BugName.PADDING_LEAKS if is_padding else BugName.NOT_NORMALISED
            if (weights - plain.weights * allowed).abs().max() <= TOLERANCE:
                name = BugName.MASK_AFTER_SOFTMAX
            judged.findings.append(Finding(name, message, example, look, [READ_OUT]))
        else:
            judged.passed.append(f"weights are 0 where {description} hides")


def _judge_scores(
    judged: Judged,
    facts: Facts,
    reader: WeightReader,
    readouts: list[Readout],
    scales: Sequence[float | None],
    example: str,
) -> None:
    """log A against q k': the scale, and which head of q meets which head of k."""
    head_dim = reader.head_dims[0]
    norms = find_norms(facts.callee.module)
    queries, keys = (
        torch.stack(
            [
                normalize(t.unflatten(-1, (-1, head_dim)).transpose(0, 1)[None], norm)[0]
                for t in tensors
            ]
        )
        for norm, tensors in zip(
            norms, ([r.queries for r in readouts], [r.keys for r in readouts]), strict=True
        )
    )
    fit = fit_scores(queries, keys, readouts)
    if not fit.holds:
        judged.unjudged.append(
            "how the weights follow from queries and keys: their logarithms aren't products q k'"
            " times a scale, with or without a bias by position (rotary positions, a norm, a soft"
            " cap or a kernel may be the reason)"
        )
    elif fit.added:
        judged.findings.append(
            Finding(
                BugName.ADDED,
                f"The weights of head 0 follow from the sum of the scores of"
                f" {reader.num_heads // keys.shape[1]} heads of queries, instead of those of head 0"
                f" alone. W_Q makes {reader.num_heads} heads, and W_O takes {len(fit.slopes)}.",
                example,
                "Every axis of the scores that belongs to a head must be kept until W_O:"
                " 'blhgd,bshd->bhgls'.",
                [READ_OUT],
            )
        )
    elif fit.pairs:
        _judge_pairs(judged, fit, reader, keys.shape[1], example)
    else:
        _judge_scale(judged, facts, fit, head_dim, scales, example)


def _judge_pairs(
    judged: Judged, fit: ScoreFit, reader: WeightReader, num_keys: int, example: str
) -> None:
    group = reader.num_heads // num_keys
    wrong = [(h, p) for h, p in enumerate(fit.pairs) if p != (h, h // group)]
    head, (query, key) = wrong[0]
    tiled = all(p == (h, h % num_keys) for h, p in enumerate(fit.pairs))
    judged.findings.append(
        Finding(
            BugName.TILED if tiled and group > 1 else BugName.SLICES,
            f"The weights of head {head} follow from head {query} of the queries and head {key} of"
            f" the keys, instead of {head} and {head // group}.",
            example,
            "Head h of the queries meets head h // (H / G) of the keys: repeat_interleave, not"
            " repeat.",
            [READ_OUT],
        )
    )


def _judge_scale(
    judged: Judged,
    facts: Facts,
    fit: ScoreFit,
    head_dim: int,
    scales: Sequence[float | None],
    example: str,
) -> None:
    right = [head_dim**-0.5 if s is None else s for s in scales]
    bias = ", with a bias by position" if fit.has_bias else ""
    wrong = [
        h
        for h, slope in enumerate(fit.slopes.tolist())
        if not any(abs(slope - s) <= 1e-2 * abs(s) for s in right)
    ]
    if not wrong:
        judged.passed.append(
            f"their logarithms are q k' times {fit.slopes[0]:.4g}{bias}, in every head"
        )
        return
    module = facts.callee.module
    names = [] if module is None else [name for name, _ in module.named_parameters()]
    if learned := [name for name in names if re.search(TEMPERATURES, name)]:
        judged.unjudged.append(
            f"the scale of the scores, {fit.slopes[wrong[0]]:.4g} in head {wrong[0]}: it is learned"
            f" ({learned[0]})"
        )
        return
    judged.findings.append(
        Finding(
            BugName.SCALE,
            f"In head {wrong[0]} the logarithm of the weights grows with q k' by"
            f" {fit.slopes[wrong[0]]:.4g} instead of {right[0]:.4g}{bias}.",
            example,
            "Scores are multiplied by 1 / sqrt(E), E the width of a head, once. Pass scale=... if"
            " another scale is intended.",
            [READ_OUT],
        )
    )


def _judge_rest(
    judged: Judged, facts: Facts, inputs: list[Tensor], readouts: list[Readout]
) -> None:
    """What the output has besides the weighted values: nothing, a bias, or the input."""
    rest = torch.stack([r.rest for r in readouts])
    size = rest.abs().max().clamp_min(1.0)

    def is_constant(t: Tensor) -> bool:
        return bool((t - t[0, 0]).abs().max() <= TOLERANCE * size)

    x = torch.cat(inputs)
    if is_constant(rest):
        judged.passed.append("the output is the weighted values through W_O")
    elif rest.shape == x.shape and is_constant(rest - x):
        judged.passed.append("the output is the weighted values through W_O, added to the input")
    else:
        names = _declared(facts, SINKS)
        beside = f" (next to a sink, {names[0]})" if names else ""
        judged.unjudged.append(
            f"a part of the output that doesn't depend on the values{beside}, up to"
            f" {float(rest.abs().max()):.3g}"
        )
