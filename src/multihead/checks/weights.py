"""`read_calls`: the weights of each call, as read out next to those of the definition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from ..errors import MultiheadError
from .caches import PIECES, cached_runs, read_cached_weights
from .callee import Callee, CallSpec
from .definition import Definition, Projected, compute_heads
from .facts import Facts
from .projections import find_norms
from .readers import find_reader, open_reader
from .readout import CannotRead, Readout, WeightReader
from .recompute import Match, definitions, project
from .report import CallWeights
from .trial_calls import TrialCall, masked_calls

SIZE = 0.5  # of the inputs: no weight is then too small to be seen
GATED = "A is multiplied by the gate of the head, or by the mean over those of its features."
NO_DEFINITION = "the definition doesn't reproduce the output, so there is nothing to compare with"


def read_calls(
    facts: Facts, match: Match | None, scale: float | None, *, is_wrong: bool
) -> list[CallWeights]:
    """The call with its inputs alone, then those with masks and flags; one sequence each.

    Where nothing reproduces the output, the definition nearest to A is what is expected of a wrong
    one; of others only if it is equal to A.
    """
    callee = facts.callee
    x = callee.x(1, facts.length, size=SIZE)
    reader: WeightReader | None = None
    reason = ""
    try:
        reader = _find(callee, match)
    except CannotRead as error:
        reason = str(error)
    calls = [
        _read(facts, reader, match, scale, call, spec, reason, is_wrong)
        for call, spec in _calls(facts, match, x)
    ]
    return calls if reader is None else [*calls, *_read_cached(facts)]


def _read_cached(facts: Facts) -> Iterator[CallWeights]:
    """The weights of a sequence in pieces, next to those of one pass."""
    if facts.causal_by is None or facts.callee.is_split:
        return
    pieces = PIECES[0]
    for name, run in cached_runs(facts.callee):
        with suppress(CannotRead, MultiheadError):
            cached, full = read_cached_weights(facts, run, pieces)
            lengths = " and ".join([", ".join(map(str, pieces[:-1])), str(pieces[-1])])
            yield CallWeights(
                f"in pieces of {lengths} tokens, with {name}",
                cached[None],
                full[None],
                note="those expected are of one pass, as read out",
            )
            return


def _find(callee: Callee, match: Match | None) -> WeightReader:
    if match is None:
        return open_reader(callee)
    reader = WeightReader(callee, match.assignment, match.definition.num_heads)
    if match.assignment is not None and match.assignment.v.shared is not None:
        return find_reader(callee, [match.assignment], [reader.num_heads])  # the order of its rows
    return reader


def _calls(facts: Facts, match: Match | None, x: Tensor) -> Iterator[tuple[TrialCall, CallSpec]]:
    triangle = torch.ones(facts.length, facts.length).tril().bool()
    default = triangle if facts.is_causal else torch.ones_like(triangle)
    first = default if match is None else match.allowed
    calls = [("with its inputs alone", first, CallSpec()), *masked_calls(facts, default)]
    for description, allowed, spec in calls:
        if spec.valid is not None:
            spec = CallSpec(valid=spec.valid[:1])
            allowed = allowed[:1] if allowed.ndim == 3 else allowed
        yield TrialCall(description, x, None, None, allowed, x, ""), spec


def _read(
    facts: Facts,
    reader: WeightReader | None,
    match: Match | None,
    scale: float | None,
    call: TrialCall,
    spec: CallSpec,
    reason: str,
    is_wrong: bool,
) -> CallWeights:
    readout, expected, why, note = None, None, "", ""
    if reader is not None:
        try:
            readout = reader.read(call.x, spec)
        except (CannotRead, RuntimeError, ValueError, TypeError) as error:
            reason = " ".join(str(error).split())[:200]
    weights = None if readout is None else readout.weights[None]
    if match is not None:
        inputs = project(facts, match.assignment, call)
        expected, _ = compute_heads(inputs, call.allowed, match.definition)
        if inputs.gate is not None:
            expected, note = _with_gate(expected, inputs.gate), GATED
    elif readout is not None and reader is not None:
        options = list(definitions(facts, reader.assignment, [reader.num_heads], scale))
        expected = _nearest(facts, readout, call.allowed, options)
        is_equal = expected is not None and expected.shape[1:] == readout.weights.shape
        if expected is None or not (is_wrong or (is_equal and expected.allclose(readout.weights))):
            expected, why = None, NO_DEFINITION
    else:
        why = reason
    contributions = None if readout is None else readout.contributions[None]
    rest = None if readout is None else readout.rest[None]
    reason = "" if readout else reason
    return CallWeights(call.description, weights, expected, reason, why, note, contributions, rest)


def _with_gate(weights: Tensor, gate: Tensor) -> Tensor:
    """Weights `[B, H, L, S]` times the gate of the head, or the mean over those of its features."""
    of_head = gate.unflatten(-1, (weights.shape[1], -1)).mean(-1)
    return weights * of_head.mT[..., None]


def _nearest(
    facts: Facts, readout: Readout, allowed: Tensor, options: Sequence[Definition]
) -> Tensor | None:
    """The weights of that definition, `[1, H, L, S]`, which are nearest to those read out; of the
    first definition where none has as many heads.
    """
    module, best, other = facts.callee.module, None, None
    norms = (None, None) if module is None else find_norms(module)
    q, k = readout.queries[None], readout.keys[None]
    inputs = Projected(q, k, k, None, *norms, embed_dim=facts.callee.embed_dim)
    for definition in options:
        try:
            weights, _ = compute_heads(inputs, allowed, definition)
        except RuntimeError:  # keys that aren't tokens, such as registers
            continue
        if weights.shape[1:] != readout.weights.shape:
            other = weights if other is None else other
            continue
        distance = float((weights[0] - readout.weights).abs().max())
        if best is None or distance < best[0]:
            best = distance, weights
    return other if best is None else best[1]
