"""Scores with terms that are linear in the query, in the key, or in both, by position.

Relative positions as in Shaw et al. (2018), the Music Transformer and Transformer-XL add q times
an embedding of the distance to the scores, and constants. So

    log A_ij - log A_ir = slope q_i (k_j - k_r)' + u (k_j - k_r)' + q_i a_ij' + c_ij,

r a key that the query reads most, with one slope and one u for all positions. It is linear in the
unknowns, which several inputs determine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FITS = 1e-4  # relative residual
MAX_WIDTH = 16  # of a head: wider ones take too many inputs


@dataclass(frozen=True)
class TermsFit:
    """Slopes `[H]`, the largest relative residual, and for each head the terms a and c as `[H, E +
    1, L, S]`, 0 at one key of each query and NaN where it isn't known to read.
    """

    slopes: Tensor
    residual: float
    terms: Tensor

    @property
    def holds(self) -> bool:
        return self.residual <= FITS


def count_inputs(head_dim: int) -> int:
    """How many inputs determine the terms, with some to spare."""
    return head_dim + 8


def fit_terms(queries: Tensor, keys: Tensor, weights: Tensor) -> TermsFit:
    """Regression of weights `[N, H, L, S]` with q `[N, H, L, E]` and k `[N, H, S, E]`."""
    fits = [_fit(queries[:, h], keys[:, h], weights[:, h]) for h in range(weights.shape[1])]
    slopes = torch.tensor([slope for slope, _, _ in fits])
    return TermsFit(slopes, max(r for _, r, _ in fits), torch.stack([t for _, _, t in fits]))


def _fit(q: Tensor, k: Tensor, weights: Tensor) -> tuple[float, float, Tensor]:
    num, length, size = weights.shape
    width = q.shape[-1]
    used = weights > 1e-7
    valid = used.double().mean(0) > 0.5
    first = (used.double().mean(0) + weights.mean(0)).argmax(-1)
    together = used & used.gather(-1, first[None, :, None].expand(num, -1, 1))
    valid &= together.sum(0) >= width + 3
    pairs = [(i, j) for i, j in valid.nonzero().tolist() if j != int(first[i])]
    terms = torch.zeros(width + 1, length, size, dtype=torch.float64)
    terms[:, ~valid] = torch.nan
    if not pairs:
        return 0.0, torch.inf, terms
    shared = 1 + width
    design = torch.zeros(len(pairs), num, shared + len(pairs) * (width + 1), dtype=torch.float64)
    y = torch.zeros(len(pairs), num, dtype=torch.float64)
    logs = weights.clamp_min(1e-30).log()
    for n, (i, j) in enumerate(pairs):
        step = k[:, j] - k[:, first[i]]
        start = shared + n * (width + 1)
        design[n, :, 0] = (q[:, i] * step).sum(-1)
        design[n, :, 1:shared] = step
        design[n, :, start : start + width] = q[:, i]
        design[n, :, start + width] = 1.0
        y[n] = logs[:, i, j] - logs[:, i, first[i]]
        design[n, ~together[:, i, j]] = 0.0
        y[n, ~together[:, i, j]] = 0.0
    rows, target = design.flatten(0, 1), y.flatten()
    solution = torch.linalg.pinv(rows) @ target
    residual = float((rows @ solution - target).norm() / target.norm().clamp_min(1e-9))
    for n, (i, j) in enumerate(pairs):
        start = shared + n * (width + 1)
        terms[:, i, j] = solution[start : start + width + 1]
    return float(solution[0]), residual, terms
