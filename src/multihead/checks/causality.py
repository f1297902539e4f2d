"""Properties of causal attention: which tokens a query reads."""

from __future__ import annotations

import torch
from torch import Tensor

from .callee import CallSpec
from .facts import WINDOWS, Facts, find_smallest, format_shape, relative_difference
from .finding import BugName, Finding, NotApplicable
from .probing import measure_influence


def find_non_finite(facts: Facts) -> list[Finding]:
    """Outputs that are NaN or infinite, of finite inputs."""
    callee, spec = facts.callee, facts.causal_spec(facts.length)
    out = callee(callee.x(), spec=spec)
    rows = (~out.isfinite()).any(-1).any(0).nonzero().flatten().tolist()
    if not rows:
        return []
    only_first = rows == [0]
    look = "A query without a key gives 0/0: look at which keys the mask leaves."
    if only_first and facts.influence[1:].isfinite().all():
        look = (
            "A query without a key gives 0/0. Query 0 has only itself to read, and the causal mask"
            " hides it: use torch.tril(...) with its diagonal, masked_fill(triu(diagonal=1))."
        )

    def is_non_finite(batch: int, length: int) -> float | None:
        out = callee(callee.x(batch, length), spec=facts.causal_spec(length))
        return None if out.isfinite().all() else torch.nan

    return [
        Finding(
            BugName.NOT_ITSELF if only_first else BugName.EMPTY_ROW_NAN,
            f"The output of {_name_queries(rows)} is NaN or infinite{facts.describe(spec)}, though"
            " the inputs are finite.",
            find_smallest(facts, is_non_finite),
            look,
        )
    ]


def _name_queries(rows: list[int]) -> str:
    shown = ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")
    return f"{'query' if len(rows) == 1 else 'queries'} {shown}"


def find_wrong_causality(facts: Facts) -> list[Finding]:
    """Queries that read later tokens, or don't read what they should."""
    findings = _find_isolated_pairs(facts)
    if facts.declared_causal is False or (facts.causal_by is None and not facts.declared_causal):
        if findings or facts.influence.isnan().any():
            return findings
        if not _is_inverted(facts.influence, facts.threshold):
            raise NotApplicable(
                "it isn't causal (queries read later tokens) and has no mask or flag that makes it"
                " causal"
            )
    if facts.causal_by is None:
        return [
            *findings,
            Finding(
                BugName.FUTURE,
                "Queries read later tokens and no earlier ones, and it has no mask and no flag that"
                " hides later tokens.",
                format_shape(facts.callee, 1, 2),
                "Where the scores are computed: nothing hides keys j > i before the softmax.",
            ),
        ]
    spec = facts.causal_spec(facts.length)
    wrong = _find_wrong_reads(facts, spec)
    if wrong and facts.causal_by == "mask" and (mixers := facts.token_mixers):
        raise NotApplicable(f"tokens reach their neighbours whatever a mask hides ({mixers[0]})")
    findings += wrong
    if not findings and not facts.callee.is_split and spec.is_plain:
        findings += _find_unread_token(facts)
    return findings


