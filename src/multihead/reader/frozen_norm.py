"""`FrozenNorm`: a LayerNorm or RMSNorm as a linear map, with its scale frozen."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..models.introspect import tolerance

CHUNK = 4096  # rows at once


def rounding(dtype: torch.dtype) -> float:
    """Relative error allowed; norms compute in float32, whatever the model's dtype."""
    return max(tolerance(dtype, 10), 16 * torch.finfo(dtype).eps)


class FrozenNorm:
    """y = scale * (x - mean, or x) * gain + shift, found by calling the norm on two inputs.

    Attributes:
        is_linear: whether the module is such a map; else nothing else is defined.
        centred: whether it subtracts the mean.
        gain, shift: `[D]`.
    """

    @torch.no_grad()
    def __init__(self, module: nn.Module, width: int, like: Tensor) -> None:
        # far from mean 0, or a norm that subtracts the mean would look like one that doesn't
        signs = torch.randint(
            0, 2, (2, width), generator=torch.Generator().manual_seed(0), device="cpu"
        )
        x = (4 * signs - 1).to(like)
        self.is_linear = False
        try:  # not __call__, whose hooks would take x for the stream
            up, down = module.forward(x).double(), module.forward(-x).double()
        except (TypeError, ValueError, RuntimeError, AttributeError):  # it takes more arguments
            return
        self.shift = ((up + down) / 2)[0]
        for self.centred in (False, True):
            a = self._centre(x.double())
            self.gain = (up - self.shift)[0] / (a[0] / a[0].square().mean().sqrt())
            again = a[1] / a[1].square().mean().sqrt() * self.gain + self.shift
            if (again - up[1]).abs().max() <= rounding(like.dtype) * up.abs().max():
                self.is_linear = True
                return

    def _centre(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.centred else x

    @torch.no_grad()
    def scale(self, x: Tensor, y: Tensor) -> Tensor | None:
        """The factors `[B, L]` by which the norm scaled the rows of x `[B, L, D]` to give y; None
        where it did something else.
        """
        parts = []
        for a, b in zip(x.split(CHUNK, -2), y.split(CHUNK, -2)):
            work = torch.promote_types(a.dtype, torch.float32)
            a, b = self._centre(a.to(work)) * self.gain.to(work), b.to(work) - self.shift.to(work)
            square = a.square().sum(-1)
            factor = (a * b).sum(-1) / torch.where(square > 0, square, 1)
            if (a * factor[..., None] - b).abs().max() > rounding(x.dtype) * b.abs().max():
                return None
            parts.append(factor)
        return torch.cat(parts, -1)

    def pull_back(self, w: Tensor) -> Tensor:
        """Directions `[..., D]` after the norm as directions of the stream before it."""
        return self._centre(w * self.gain.to(w.dtype))
