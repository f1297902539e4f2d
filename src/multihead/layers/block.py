"""The transformer block and its feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import MultiheadError
from ..ops.masks import IntervalMask
from ..ops.nested import is_nested
from ..ops.tensors import TensorLike, require_tensor
from .attention import MultiHeadAttention
from .cache import Cache, WindowCache
from .norms import KINDS
from .packed import run_block_packed
from .require import require_number, require_positive_int

__all__ = ["MLP", "SwiGLU", "TransformerBlock"]


class SwiGLU(nn.Module):
    """Gated feed-forward layer `down(silu(gate(x)) * up(x))` (Shazeer 2020).

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


class MLP(nn.Module):
    """Feed-forward layer `down(activation(up(x)))`, with GELU unless given (Vaswani et al. 2017,
    equation 2, has ReLU).

    Shapes: [..., D] -> [..., D], through a width of `hidden_dim`.

    >>> MLP(8, 24, activation=F.relu)(torch.randn(2, 3, 8)).shape
    torch.Size([2, 3, 8])
    """

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        *,
        activation: Callable[[Tensor], Tensor] = F.gelu,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.up_proj = nn.Linear(embed_dim, hidden_dim, bias=bias, device=device, dtype=dtype)
        self.down_proj = nn.Linear(hidden_dim, embed_dim, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.up_proj(x)))


FEED_FORWARDS: dict[str, Callable[..., nn.Module]] = {"swiglu": SwiGLU, "mlp": MLP}


