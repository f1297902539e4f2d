"""Embeddings of distances: those that weights read next to the values (Shaw et al., 2018), and the
entries of a table that embeddings are.

What W_O takes is then z_i = sum_j A_ij (v_j + r_(i - j)). With A and v read out, r follows by
regression of what is left of z on the weights of each distance.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .readout import Readout

FITS = 1e-6  # relative


def explain_heads(
    module: nn.Module | None, inputs: Sequence[Tensor], readouts: Sequence[Readout]
) -> tuple[str, str] | None:
    """The part that W_O takes besides the weighted values, if that is embeddings of distances by
    the same weights, one for all heads: the words for that, and what isn't judged of it ("" if
    nothing).
    """
    parts, rest, left, output = [], [], [], readouts[0].output
    for r in readouts:
        num_heads, length, size = r.weights.shape
        v = r.values.unflatten(-1, (max(r.kv_heads) + 1, -1)).transpose(0, 1)[list(r.kv_heads)]
        z = r.heads.unflatten(-1, (num_heads, -1)).transpose(0, 1)
        distance = torch.arange(length)[:, None] - torch.arange(size) + size - 1
        columns = torch.zeros(num_heads, length, length + size - 1, dtype=torch.float64)
        columns.scatter_(2, distance.expand_as(r.weights), r.weights)
        parts.append(columns.flatten(0, 1))
        rest.append((z - r.weights @ v).flatten(0, 1))
        if output is None:
            return None
        left.append(r.rest - (z - r.weights @ v).transpose(0, 1).flatten(1) @ output)
    largest = torch.stack([r.rest for r in readouts]).abs().max()
    added = ""
    if not _is_constant(left, largest):
        if any(t.shape != x[0].shape for t, x in zip(left, inputs, strict=True)):
            return None
        left = [t - x[0] for t, x in zip(left, inputs, strict=True)]
        added = ", added to the input"
    if not _is_constant(left, largest):
        return None  # something else reaches the output too
    design, target = torch.cat(parts), torch.cat(rest)
    known = design.abs().amax(0) > 1e-6
    if not target.abs().max() > FITS or len(design) < 2 * int(known.sum()):
        return None
    found = torch.linalg.lstsq(design[:, known], target, driver="gelsd").solution
    if not (design[:, known] @ found - target).abs().max() <= FITS * target.abs().max():
        return None
    distances = [int(d) - size + 1 for d in known.nonzero().flatten()]
    table = find_table(module, distances, found)
    words = "the output is the values and embeddings of distances, weighted, through W_O"
    words += added
    if table is None:
        return words, "embeddings of distances that are no entries of a parameter, one each"
    return f"{words} ({table[0]})", table[1]


def _is_constant(left: Sequence[Tensor], size: Tensor) -> bool:
    """Whether all rows are the same, relative to this size."""
    rows = torch.cat(list(left))
    return bool((rows - rows[0]).abs().max() <= FITS * size)


def find_table(
    module: nn.Module | None, distances: Sequence[int], vectors: Tensor, factor: float | None = None
) -> tuple[str, str] | None:
    """The parameter `[n, E]` whose consecutive entries the vectors `[distances, E]` are; with a
    `factor` times that, up to one constant vector. And what is odd about it, "" if nothing.

    >>> embedding = torch.nn.Embedding(5, 3).double()
    >>> find_table(embedding, [-1, 0, 1], embedding.weight.detach()[[3, 2, 1]])
    ('entry 2 of weight at distance 0', '')
    """
    if module is None or 0 not in distances:
        return None
    zero = distances.index(0)
    d = torch.tensor(distances)
    for name, p in module.named_parameters():
        if p.ndim != 2 or p.shape[1] != vectors.shape[1]:
            continue
        table = p.detach().double()
        for sign in (1, -1):
            for at in range(len(table)):
                rows = at + sign * d
                if rows.min() < 0 or rows.max() >= len(table):
                    continue
                expected = table[rows]
                if factor is not None:
                    expected = factor * (expected - table[at])
                    difference = vectors - vectors[zero] - expected
                else:
                    difference = vectors - expected
                if difference.abs().max() <= 1e-4 * expected.abs().max():
                    words = f"entry {at} of {name} at distance 0"
                    is_centre = 2 * at == len(table) - 1 or d.min() >= 0 or d.max() <= 0
                    odd = f"{words}, of {len(table)} entries: it isn't the one in the middle"
                    return words, "" if is_centre else odd
    return None
