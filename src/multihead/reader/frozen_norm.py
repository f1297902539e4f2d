"""`FrozenNorm`: a normalisation layer as a linear map, its scale frozen."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..models.introspect import tolerance

CHUNK = 4096  # rows whose next tokens' columns of W_U are held at once


def rounding(dtype: torch.dtype) -> float:
    return max(
        tolerance(dtype, 10), 16 * torch.finfo(dtype).eps
    )  # norms work in float32 inside, whatever the model's dtype


class FrozenNorm:
    """A norm as a linear map once its scale is frozen: y = scale * (x - mean, or x) * gain +
    shift.
    """

    @torch.no_grad()
    def __init__(self, module: nn.Module, width: int, like: Tensor) -> None:
        # far from mean 0, or a norm that takes the mean off would look like one that doesn't
        some = (
            4 * torch.randint(0, 2, (2, width), generator=torch.Generator().manual_seed(0)) - 1
        ).to(like)
        forward = type(
            module
        ).forward  # not __call__: somebody's hooks would take this for the stream
        self.right = False
        try:
            up, down = forward(module, some).double(), forward(module, -some).double()
        except (
            TypeError,
            ValueError,
            RuntimeError,
            AttributeError,
        ):  # it takes something else besides
            return
        self.shift = ((up + down) / 2)[0]
        for self.centred in (False, True):
            x = self._in(some.double())
            self.gain = (up - self.shift)[0] / (x[0] / x[0].square().mean().sqrt())
            again = x[1] / x[1].square().mean().sqrt() * self.gain + self.shift
            if (again - up[1]).abs().max() <= rounding(like.dtype) * up.abs().max():
                self.right = True
                return

    def _in(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.centred else x

    @torch.no_grad()
    def scale(self, x: Tensor, y: Tensor) -> Tensor | None:
        """What the norm multiplied each row of x `[B, L, D]` by to give y: `[B, L]`; None where it
        did something else.
        """
        parts = []
        for a, b in zip(x.split(CHUNK, -2), y.split(CHUNK, -2)):
            work = torch.promote_types(a.dtype, torch.float32)
            a, b = self._in(a.to(work)) * self.gain.to(work), b.to(work) - self.shift.to(work)
            square = a.square().sum(-1)
            factor = (a * b).sum(-1) / torch.where(square > 0, square, 1)
            if (a * factor[..., None] - b).abs().max() > rounding(x.dtype) * b.abs().max():
                return None
            parts.append(factor)
        return torch.cat(parts, -1)

    def pull(self, w: Tensor) -> Tensor:
        """Columns behind the norm `[..., D]`, seen from before it."""
        w = w * self.gain.to(w.dtype)
        return w - w.mean(-1, keepdim=True) if self.centred else w
