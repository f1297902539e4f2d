"""Norms of queries and keys: over the width of a head, or over all heads side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["KINDS", "NORMS", "HeadNorm", "create_norm", "spans_heads"]

KINDS: dict[str, Callable[..., nn.Module]] = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}
# "_all": one norm over all heads side by side; "_each": each head has separate weights
NORMS = tuple(f"{kind}{extent}" for extent in ("", "_all", "_each") for kind in KINDS)


class HeadNorm(nn.Module):
    """Norm over the width of each head, whose weights differ from head to head.

    Args:
        kind: "rms" or "layer".
        num_heads: number of heads H.
        head_dim: width E of a head.
        bias: whether a layer norm has a bias.
        eps: added to the mean of squares or the variance; that of torch's norm unless given.

    Shapes: x `[B, H, L, E]` -> `[B, H, L, E]`; `weight` and `bias` are `[H, E]`.

    >>> HeadNorm("layer", 4, 8)(torch.randn(2, 4, 3, 8)).shape
    torch.Size([2, 4, 3, 8])
    """

    def __init__(
        self,
        kind: str,
        num_heads: int,
        head_dim: int,
        *,
        bias: bool = True,
        eps: float | None = None,
        **factory: Any,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {} if kind == "rms" else {"bias": False}
        if eps is not None:
            options["eps"] = eps
        self.norm = KINDS[kind](head_dim, elementwise_affine=False, **options)
        self.weight = nn.Parameter(torch.empty(num_heads, head_dim, **factory))
        has_bias = bias and kind == "layer"
        shift = nn.Parameter(torch.empty(num_heads, head_dim, **factory)) if has_bias else None
        self.bias: nn.Parameter | None
        self.register_parameter("bias", shift)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weights to 1 and the bias to 0."""
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x) * self.weight[:, None]
        return x if self.bias is None else x + self.bias[:, None]


def spans_heads(norm: Any) -> bool:
    """Whether an option `qk_norm` names a norm over all heads side by side."""
    return isinstance(norm, str) and norm.endswith("_all")


def create_norm(
    norm: str | Callable[[int], nn.Module] | None, num_heads: int, head_dim: int, **factory: Any
) -> nn.Module | None:
    """The module of an option `qk_norm`, for queries or keys of so many heads.

    >>> create_norm("rms_all", 4, 8, device=None, dtype=None)
    RMSNorm((32,), eps=None, elementwise_affine=True)
    """
    if norm is None:
        return None
    if not isinstance(norm, str):
        return norm(head_dim)
    kind, _, extent = norm.partition("_")
    if extent == "each":
        return HeadNorm(kind, num_heads, head_dim, **factory)
    return KINDS[kind](num_heads * head_dim if extent else head_dim, **factory)
