"""The transformer block: one residual update for each of its two sub-layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..operator.masks import IntervalMask
from .multi_head import MultiHeadAttention

__all__ = ["SwiGLU", "TransformerBlock"]


class SwiGLU(nn.Module):
    """The gated feed-forward layer `down(silu(gate(x)) * up(x))`.

    Shapes: [..., D] -> [..., D], through a width of `hidden_dim`.

    >>> SwiGLU(8, 24)(torch.randn(2, 3, 8)).shape
    torch.Size([2, 3, 8])
    """

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(embed_dim, hidden_dim, bias=bias, device=device, dtype=dtype)
        self.up_proj = nn.Linear(embed_dim, hidden_dim, bias=bias, device=device, dtype=dtype)
        self.down_proj = nn.Linear(hidden_dim, embed_dim, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TransformerBlock(nn.Module):
    """A pre-norm block: `x + attention(norm(x))`, then `x + feed_forward(norm(x))`, with RMS norms and a SwiGLU.

    Args:
        embed_dim, num_heads, num_kv_heads, head_dim, bias, positions, dropout: as in `MultiHeadAttention`.
        hidden_dim: width of the feed-forward layer.
        norm_eps: added to the mean square inside the norms.

    Shapes: [B, L, D] -> [B, L, D].

    Raises:
        ValueError: sizes that don't divide, as in `MultiHeadAttention`.

    >>> TransformerBlock(8, 2, hidden_dim=24)(torch.randn(2, 3, 8)).shape
    torch.Size([2, 3, 8])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        hidden_dim: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        positions: nn.Module | None = None,
        norm_eps: float = 1e-6,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(embed_dim, eps=norm_eps, device=device, dtype=dtype)
        self.attention = MultiHeadAttention(
            embed_dim,
            num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            bias=bias,
            positions=positions,
            dropout=dropout,
            device=device,
            dtype=dtype,
        )
        self.feed_forward_norm = nn.RMSNorm(embed_dim, eps=norm_eps, device=device, dtype=dtype)
        self.feed_forward = SwiGLU(embed_dim, hidden_dim, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor, *, mask: IntervalMask | Tensor | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), mask=mask)
        return x + self.feed_forward(self.feed_forward_norm(x))
