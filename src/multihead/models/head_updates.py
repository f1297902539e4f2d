"""Formulas of what one head adds to the residual stream, shared by reading and pruning.

The output of an attention layer is a sum over heads, Y = sum_h O_h W_O^(h) + bias; the update of
head h at one position is its term O_h W_O^(h).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["first_order_effects", "norm_factors", "update_norms", "update_shares"]


def norm_factors(weight: Tensor) -> Tensor:
    """Factors `[H, Ev, r]`, r <= Ev, with |v factor_h| = |v W_O^(h)| for every v, of W_O by heads
    `[H, Ev, D]`: R^T of the QR decomposition of its transpose.
    """
    return torch.linalg.qr(weight.mT, mode="r").R.mT.contiguous()


def update_norms(head_outputs: Tensor, factors: Tensor) -> Tensor:
    """Norms `[..., H, L]` of the updates of head outputs `[..., H, L, Ev]`; see `norm_factors`."""
    return (head_outputs @ factors).norm(dim=-1)


def update_shares(head_outputs: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Each head's share u_h . u / |u|^2 of the layer's update u; the shares of all heads sum to 1.

    Args:
        head_outputs: `[..., H, L, Ev]`.
        update: `[..., L, D]`, the layer's output without its bias.
        weight: W_O `[H*Ev, D]`.

    Returns:
        Shares `[..., H, L]`, and where they exist: bool `[..., 1, L]`, False for an update of 0.
    """
    heads, width = head_outputs.shape[-3], head_outputs.shape[-1]
    # u_h . u = O_h . (u W_O^(h)T)
    back = (update @ weight.mT).unflatten(-1, (heads, width)).transpose(-3, -2)
    square = update.square().sum(-1).unsqueeze(-2)
    shares = (back * head_outputs).sum(-1) / torch.where(square > 0, square, 1)
    return shares, square > 0


def first_order_effects(entered: Tensor, grad: Tensor, num_heads: int) -> Tensor:
    """O_h . dL/dO_h, float64 `[..., H]`, of what entered W_O and its gradient, both `[..., H*Ev]`.

    To first order the loss falls by that if the head's update at that position is removed (Michel
    et al. 2019).
    """
    return (entered * grad).unflatten(-1, (num_heads, -1)).double().sum(-1)
