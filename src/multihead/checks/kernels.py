"""Weights that aren't a softmax over the keys by choice: sigmoids, a softmax with one more in its
sum, rectified scores.

Each is recognised by an identity that holds for every pair of query and key by itself, without the
constant that a softmax has in each row: with s = q k' times a scale, plus a constant of the head,

    sigmoid:            log A_ij - log(1 - A_ij)      = s_ij
    softmax of one more: log A_ij - log(1 - sum_j A_ij) = s_ij      (the constant is minus the sink)
    rectified:          A_ij = max(s_ij, 0), or its square.

A bug, such as a softmax that lacks its sum, fulfils none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .evidence import Evidence, Judged
from .finding import BugName

FITS = 1e-5  # relative residual


@dataclass(frozen=True)
class Kernel:
    """A function in the place of the softmax.

    Attributes:
        name: as a part of a sentence.
        names: pattern of the names by which code declares it.
        slopes, constants: the scale and the constant of each head, `[H]`.
    """

    name: str
    names: str
    slopes: Tensor
    constants: Tensor

    @property
    def is_rectified(self) -> bool:
        return "rectified" in self.name


ONE_MORE = (
    r"(^|_)sinks?(_|$)|add_one|off_?by_?one|plus_?(1|one)|softmax_?(1|one)|quiet|ghost|"
    r"one_more|zero_attn"
)


def _odds(a: Tensor) -> Tensor:
    return a.log() - (1 - a).log()


def _rest_odds(a: Tensor) -> Tensor:
    return a.log() - (1 - a.sum(-1, keepdim=True)).log()


KERNELS: tuple[tuple[str, str, Callable[[Tensor], Tensor]], ...] = (
    ("a sigmoid of the scores instead of a softmax", r"sigmoid|logistic", _odds),
    ("a softmax with one more in its sum (a sink without a value)", ONE_MORE, _rest_odds),
    ("rectified scores instead of a softmax", r"relu|rectif", lambda a: a),
    ("squares of rectified scores instead of a softmax", r"relu|rectif|squared?", Tensor.sqrt),
)


def find_kernel(weights: Tensor, products: Tensor) -> Kernel | None:
    """The kernel by which weights `[N, H, L, S]` follow from q k' `[N, H, L, S]`, in every head.

    >>> products = torch.randn(3, 2, 5, 5, dtype=torch.float64)
    >>> kernel = find_kernel((0.5 * products - 1).sigmoid(), products)
    >>> kernel.name, kernel.slopes.tolist()
    ('a sigmoid of the scores instead of a softmax', [0.5, 0.5])
    >>> find_kernel((0.5 * products).exp(), products) is None
    True
    """
    if weights.min() < -1e-9:
        return None
    for name, names, undo in KERNELS:
        fits = [_fit(weights[:, h], products[:, h], undo) for h in range(weights.shape[1])]
        if all(residual <= FITS for *_, residual in fits):
            slopes, constants = (torch.tensor([f[n] for f in fits]) for n in (0, 1))
            return Kernel(name, names, slopes, constants)
    return None


def _fit(weights: Tensor, x: Tensor, undo: Callable[[Tensor], Tensor]) -> tuple[float, ...]:
    """Slope, constant and relative residual of what undoes the kernel, `[N, L, S]`."""
    y = undo(weights)
    used = (weights > 1e-9) & y.isfinite()
    if used.sum() < 8:
        return 0.0, 0.0, torch.inf
    design = torch.stack([x[used], torch.ones_like(x[used])], 1)
    (slope, constant), y = torch.linalg.lstsq(design, y[used, None]).solution[:, 0], y[used]
    error = (y - design @ torch.stack([slope, constant])).norm()
    spread = (y - y.mean()).norm()
    return float(slope), float(constant), float(error / spread) if spread > 1e-9 else torch.inf


def judge_kernel(judged: Judged, evidence: Evidence) -> Kernel | None:
    """The reason why weights don't sum to one: they aren't meant as a softmax."""
    if evidence.products is None:
        return None
    kernel = find_kernel(evidence.weights, evidence.products)
    if kernel is None:
        return None
    judged.explained |= dict.fromkeys((BugName.NOT_NORMALISED, BugName.NEGATIVE), kernel.name)
    if names := evidence.declared(kernel.names, in_docstrings=True):
        judged.passed.append(f"the weights are {kernel.name}, as its code declares ({names[0]})")
    else:
        judged.unjudged.append(
            f"whether the weights are meant to be {kernel.name}: they are so exactly, and no name"
            " in the code declares it"
        )
    return kernel
