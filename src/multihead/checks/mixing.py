"""Talking heads: matrices `[H, H]` that mix scores or weights of all heads (Shazeer et al., 2020).

What they do is undone by their inverse, so that the weights of each head are judged as they are
before: `A' = W A + b` over heads, and `log A = P s` up to a constant of each row, which P's inverse
leaves a constant of the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .extras import find_mixers

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Mixing:
    """A matrix over heads that is applied to the weights, and its inverse.

    Attributes:
        name: of the parameter.
        inverse: `[H, H]`.
        bias: `[H]`.
    """

    name: str
    inverse: Tensor
    bias: Tensor

    def undo(self, weights: Tensor) -> Tensor:
        """Weights `[.., H, L, S]` as they are before the mixing; rounding errors become 0."""
        mixed = weights - self.bias[:, None, None]
        before = torch.einsum("gh,...hls->...gls", self.inverse, mixed)
        return before.where(before.abs() > 1e-9, 0.0)


def find_mixings(module: nn.Module | None, heads: int) -> Iterator[Mixing]:
    """Each matrix that may mix heads, multiplied from either side."""
    if module is None:
        return
    for name in find_mixers(module, heads):
        owner, _, last = name.rpartition(".")
        matrix = module.get_parameter(name).detach().double().reshape(heads, heads)
        bias = getattr(module.get_submodule(owner), "bias", None) if last == "weight" else None
        offset = torch.zeros(heads) if bias is None else bias.detach()
        for each in (matrix, matrix.T):
            if torch.linalg.cond(each) < 1e6:
                yield Mixing(name, torch.linalg.inv(each), offset.double())


def find_mixed_weights(module: nn.Module | None, weights: Tensor) -> Mixing | None:
    """The mixing without which weights `[N, H, L, S]` sum to one and aren't negative."""
    for mixing in find_mixings(module, weights.shape[1]):
        before = mixing.undo(weights)
        if (before.sum(-1) - 1).abs().max() <= TOLERANCE and before.min() >= -TOLERANCE:
            return mixing
    return None


def undo_mixed_scores(module: nn.Module | None, weights: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Weights that scores without their mixing would give, up to a factor of each row; 0 where a
    head doesn't read.
    """
    reads = (weights > 1e-9).all(1, keepdim=True)
    logs = weights.clamp_min(1e-30).log()
    for mixing in find_mixings(module, weights.shape[1]):
        scores = torch.einsum("gh,nhls->ngls", mixing.inverse, logs)
        scores = scores - scores.where(reads, -torch.inf).amax(-1, keepdim=True).nan_to_num(0.0)
        yield mixing.name, scores.exp().where(reads, 0.0)
