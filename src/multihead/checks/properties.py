"""The table of properties that `check` tests on everything, whatever the weights are.

To add one, write a function from `Facts` to findings (`causality`, `tokens`, `masking`, `caches`,
`training` and `precision` have them) and append a `Property`. A user-defined one needs no entry:
`check(..., properties=[Property(...)])`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .caches import find_wrong_caches
from .causality import find_non_finite, find_wrong_causality
from .facts import Facts
from .finding import Finding
from .masking import find_bad_empty_rows, find_leaking_masks, find_leaking_padding
from .precision import (
    find_changed_inputs,
    find_half_overflow,
    find_overflow,
    find_stride_dependence,
    find_weights_problems,
)
from .sizes import find_refused_lengths
from .tokens import find_dependent_queries, find_mixed_batch, find_order_dependence, find_wrong_sums
from .training import find_active_dropout, find_wrong_gradients


@dataclass(frozen=True)
class Property:
    """Something that holds for correct attention.

    Attributes:
        name: as the report lists it.
        claim: the property, in one sentence.
        test: finds what contradicts it; raises `NotApplicable`, with the reason, where it can't be
            tested.

    >>> import torch
    >>> from multihead import check
    >>> from multihead.checks import Finding
    >>> def find_large(facts):
    ...     is_large = facts.callee(facts.callee.x()).abs().max() > 1e6
    ...     return [Finding("output too large", "...", "any", "...")] if is_large else []
    >>> moderate = Property("moderate outputs", "Outputs have a moderate size.", find_large)
    >>> "moderate outputs" in check(torch.nn.MultiheadAttention(8, 2), properties=[moderate]).passed
    True
    """

    name: str
    claim: str
    test: Callable[[Facts], list[Finding]]


PROPERTIES: tuple[Property, ...] = (
    Property("finite outputs", "Finite inputs give finite outputs.", find_non_finite),
    Property(
        "any number of tokens",
        "It takes any number of tokens, or has a tensor that fixes it.",
        find_refused_lengths,
    ),
    Property(
        "causality",
        "Where it is causal, a query reads earlier tokens and its own, never later ones.",
        find_wrong_causality,
    ),
    Property(
        "independent batch elements",
        "A batch element's output doesn't depend on the others.",
        find_mixed_batch,
    ),
    Property(
        "token order",
        "Without positions, tokens in another order give the same outputs in that order; with"
        " positions they don't.",
        find_order_dependence,
    ),
    Property(
        "weights sum to one",
        "Identical tokens give the output of a single one, whatever their number.",
        find_wrong_sums,
    ),
    Property(
        "independent queries",
        "A query changes its own output alone; keys may come in any order and number.",
        find_dependent_queries,
    ),
    Property(
        "masks hide",
        "A mask argument hides keys in some form, a hidden key has no influence, and True means"
        " what the argument's name suggests.",
        find_leaking_masks,
    ),
    Property(
        "padding",
        "Real tokens next to padding give what they give without it.",
        find_leaking_padding,
    ),
    Property(
        "fully masked rows",
        "A query without a key gives finite numbers, and nothing of what is hidden.",
        find_bad_empty_rows,
    ),
    Property(
        "KV cache",
        "A sequence in pieces, with a cache, gives what it gives in one pass.",
        find_wrong_caches,
    ),
    Property(
        "requested weights",
        "Requesting the weights doesn't change the output, and they sum to one.",
        find_weights_problems,
    ),
    Property(
        "gradients",
        "Every projection gets a finite gradient, the one that a small step measures.",
        find_wrong_gradients,
    ),
    Property(
        "no dropout in evaluation",
        "Two runs in evaluation give the same output.",
        find_active_dropout,
    ),
    Property("inputs unchanged", "A call changes no input and no mask.", find_changed_inputs),
    Property(
        "non-contiguous inputs", "Strides of the inputs make no difference.", find_stride_dependence
    ),
    Property("large scores", "Scores of any size have a finite softmax.", find_overflow),
    Property(
        "half precision",
        "The output in float16 and bfloat16 is that of float64, to their precision, with masks and"
        " padding too.",
        find_half_overflow,
    ),
)
