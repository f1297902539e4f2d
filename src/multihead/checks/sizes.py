"""The property that attention takes any number of tokens."""

from __future__ import annotations

from .callee import Callee
from .facts import Facts, format_shape
from .finding import BugName, Finding, NotApplicable
from .projections import projection_of_path


def find_refused_lengths(facts: Facts) -> list[Finding]:
    """Numbers of tokens with which it fails, though it runs with another.

    Code that mixes up axes may run where two of them have the same size.
    """
    callee, length = facts.callee, facts.length
    if callee.library is not None:
        raise NotApplicable("it is a library's, which may take windows of one length")
    errors = {}
    for other in (length + 1, length + 3, max(length - 2, 2), 2, 1):
        try:
            callee(callee.x(2, other), spec=facts.causal_spec(other))
        except Exception as error:
            errors[other] = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    longer = [n for n in errors if n > length]
    if not errors or errors.keys() == {1}:
        return []
    if names := _tensors_of_length(callee, length):
        raise NotApplicable(f"it takes {length} tokens, as {names[0]} has")
    if longer and len(longer) == len(errors):  # a table that ends there
        raise NotApplicable(f"it takes at most {length} tokens")
    some, message = next(iter(errors.items()))
    sizes = {"features": callee.embed_dim, "heads": callee.num_heads}
    equal = [f", as many as it has {name}" for name, size in sizes.items() if size == length]
    return [
        Finding(
            BugName.SIZES,
            f"It runs with {length} tokens{''.join(equal[:1])}, and fails with {some} ({message}).",
            format_shape(callee, 1, some),
            "Each view, reshape and transpose: the axis of the tokens mustn't be taken for that of"
            " heads or features.",
        )
    ]


def _tensors_of_length(callee: Callee, length: int) -> list[str]:
    """Names of parameters and buffers that may fix the number of tokens: for instance of an image's
    window; not of projections.
    """
    if callee.module is None:
        return []
    tensors = [*callee.module.named_parameters(), *callee.module.named_buffers()]
    usual = {callee.embed_dim, callee.num_heads, callee.head_dim}
    sizes = {length, length * length} - usual
    return [n for n, t in tensors if sizes & set(t.shape) and projection_of_path(n) is None]
