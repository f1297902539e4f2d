"""Judge the weights that were read out: sums, signs, zeros, masks, and how they follow from q k'.

It is the judge of what the definition doesn't reproduce: a residual, positions of another kind,
sinks, or a bug that isn't known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .differences import judge_difference
from .evidence import TOLERANCE, Evidence, Judged
from .extras import find_mixers
from .facts import Facts
from .finding import BugName
from .judge_reads import judge_masks, judge_zeros
from .judge_rest import SINKS, judge_rest
from .judge_scores import judge_scores, read_with
from .kernels import Kernel, judge_kernel
from .mixing import find_mixed_weights, find_mixings
from .readers import open_reader
from .readout import CannotRead
from .swapped import judge_swapped_values
from .tokens import JOINS, learned_tokens

__all__ = ["Judged", "judge_weights"]

SEEDS = (0, 1, 2)  # of the inputs whose weights are read out
GATES = r"(^|_)gat(e|ed|ing)|(?-i:Gat(e|ed|ing))|sigmoid|silu|swish|lamb"


def judge_weights(facts: Facts, scales: Sequence[float | None]) -> Judged:
    """Read out the weights and judge them; `scales` are those that are right, None 1 / sqrt(E).

    Raises:
        CannotRead: they can't be read out, with the reason.
    """
    try:
        evidence, mixing = read_evidence(facts), None
    except CannotRead:
        if (swapped := judge_swapped_values(facts)) is None:
            raise
        return swapped
    first = evidence.readouts[0]
    judged = Judged(passed=list(first.passed), unjudged=list(first.unjudged))
    if not _sum_to_one(evidence.weights):
        mixing = find_mixed_weights(evidence.module, evidence.weights)
    if mixing is not None:
        evidence = replace(evidence, weights=mixing.undo(evidence.weights))
        judged.passed.append(f"heads are mixed by {mixing.name}; what follows holds before that")
        judged.explained |= dict.fromkeys((BugName.NOT_NORMALISED, BugName.NEGATIVE), "mixed heads")
    is_difference = judge_difference(judged, evidence, scales)
    sums_hold, kernel = (True, None) if is_difference else _judge_sums(judged, evidence)
    if not is_difference:
        _judge_signs(judged, evidence)
    if kernel is None or not kernel.is_rectified:  # whose zeros depend on the input
        judge_zeros(judged, evidence)
    _judge_sameness(judged, evidence)
    if sums_hold:
        judge_masks(judged, evidence, mixing)
    if not judged.findings:
        if not is_difference:
            judge_scores(judged, evidence, scales, kernel)
        judge_rest(judged, evidence)
    return judged


def read_evidence(facts: Facts) -> Evidence:
    """Read out the weights of several inputs.

    Raises:
        CannotRead: they can't be read out, with the reason.
    """
    callee = facts.callee
    reader = open_reader(callee)
    inputs = [callee.x(1, size=0.5, seed=seed) for seed in SEEDS]
    readouts = [reader.read(x) for x in inputs]
    return Evidence(facts, reader, inputs, readouts, torch.stack([r.weights for r in readouts]))


def _first(wrong: Tensor) -> tuple[int, ...]:
    return tuple(wrong.nonzero()[0].tolist())


def _sum_to_one(weights: Tensor) -> bool:
    return bool(((weights.sum(-1) - 1).abs() <= TOLERANCE).all())


def _judge_sums(judged: Judged, evidence: Evidence) -> tuple[bool, Kernel | None]:
    """Judge whether the weights of each head and query sum to one, or to less with a sink; and what
    takes the place of the softmax.
    """
    weights = evidence.weights
    sums = weights.sum(-1)
    wrong = (sums - 1).abs() > TOLERANCE
    if not wrong.any():
        judged.passed.append("the weights of each head sum to one")
        return True, None
    axes: dict[str, int | tuple[int, ...]] = {
        "the queries, not the keys": -2,
        "the heads, not the keys": 1,
        "heads and keys together": (1, 3),
        "queries and keys together": (2, 3),
    }
    n, h, i = _first(wrong)
    for over, axis in axes.items():
        if weights.shape[1] == 1 and axis in (1, (1, 3)):
            continue
        if ((weights.sum(axis) - 1).abs() <= TOLERANCE).all():
            judged.find(
                BugName.AXIS,
                f"The softmax runs over {over}: over these the weights sum to 1. In head {h}"
                f" the weights of query {i} sum to {sums[n, h, i]:.4g} instead of 1.",
                evidence.example,
                "softmax(dim=-1) of scores [B, H, L, S], one for each head and query.",
            )
            return False, None
    if (kernel := judge_kernel(judged, evidence)) is not None:
        return True, kernel
    if gates := evidence.declared(GATES):
        judged.unjudged.append(
            f"whether the weights sum to one: they are multiplied by a gate ({gates[0]})"
        )
        return False, None
    if mixers := find_mixers(evidence.module, weights.shape[1]):
        if _find_mixed_without_softmax(judged, evidence, mixers[0]):
            return False, None
        judged.unjudged.append(f"whether the weights sum to one: heads are mixed by {mixers[0]}")
        return False, None
    has_sink = sums.max() <= 1 + TOLERANCE and weights.min() >= -TOLERANCE
    if has_sink and evidence.declared(SINKS):
        judged.passed.append("the weights of each head sum to less than one, with a sink")
        return True, None
    facts = evidence.facts
    more = learned_tokens(facts) or (facts.callee.form == "memory" and facts.find_names(JOINS))
    if more and has_sink:
        judged.unjudged.append(
            f"whether the weights sum to one: queries may read further keys too ({more[0]})"
        )
        return False, None
    factors = sums.mean((0, 2))
    if (sums - factors[:, None]).abs().max() <= TOLERANCE and factors.std() > TOLERANCE:
        judged.passed.append("the weights of each head sum to one, times a factor of the head")
        return True, None
    itself = weights - torch.eye(*weights.shape[-2:])
    if (sums - 2).abs().max() <= TOLERANCE and itself.min() >= -TOLERANCE:
        judged.unjudged.append("whether a token's own values are meant to be added to its output")
        return False, None
    same = float((sums - sums.mean()).abs().max()) <= TOLERANCE
    judged.find(
        BugName.NOT_NORMALISED,
        f"The weights of every head and query sum to {sums.mean():.4g} instead of 1."
        if same
        else f"In head {h} the weights of query {i} sum to {sums[n, h, i]:.4g} instead of 1.",
        evidence.example,
        "Nothing may multiply or mask the weights between the softmax over the keys and the"
        " product with the values, nor the product itself.",
    )
    return False, None


def _find_mixed_without_softmax(judged: Judged, evidence: Evidence, mixer: str) -> bool:
    """Heads that are mixed, and before that no softmax, or one over the heads."""
    for mixing in find_mixings(evidence.module, evidence.weights.shape[1]):
        before = mixing.undo(evidence.weights)
        if before.min() >= -TOLERANCE and ((before.sum(1) - 1).abs() <= TOLERANCE).all():
            judged.find(
                BugName.AXIS,
                f"The softmax runs over the heads, not the keys: before {mixing.name} mixes them,"
                f" the weights of all heads sum to 1, and those of head 0 and query 0 to"
                f" {before[0, 0, 0].sum():.4g}.",
                evidence.example,
                "softmax(dim=-1) of scores [B, H, L, S], one for each head and query.",
            )
            return True
    sizes = (0.0, 1.0, 2.0)
    reads = [read_with(evidence, "q", size) for size in sizes]
    if any(weights is None for weights in reads):
        return False
    none, once, twice = (weights for weights in reads if weights is not None)
    if (once - none).abs().max() < 1e-6 or (twice - 2 * once + none).abs().max() > 1e-8:
        return False
    values = ", ".join(f"{weights[0, -1, 0]:.4g}" for weights in (none, once, twice))
    judged.find(
        BugName.NOT_NORMALISED,
        f"The weights are linear in the queries: with W_Q times 0, 1 and 2 the last query reads key"
        f" 0 with the weight {values}. There is no softmax, next to {mixer}, which mixes heads.",
        evidence.example,
        "softmax(dim=-1) of the scores, before the weights are mixed.",
    )
    return True


def _judge_signs(judged: Judged, evidence: Evidence) -> None:
    weights = evidence.weights
    sums = weights.sum(-1)
    factors = sums.mean((0, 2))
    if (sums - factors[:, None]).abs().max() <= TOLERANCE < factors.abs().min():
        weights = weights / factors[:, None, None]
    if weights.min() >= -TOLERANCE:
        judged.passed.append("no weight is negative")
        return
    if names := evidence.declared("lambda|lamb|diff"):
        judged.unjudged.append(
            f"negative weights, as of a difference of two softmaxes ({names[0]})"
        )
        return
    if mixers := find_mixers(evidence.module, weights.shape[1]):
        judged.unjudged.append(f"negative weights, as of heads that are mixed ({mixers[0]})")
        return
    n, h, i, j = _first(weights < -TOLERANCE)
    judged.find(
        BugName.NEGATIVE,
        f"In head {h} query {i} reads key {j} with the weight {weights[n, h, i, j]:.4g}; a softmax"
        " gives none below 0.",
        evidence.example,
        "What is done with the weights after the softmax, or instead of it.",
    )


def _judge_sameness(judged: Judged, evidence: Evidence) -> None:
    """Weights that are equal for all inputs, or in all heads."""
    weights = evidence.weights
    wrong = []
    if (weights - weights[0]).abs().max() <= 1e-7:
        wrong.append((BugName.FIXED, "Two inputs have equal weights in every head."))
    elif weights.shape[1] > 1 and (weights - weights[:, :1]).abs().max() <= 1e-7:
        wrong.append((BugName.SAME_HEADS, "Every head has the weights of head 0."))
    for name, message in wrong:
        value = float(weights[0, -1, -1, 0])
        judged.find(
            name,
            f"{message} The last query reads key 0 with the weight {value:.4g} each time.",
            evidence.example,
            "Scores are q k' of each head by itself: [B, H, L, S], made of the projections.",
        )
    if not wrong:
        judged.passed.append("weights depend on the input and differ among heads")
