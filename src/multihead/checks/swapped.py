"""Judge whether values are computed with another projection than that of their name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .evidence import TOLERANCE, Judged
from .factors import CannotRead
from .facts import Facts, format_shape
from .finding import BugName
from .projections import Assignment, assignments, find_matrices, possible_head_counts
from .readout import WeightReader


def judge_swapped_values(facts: Facts) -> Judged | None:
    """A finding where the output isn't linear in what W_V returns, and reads what W_K or W_Q
    returns with weights that sum to one; None where that isn't so, or the projections aren't three
    matrices with names.
    """
    callee = facts.callee
    matrices = [] if callee.is_split else find_matrices(callee)
    head_counts = possible_head_counts(callee, callee.num_heads, matrices)
    if len(head_counts) > 1 or not matrices:
        return None
    named = next(iter(assignments(callee, head_counts)), None)
    if named is None or named.how or not are_separate(named):
        return None
    x = callee.x(1, size=0.5)
    for other, letter in _exchanged(named):
        try:
            weights = WeightReader(callee, other, head_counts[0]).read(x).weights
        except (CannotRead, RuntimeError, IndexError):
            continue
        sums = weights.sum(-1)
        if (sums - 1).abs().max() > TOLERANCE or weights.min() < -TOLERANCE:
            continue
        judged = Judged()
        judged.find(
            BugName.PROJECTIONS,
            f"Values are computed with W_{letter} ({other.v.name}): the output is a weighted mean"
            f" of what that returns, with weights that sum to {sums.mean():.4g}, and isn't linear"
            f" in what {named.v.name} returns.",
            format_shape(callee, 1, facts.length),
            "Which of q, k and v is which, from their projections to the product with the values.",
        )
        return judged
    return None


def are_separate(assignment: Assignment | None) -> bool:
    """Whether queries, keys and values have a matrix each, with such names."""
    if assignment is None:
        return False
    parts = (("q", assignment.q), ("k", assignment.k), ("v", assignment.v))
    return all(m.projection == who and m.index is None for who, m in parts)


def _exchanged(a: Assignment) -> Iterator[tuple[Assignment, str]]:
    """With values by W_K, and by W_Q."""
    if a.k.weight.shape == a.v.weight.shape:
        yield replace(a, k=a.v, v=a.k), "K"
    if a.q.weight.shape == a.v.weight.shape:
        yield replace(a, q=a.v, v=a.q), "Q"
