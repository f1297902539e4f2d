"""Position encodings that a layer applies to its queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["Rotary"]


class Rotary(nn.Module):
    """Rotary positions: turns pair p of every head by the angle `position * theta ** (-2 p / head_dim)`.

    Pair p is made of the components p and p + head_dim / 2 ("rotate half"), as in the Llama checkpoints of
    transformers; checkpoints that pair neighbours (2 p, 2 p + 1) need their rows of W_Q and W_K reordered first.
    Queries and keys turned this way have scores that depend on the distance of their positions alone.

    Args:
        head_dim: width E of a head; even.
        theta: base of the angles.

    Shapes: `x` [B, H, L, E] -> [B, H, L, E], with `positions` [L] or [B, L] (0 .. L-1 unless given).

    Raises:
        ValueError: an odd `head_dim`, a `theta` that is not positive, or an `x` of another width.

    >>> rotary = Rotary(4)
    >>> x = torch.randn(1, 2, 3, 4)
    >>> torch.equal(rotary(x)[:, :, 0], x[:, :, 0])  # position 0 turns nothing
    True
    """

    def __init__(self, head_dim: int, *, theta: float = 10000.0) -> None:
        super().__init__()
        if head_dim <= 0 or head_dim % 2:
            raise ValueError(f"head_dim={head_dim}: rotary positions turn pairs of components; give an even head_dim")
        if theta <= 0:
            raise ValueError(f"theta={theta}: the base of the angles must be positive, for instance 10000.0")
        self.head_dim = head_dim
        self.theta = theta

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, theta={self.theta}"

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        length, width = x.shape[-2:]
        if width != self.head_dim:
            raise ValueError(f"x is {width} wide in its last axis, but head_dim={self.head_dim}; split the heads first")
        if positions is None:
            positions = torch.arange(length, device=x.device)
        # float32 whatever the dtype of x: in bfloat16 the positions from 256 on would no longer be told apart. The
        # frequencies are made here, not kept in a buffer, so that module.to(torch.bfloat16) cannot round them either.
        pairs = torch.arange(0, width, 2, device=x.device, dtype=torch.float32)
        angle = positions.to(x.device, torch.float32).unsqueeze(-1) * (1.0 / self.theta ** (pairs / width))
        if positions.dim() == 2:
            angle = angle.unsqueeze(1)  # [B, 1, L, E/2]: the same for all heads
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