class TransformerBlock(nn.Module):
    """Self attention, optional cross attention, and a feed-forward layer, each added to the
    residual stream.

    Pre-norm, `x + layer(norm(x))`, or with `norm_first=False` post-norm, `norm(x + layer(x))`
    (Vaswani et al. 2017).

    Args:
        embed_dim, num_heads, num_kv_heads, head_dim, bias, qk_norm, positions, softcap, sinks,
            gate, dropout: as in `MultiHeadAttention`; positions are for the self attention alone.
        hidden_dim: width of the feed-forward layer.
        cross_attention: whether the block also attends to a `memory`, such as an encoder's output.
        memory_dim: width of that memory; D unless given.
        norm_first: pre-norm, or else post-norm.
        norm: "rms" or "layer".
        norm_eps: added to the mean square (or variance) inside the norms.
        feed_forward: "swiglu", "mlp" (GELU), or a module, [..., D] -> [..., D].

    Shapes: [B, L, D] -> [B, L, D], with `memory` [B, S, memory_dim].

    Raises:
        MultiheadError: sizes that don't divide, as in `MultiHeadAttention`; unknown names; a memory
            that is missing, or given to a block without cross attention.

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
        qk_norm: str | Callable[[int], nn.Module] | None = None,
        positions: nn.Module | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        gate: str | None = None,
        cross_attention: bool = False,
        memory_dim: int | None = None,
        norm_first: bool = True,
        norm: str = "rms",
        norm_eps: float = 1e-6,
        feed_forward: str | nn.Module = "swiglu",
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if norm not in KINDS:
            raise MultiheadError(f"norm={norm!r}: expected {' or '.join(map(repr, KINDS))}")
        if isinstance(feed_forward, str) and feed_forward not in FEED_FORWARDS:
            raise MultiheadError(
                f"feed_forward={feed_forward!r}: expected {' or '.join(map(repr, FEED_FORWARDS))},"
                " or a module"
            )
        if memory_dim is not None and not cross_attention:
            raise MultiheadError(
                f"memory_dim={memory_dim} without cross_attention=True: this block has no memory"
            )
        require_positive_int("hidden_dim", hidden_dim)
        self.norm_first = norm_first

        def create_attention(kdim: int | None, encoding: nn.Module | None) -> MultiHeadAttention:
            return MultiHeadAttention(
                embed_dim,
                num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                kdim=kdim,
                vdim=kdim,
                bias=bias,
                qk_norm=qk_norm,
                positions=encoding,
                softcap=softcap,
                sinks=sinks,
                gate=gate,
                dropout=dropout,
                device=device,
                dtype=dtype,
            )

        def create_norm() -> nn.Module:
            return KINDS[norm](embed_dim, eps=norm_eps, device=device, dtype=dtype)

        require_number("norm_eps", norm_eps, "be at least 0, for instance 1e-6", least=0.0)
        self.attention_norm = create_norm()
        self.attention = create_attention(None, positions)
        self.cross_attention_norm = create_norm() if cross_attention else None
        self.cross_attention = create_attention(memory_dim, None) if cross_attention else None
        self.feed_forward_norm = create_norm()
        if isinstance(feed_forward, str):
            feed_forward = FEED_FORWARDS[feed_forward](
                embed_dim, hidden_dim, bias=bias, device=device, dtype=dtype
            )
        self.feed_forward = feed_forward

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        mask: IntervalMask | TensorLike | None = None,
        memory_mask: IntervalMask | TensorLike | None = None,
        position_ids: TensorLike | None = None,
        cache: Cache | None = None,
        memory_cache: Cache | None = None,
        valid: TensorLike | None = None,
    ) -> Tensor:
        """Run the block.

        Args:
            x: `[B, L, D]`, or nested (jagged) `[B, j, D]`.
            memory: `[B, S, memory_dim]`, for a block with cross attention; nested if x is.
            mask, position_ids, cache, valid: those of the self attention, as in
                `MultiHeadAttention`. For weights call a part of the block:
                `block.attention(block.attention_norm(x), mask=mask, return_weights=True)`.
            memory_mask: the part of the memory that a query may read; pass it with every call.
            memory_cache: a `Cache` that keeps the memory's keys and values: the first call computes
                them, and later calls leave `memory` out.

        Returns:
            `[B, L, D]`.

        Raises:
            MultiheadError: a memory that is missing, or given twice, or to a block without cross
                attention.
            TypeError: `x` or a memory that isn't a tensor.
        """
        require_tensor("x", x)
        if memory is not None:
            require_tensor("memory", memory)
        if is_nested(x, memory):
            return run_block_packed(
                self.forward,
                x,
                memory,
                mask=mask,
                memory_mask=memory_mask,
                position_ids=position_ids,
                encoding=self.attention.positions,
                cache=cache,
                memory_cache=memory_cache,
                valid=valid,
            )
        has_memory = self.cross_attention is not None
        is_cached = memory_cache is not None and memory_cache.length > 0
        if memory_cache is not None and (
            memory_cache is cache or isinstance(memory_cache, WindowCache)
        ):
            raise MultiheadError(
                "memory_cache: expected a separate Cache, which keeps the whole memory"
            )
        if is_cached and memory is not None:
            raise MultiheadError(
                "memory is given, but memory_cache already holds one, which would be read instead;"
                " leave memory out, or give an empty cache"
            )
        if has_memory != (memory is not None or is_cached):
            raise MultiheadError(
                f"memory is {'missing' if memory is None else 'given'}, and this block has"
                f" cross_attention={has_memory}: only a block with"
                " cross_attention=True takes one"
            )
        x = self._update(
            x,
            self.attention_norm,
            lambda y: self.attention(
                y, mask=mask, position_ids=position_ids, cache=cache, valid=valid
            ),
        )
        if self.cross_attention is not None and self.cross_attention_norm is not None:
            attend = self.cross_attention
            if memory is None:  # nothing more to store
                memory = x.new_empty(x.shape[0], 0, attend.k_proj.in_features)
            x = self._update(
                x,
                self.cross_attention_norm,
                lambda y: attend(y, memory, mask=memory_mask, cache=memory_cache),
            )
        return self._update(x, self.feed_forward_norm, self.feed_forward)

    def _update(self, x: Tensor, norm: nn.Module, layer: Callable[[Tensor], Tensor]) -> Tensor:
        return x + layer(norm(x)) if self.norm_first else norm(x + layer(x))
