"""The multi-head attention layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..operator.functional import attention
from ..operator.heads import merge_heads, split_heads
from ..operator.masks import IntervalMask

__all__ = ["MultiHeadAttention"]


class MultiHeadAttention(nn.Module):
    """Multi-head attention over vectors of width D: project, split into heads, attend, merge, project.

    Head h of H reads the key/value head h // (H / G), so that G = H is multi-head, 1 < G < H grouped-query and G = 1
    multi-query attention. The four projections are separate modules, each called as one, so that hooks, adapters
    and quantised replacements work on them.

    Args:
        embed_dim: width D of the vectors that come in and go out.
        num_heads: number of query heads H.
        num_kv_heads: number of key/value heads G; H must be a multiple of it. As many as `num_heads` unless given.
        head_dim: width E of a head; D / H unless given.
        bias: whether the projections of queries, keys and values add a bias.
        out_bias: whether the output projection adds one; as `bias` unless given.
        positions: a module applied to the queries and to the keys, `[B, H, L, E]` -> the same, for instance `Rotary`.
        dropout: share of the attention weights dropped in training.

    Shapes: `query` [B, L, D], `key` and `value` [B, S, D] -> [B, L, D]. Without `key` the layer attends to its `query`;
    without `value` it reads the values from `key`.

    Raises:
        ValueError: sizes that don't divide, with both numbers, or inputs whose shapes don't fit.

    >>> layer = MultiHeadAttention(8, 2)
    >>> layer(torch.randn(2, 3, 8)).shape
    torch.Size([2, 3, 8])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        positions: nn.Module | None = None,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if embed_dim <= 0 or num_heads <= 0:
            raise ValueError(f"embed_dim={embed_dim} and num_heads={num_heads}: both must be at least 1")
        if num_kv_heads is None:
            num_kv_heads = num_heads
        if num_kv_heads <= 0 or num_heads % num_kv_heads:
            raise ValueError(
                f"num_kv_heads={num_kv_heads} does not divide num_heads={num_heads}; every key/value head serves the "
                f"same number of query heads, so give a divisor of {num_heads}"
            )
        if head_dim is None:
            if embed_dim % num_heads:
                raise ValueError(
                    f"embed_dim={embed_dim} is not divisible by num_heads={num_heads}; change one of them, "
                    "or give head_dim"
                )
            head_dim = embed_dim // num_heads
        if head_dim <= 0:
            raise ValueError(f"head_dim={head_dim}: a head must be at least 1 wide")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout={dropout}: the share of weights to drop must be at least 0 and below 1")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dropout = dropout
        self.positions = positions
        width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
        out_bias = bias if out_bias is None else out_bias
        self.q_proj = nn.Linear(embed_dim, width, bias=bias, device=device, dtype=dtype)
        self.k_proj = nn.Linear(embed_dim, kv_width, bias=bias, device=device, dtype=dtype)
        self.v_proj = nn.Linear(embed_dim, kv_width, bias=bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(width, embed_dim, bias=out_bias, device=device, dtype=dtype)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: IntervalMask | Tensor | None = None,
    ) -> Tensor:
        """`mask` says which keys a row reads, as in `multihead.attention`; without it every row reads all of them."""
        if key is None:
            key = query
        if value is None:
            value = key
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x.ndim != 3 or x.shape[-1] != self.embed_dim:
                raise ValueError(f"{name}{list(x.shape)}: expected [B, L, embed_dim={self.embed_dim}], batch first")
        q = split_heads(self.q_proj(query), self.num_heads)
        k = split_heads(self.k_proj(key), self.num_kv_heads)
        v = split_heads(self.v_proj(value), self.num_kv_heads)
        if self.positions is not None:
            q, k = self.positions(q), self.positions(k)
        out = attention(q, k, v, mask, dropout=self.dropout if self.training else 0.0)
        assert isinstance(out, Tensor)  # neither the log-sum-exp nor the weights were asked for
        return self.out_proj(merge_heads(out))
