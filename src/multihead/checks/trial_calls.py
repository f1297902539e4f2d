"""`TrialCall`: calls whose outputs the definition has to reproduce."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from .arguments import QUERY_KEY_SHAPES
from .callee import CallSpec
from .facts import Facts, format_shape


@dataclass
class TrialCall:
    """One call: its inputs, the keys that queries should read, and the output.

    Attributes:
        description: as a part of a sentence, "with padding as ...".
        x, k, v: inputs `[B, L, D]`; k and v are None where they follow from x.
        allowed: bool `[L, S]` or `[B, L, S]`, True where a query should read a key.
        out: what the callable returned, `[B, L, D]`.
        shape: the inputs' shapes, for a message.
    """

    description: str
    x: Tensor
    k: Tensor | None
    v: Tensor | None
    allowed: Tensor
    out: Tensor
    shape: str


def trial_calls(facts: Facts) -> Iterator[TrialCall]:
    """Calls with inputs alone (first), with masks and flags, with fewer queries than keys, and with
    fewer key/value heads, as far as the callable takes them.
    """
    callee, length = facts.callee, facts.length
    x, shape = callee.x(), format_shape(callee, callee.batch, length)
    all_pairs = torch.ones(length, length, dtype=torch.bool)
    is_causal = facts.is_causal or (facts.declared_causal and facts.causal_by == "itself")
    default = all_pairs.tril() if is_causal else all_pairs
    yield TrialCall("with its inputs alone", x, None, None, default, callee(x), shape)
    for description, allowed, spec in masked_calls(facts, default):
        with suppress(Exception):
            out = callee(x, spec=spec)
            yield TrialCall(description, x, None, None, allowed, out, shape)
    if callee.form in ("cross", "heads", "memory") and not facts.is_causal:
        q, (k, v) = callee.x(None, 4, seed=5), callee.keys(callee.x(None, 7, seed=6))
        allowed = torch.ones(4, 7, dtype=torch.bool)
        with suppress(Exception):
            out = callee(q, k, v)
            if callee.form != "memory":  # keys and values of separate inputs, if both are read
                other = callee.keys(callee.x(None, 7, seed=7))[1]
                if not (other_out := callee(q, k, other)).equal(out):
                    v, out = other, other_out
            shape = "q of 4 tokens, k and v of 7"
            yield TrialCall("from 4 tokens to 7", q, k, v, allowed, out, shape)
    heads = callee.num_heads
    if callee.is_split and heads and heads % 2 == 0 and "H" in callee.layout:
        half = callee.embed_dim // 2
        k, v = (callee.x(None, length, seed=seed)[..., :half] for seed in (6, 7))
        with suppress(Exception):
            out = callee(x, k, v)
            description = f"with {heads} heads over {heads // 2}"
            shape = f"q of {heads} heads, k and v of {heads // 2}"
            yield TrialCall(description, x, k, v, default, out, shape)


def masked_calls(facts: Facts, default: Tensor) -> Iterator[tuple[str, Tensor, CallSpec]]:
    """For each call a description, the pairs that it should read, and how to call."""
    callee, length = facts.callee, facts.length
    positions, triangle = torch.arange(length), torch.ones(length, length).tril().bool()
    if callee.causal_flag and not facts.is_causal:
        spec = CallSpec(arguments={callee.causal_flag: True})
        yield f"with {callee.causal_flag}=True", triangle, spec
    if (form := callee.mask) is not None:
        if not facts.is_causal:
            yield f"with a causal mask as {form.description}", triangle, CallSpec(allowed=triangle)
        some = ((positions[:, None] * 2 + positions) % 3 != 1) | torch.eye(length).bool()
        some &= default
        yield f"with a mask as {form.description}", some, CallSpec(allowed=some)
    if (form := callee.padding) is not None:
        valid = (positions < length - 2).expand(callee.batch, -1)
        by_query = form.shape in QUERY_KEY_SHAPES
        spec = CallSpec(valid=valid[:, None].expand(-1, length, -1) if by_query else valid)
        yield f"with padding as {form.description}", valid[:, None] & default, spec
