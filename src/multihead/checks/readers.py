"""`open_reader`: the matrices with which the weights of a callable can be read out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from .callee import Callee
from .latents import latent_assignments
from .projections import Assignment, assignments, find_matrices, possible_head_counts
from .readout import CannotRead, WeightReader, find_reader
from .scores import fit_scores

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