def _find_wrong_reads(facts: Facts, spec: CallSpec) -> list[Finding]:
    callee, threshold = facts.callee, facts.threshold
    influence = facts.influence
    if not spec.is_plain:
        influence = measure_influence(callee, facts.length, spec)
    how = facts.describe(spec)
    others = influence.nan_to_num(0.0) * (1 - torch.eye(facts.length))
    past, future = others.tril(-1) > threshold, others.triu(1) > threshold

    def future_influence(batch: int, length: int) -> float | None:
        influence = measure_influence(callee, length, facts.causal_spec(length))
        largest = influence.nan_to_num(0.0).triu(1).max().item()
        return largest if largest > threshold else None

    example = ""
    if future.any():
        smallest = find_smallest(facts, future_influence, min_length=2)
        example = f"{smallest}: the output of a query, when a later token changes"
    if _is_inverted(others, threshold):
        return [
            Finding(
                BugName.MASK_INVERTED,
                f"Queries read later tokens and not earlier ones{how}: the mask is inverted.",
                example,
                "masked_fill(mask, -inf) hides where True; torch.tril(...) is True where a key may"
                " be read, so hide where it is False: masked_fill(mask == 0, -inf).",
            )
        ]
    if not future.any():
        if past[-1].any():
            return []
        message = f"No query reads an earlier token{how}."
        look = "The causal mask: keys j <= i may be read, torch.tril(diagonal=0)."
        return [Finding(BugName.FUTURE, message, format_shape(callee, 1, 2), look)]
    distances = {int(j - i) for i, j in future.nonzero()}
    if not future[1:].any():
        return [
            Finding(
                BugName.NOT_ITSELF,
                f"Query 0 reads later tokens{how}, and no other query does: the mask hides all keys"
                " from query 0, its own too, so that all get the same weight.",
                example,
                "The diagonal of the causal mask: keys j <= i may be read, not j < i.",
            )
        ]
    if distances == {1}:
        return [
            Finding(
                BugName.NEXT_TOKEN,
                f"Each query reads one token too many{how}: token i + 1 changes the output at i.",
                example,
                "The diagonal of the causal mask: torch.tril(diagonal=0), torch.triu(diagonal=1).",
            )
        ]
    return [
        Finding(
            BugName.FUTURE,
            f"Later tokens change the output of earlier queries{how}, up to {max(distances)} ahead"
            f" and by {others.triu(1).max():.2g} of the output's size, where earlier tokens change"
            f" it by {others.tril(-1).max():.2g}.",
            example,
            "Whether a causal mask reaches the scores, the order of mask and softmax (the mask"
            " comes first, as -inf), and every reshape of [B, L, H, E]: without a transpose it"
            " mixes tokens. Where it isn't meant to be causal: causal=False.",
        )
    ]


def _find_unread_token(facts: Facts) -> list[Finding]:
    """A single token whose output doesn't depend on it."""
    callee = facts.callee
    try:
        difference = relative_difference(callee(callee.x(1, 1)), callee(callee.x(1, 1, seed=5)))
    except Exception:
        return []
    if difference > facts.threshold:
        return []
    return [
        Finding(
            BugName.NOT_ITSELF,
            "A single token's output doesn't depend on it: it doesn't attend to itself.",
            format_shape(callee, 1, 1),
            "The diagonal of the causal mask: keys j <= i may be read.",
        )
    ]


def _is_inverted(influence: Tensor, threshold: float) -> bool:
    influence = influence.nan_to_num(0.0)
    # The last query of a strictly upper mask has no key, and may read all of them or be NaN.
    later, earlier = influence.triu(1)[:-1], influence.tril(-1)[:-1]
    return bool(later.gt(threshold).any() and not earlier.gt(threshold).any())


def _find_isolated_pairs(facts: Facts) -> list[Finding]:
    """Pairs without influence, in no order that a mask has."""
    influence = facts.influence.nan_to_num(0.0)
    pairs = ~torch.eye(len(influence), dtype=torch.bool)
    unreached = (influence <= facts.threshold) & pairs
    if (
        facts.is_causal
        or not unreached.any()
        or unreached[pairs].all()
        or facts.find_names(f"{WINDOWS}|mask|tril|triu")
    ):
        return []
    i, j = unreached.nonzero()[0].tolist()
    return [
        Finding(
            BugName.MIXED,
            f"Query {i} never reads token {j}, though nothing hides it: {int(unreached.sum())} of"
            f" {int(pairs.sum())} pairs don't influence each other, in no order of a mask.",
            format_shape(facts.callee, 1, len(influence)),
            "A reshape of [B, L, H * E] straight to [B, H, L, E] cuts tokens into heads: view as"
            " [B, L, H, E], then transpose(1, 2); and transpose back before merging.",
        )
    ]
