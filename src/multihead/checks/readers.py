"""`open_reader`: the matrices with which the weights of a callable can be read out."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from .callee import Callee
from .factors import STRAY, CannotRead
from .latents import latent_assignments
from .points import outputs_of_modules
from .projections import Assignment, assignments, find_matrices, possible_head_counts
from .readout import WeightReader
from .scores import fit_scores

FEW_PROBES, MAX_CANDIDATES, MAX_SECONDS = 20, 24, 6.0
MAX_UNUSUAL, MAX_POINTS = 2, 8  # assignments, and modules on the way, that are tried
MAX_PAIRS = 30  # of matrices that are tried as W_Q and W_K
SEEDS = (0, 1, 2)  # of the inputs by which they are chosen


def open_reader(callee: Callee) -> WeightReader:
    """A reader of the callable's weights: by the names of its projections, else by elimination,
    as W_V and W_O those with which the derivative is 0 where it must be, and as W_Q and W_K those
    whose products give the weights.

    Raises:
        CannotRead: the weights can't be read out, with the reason.
    """
    matrices = [] if callee.is_split else find_matrices(callee)
    head_counts = possible_head_counts(callee, callee.num_heads, matrices)
    if callee.is_split or (callee.form == "cross" and not matrices):
        return find_reader(callee, [None], head_counts)
    options: list[Assignment] = list(latent_assignments(callee, matrices, head_counts))
    options = options or list(assignments(callee, head_counts))
    reader = find_reader(callee, options, head_counts)
    return _with_best_queries(reader, options)


def find_reader(
    callee: Callee, options: Sequence[Assignment | None], head_counts: Sequence[int]
) -> WeightReader:
    """The first assignment and number of heads with which weights can be read out.

    Raises:
        CannotRead: none; the message is the reason of the first.
    """
    reasons: list[str] = []
    deadline = time.thread_time() + MAX_SECONDS
    x, distinct = callee.x(1, size=0.5), list(_distinct(options))
    plain = (r for a in distinct for r in _readers(callee, a, head_counts))
    some = (r for a in distinct[:MAX_UNUSUAL] for r in _readers(callee, a, head_counts))
    for reader in itertools.chain(plain, *map(_unusual, some)):
        try:
            # Heads of one feature can be read out of everything, a gate included.
            if len(head_counts) > 1 and reader.head_dims[1] == 1:
                continue
            reader.read(x, max_probes=FEW_PROBES)
            readout = reader.read(x)
            if readout.spread >= STRAY:
                raise CannotRead("the features of a head have different weights, as with a gate")
            weights = readout.weights
            if weights.shape[-2:].numel() > 1 and (weights.tril(-1) + weights.triu(1) == 0).all():
                raise CannotRead("every query reads itself alone where values are projected")
            return reader
        except CannotRead as error:
            reasons.append(str(error))
        except (RuntimeError, IndexError) as error:  # shapes that don't fit
            reasons.append(" ".join(str(error).split())[:100])
        if time.thread_time() > deadline:
            break
    raise CannotRead(reasons[0] if reasons else "no value projection was found")


def _unusual(reader: WeightReader) -> Iterator[WeightReader]:
    """Readers of what values pass before the weights, and the heads' outputs after them."""
    names: list[str | None] = [*_modules_on_the_way(reader.callee)[:MAX_POINTS]]
    places: list[tuple[str | None, str | None]] = [(n, None) for n in names]
    places += [(None, n) for n in names]
    undone = replace(reader, undoes_factors=True)
    for values_at, heads_at in places:
        yield replace(reader, values_at=values_at, heads_at=heads_at)
    yield undone
    for values_at, heads_at in itertools.permutations(names, 2):
        yield replace(reader, values_at=values_at, heads_at=heads_at)
    for values_at, heads_at in places:
        yield replace(undone, values_at=values_at, heads_at=heads_at)


def _modules_on_the_way(callee: Callee) -> list[str]:
    """Names of the modules without matrices that are in use: norms, convolutions, activations."""
    if callee.module is None:
        return []
    seen, handles = outputs_of_modules(callee.module)
    try:
        callee(callee.x(1, size=0.5))
    finally:
        for handle in handles:
            handle.remove()
    return [
        name
        for name, m in callee.module.named_modules()
        if name in seen and not list(m.children()) and not hasattr(m, "in_features")
    ]


def _readers(
    callee: Callee, assignment: Assignment | None, head_counts: Sequence[int]
) -> Iterator[WeightReader]:
    is_shared = assignment is not None and assignment.v.shared is not None
    for num_heads in head_counts:
        yield WeightReader(callee, assignment, num_heads)
        if is_shared:
            yield WeightReader(callee, assignment, num_heads, heads_first=True)


def _distinct(options: Sequence[Assignment | None]) -> Iterator[Assignment | None]:
    """The first of those that differ in their values or W_O."""
    seen: set[Any] = set()
    for each in options:
        key: Any = None
        if each is not None:
            index = None if each.v.index is None else tuple(each.v.index.tolist())
            how = "" if each.how != "transposed" else each.how
            key = (each.v.name, index, each.o and each.o.name, how)
        if key not in seen and len(seen) < MAX_CANDIDATES:
            seen.add(key)
            yield each


def _with_best_queries(reader: WeightReader, options: Sequence[Assignment]) -> WeightReader:
    """The reader with those W_Q and W_K, where several are possible, from whose products the
    weights follow best.
    """
    chosen = reader.assignment
    assert chosen is not None
    o_name = chosen.o and chosen.o.name
    others = [
        a
        for a in options
        if a.v.name == chosen.v.name
        and _index(a) == _index(chosen)
        and (a.o and a.o.name) == o_name
        and a.how == chosen.how
    ]
    if len(others) < 2:
        return reader
    best, residual = reader, torch.inf
    inputs = [reader.callee.x(1, size=0.5, seed=seed) for seed in SEEDS]
    weights = torch.stack([reader.read(x).weights for x in inputs])
    for option in others[:MAX_PAIRS]:
        trial = replace(reader, assignment=option)
        try:
            width = trial.head_dims[0]
            queries, keys = zip(*(trial.read_queries_and_keys(x) for x in inputs), strict=True)
        except (CannotRead, RuntimeError):
            continue
        q, k = (
            torch.stack([t.unflatten(-1, (-1, width)).transpose(0, 1) for t in tensors])
            for tensors in (queries, keys)
        )
        fit = fit_scores(q, k, weights)
        # With the heads in order.
        if not fit.pairs and fit.residual < residual:
            best, residual = trial, fit.residual
    return best


def _index(assignment: Assignment) -> tuple[int, ...] | None:
    index = assignment.v.index
    return None if index is None else tuple(index.tolist())
