"""Judge which keys queries read: the zero pattern of each head, and that of masks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .arguments import QUERY_KEY_SHAPES
from .callee import CallSpec
from .evidence import TOLERANCE, Evidence, Judged
from .facts import WINDOWS, Facts
from .finding import BugName
from .mixing import Mixing
from .patterns import Pattern, name_pattern
from .readout import CannotRead
from .recompute import HIDDEN_DIAGONAL

ROUNDING = 1e-9  # weights up to here are 0
LOOK = (
    "Keys j <= i may be read: torch.tril(diagonal=0) of what may be read,"
    " torch.triu(diagonal=1) of what is hidden."
)


def judge_zeros(judged: Judged, evidence: Evidence) -> None:
    """Name the zero pattern of each head, called with the inputs alone."""
    reads = (evidence.weights.abs() > ROUNDING).any(0)
    if reads.shape[-1] != reads.shape[-2]:
        return
    patterns = [name_pattern(head) for head in reads]
    if len(set(patterns)) == 1:
        judged.passed.append(f"queries read {patterns[0].description}")
    else:
        parts = [f"head {h}: {p.description}" for h, p in enumerate(patterns)]
        judged.passed.append(f"queries read, by head, {'; '.join(parts)}")
    for h, pattern in enumerate(patterns):
        if _judge_pattern(judged, evidence, h, pattern):
            return
    _judge_differences(judged, evidence, patterns)


def _judge_pattern(judged: Judged, evidence: Evidence, h: int, pattern: Pattern) -> bool:
    """Whether the pattern of head h is a finding."""
    weights = evidence.weights.abs().amax(0)[h]
    weights = weights.where(weights > ROUNDING, 0.0)
    if pattern.name == "unknown":
        judged.unjudged.append(f"which keys queries read: head {h} {pattern.description}")
    elif pattern.name == "all but itself":
        if not evidence.declared(HIDDEN_DIAGONAL, in_docstrings=True):
            judged.unjudged.append(
                f"whether a token is meant not to read itself: in head {h} query 1 reads itself"
                f" with the weight {weights[1, 1]:.4g}, and no name in the code declares it"
            )
    elif pattern.name == "strictly causal" or (pattern.name == "window" and pattern.ahead < 0):
        i = -pattern.ahead
        judged.find(
            BugName.NOT_ITSELF,
            f"In head {h} queries read {pattern.description}: query {i} reads itself with the"
            f" weight {weights[i, i]:.4g}, and key 0 with {weights[i, 0]:.4g}.",
            evidence.example,
            LOOK,
        )
        return True
    elif pattern.name in ("ahead", "shifted window"):
        bug = BugName.NEXT_TOKEN if pattern.ahead == 1 else BugName.FUTURE
        judged.find(
            bug,
            f"In head {h} queries read {pattern.description}: query 0 reads key {pattern.ahead}"
            f" with the weight {weights[0, pattern.ahead]:.4g} instead of 0.",
            evidence.example,
            LOOK,
        )
        return True
    return False


def _judge_differences(judged: Judged, evidence: Evidence, patterns: list[Pattern]) -> None:
    """Heads of which some are causal and others aren't, or whose windows differ."""
    causal = [h for h, p in enumerate(patterns) if p.name == "causal"]
    everything = [h for h, p in enumerate(patterns) if p.name == "all keys"]
    if causal and everything:
        weights = evidence.weights.abs().amax(0)
        a, b = causal[0], everything[0]
        judged.find(
            BugName.FUTURE,
            f"In head {b} query 0 reads key 1 with the weight {weights[b, 0, 1]:.4g}, and in head"
            f" {a} with {weights[a, 0, 1]:.4g}: one is causal, the other isn't.",
            evidence.example,
            "A mask [L, S] must be added to the scores of every head: [1, 1, L, S].",
        )
    elif len({p.description for p in patterns}) > 1 and not evidence.declared(WINDOWS):
        judged.unjudged.append("whether heads are meant to read different keys")


MUCH = 0.05  # by which weights differ that can't be equal by chance


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


def judge_masks(judged: Judged, evidence: Evidence, mixing: Mixing | None) -> None:
    """Weights are 0 where a mask hides, and sum to one over the rest."""
    facts, plain = evidence.facts, evidence.weights[0]
    has_sink = bool(((plain.sum(-1) - 1).abs() > TOLERANCE).any())
    for description, allowed, spec in _masked_calls(facts):
        try:
            weights = evidence.reader.read(evidence.inputs[0], spec).weights
        except (CannotRead, RuntimeError) as error:
            judged.unjudged.append(f"{description}: {error}")
            continue
        if weights.shape[-2:] != allowed.shape:
            continue
        weights = weights if mixing is None else mixing.undo(weights)
        leaks = (weights.abs() > TOLERANCE) & ~allowed
        wrong = (weights.sum(-1) - 1).abs() > TOLERANCE
        form = facts.callee.padding
        is_padding = form is not None and description == form.description
        bug = ""
        if leaks.any():
            h, i, j = leaks.nonzero()[0].tolist()
            message = (
                f"{description}: in head {h} query {i} reads the hidden key {j} with the weight"
                f" {weights[h, i, j]:.4g} instead of 0."
            )
            bug = BugName.PADDING_LEAKS if is_padding else BugName.MASK_LEAKS
        elif wrong.any() and not has_sink:
            h, i = wrong.nonzero()[0].tolist()
            message = (
                f"{description}: in head {h} the weights of query {i} sum to"
                f" {weights[h, i].sum():.4g} instead of 1, and without the mask to 1."
            )
            bug = BugName.PADDING_LEAKS if is_padding else BugName.NOT_NORMALISED
            if (weights - plain * allowed).abs().max() <= TOLERANCE:
                bug = BugName.MASK_AFTER_SOFTMAX
        elif (lost := _lost_scores(weights, plain, allowed)) is not None:
            h, i, j, k = lost
            message = (
                f"{description}: in head {h} query {i} reads keys {j} and {k}, which are left, with"
                f" the same weight {weights[h, i, j]:.4g}, and without the mask with"
                f" {plain[h, i, j]:.4g} and {plain[h, i, k]:.4g}: the mask replaces the scores of"
                " the keys that are left, not of those that are hidden."
            )
            bug = BugName.MASK_INVERTED
        if bug:
            look = "masked_fill(~mask, -inf) on the scores, before the softmax."
            judged.find(bug, message, evidence.example, look)
        else:
            judged.passed.append(f"weights are 0 where {description} hides")


def _lost_scores(
    weights: Tensor, plain: Tensor, allowed: Tensor
) -> tuple[int, int, int, int] | None:
    """A head, a query and two keys, where the weights `[H, L, S]` of all keys that a mask leaves
    are equal in each row, though without the mask they aren't.
    """
    some = allowed.expand_as(weights)
    mean = (weights * some).sum(-1, keepdim=True) / some.sum(-1, keepdim=True).clamp_min(1)
    if ((weights - mean).abs() * some).max() > TOLERANCE:
        return None
    low, high = (
        plain.masked_fill(~some, fill).sort(-1).indices[..., at]
        for fill, at in ((torch.inf, 0), (-torch.inf, -1))
    )
    spread = plain.gather(-1, high[..., None]) - plain.gather(-1, low[..., None])
    h, i = divmod(int(spread[..., 0].masked_fill(some.sum(-1) < 2, 0).argmax()), weights.shape[1])
    if spread[h, i, 0] < MUCH or int(some[h, i].sum()) < 2:
        return None
    return h, i, int(low[h, i]), int(high[h, i])
