"""ALiBi: a bias that falls with the distance of a key, from one slope for each head instead of a
number for each query and key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MultiheadError
from .tensors import TensorLike, copied, require_tensor, to_tensor

__all__ = ["AlibiBias"]


class AlibiBias:
    """Adds `-slopes[h] * |key_positions[j] - query_positions[i]|` to the scores, as ALiBi does
    (Press et al. 2022).

    Pass it as a bias, `attention(q, k, v, bias=AlibiBias(...))`. The "cpu" backend computes it in
    the dtype of the scores, without a tensor of size L x S; for the others it becomes a dense bias
    of float32, or float64 with q of float64.

    Args:
        slopes: `[H]`, floating, one for each query head; without a gradient.
        query_positions: integers `[L]` or `[B, L]`, also as a list or a NumPy array.
        key_positions: integers `[S]` or `[B, S]`, likewise.

    Tensors are copied, so that changing them later doesn't change the bias.

    Raises:
        TypeError: slopes that aren't a tensor, slopes that aren't floating, positions that aren't
            integers.
        MultiheadError: shapes, batches and devices that don't fit, slopes that require a gradient.

    >>> from multihead import attention
    >>> from multihead.masks import causal
    >>> near = AlibiBias(torch.tensor([0.5, 0.25]), [2], range(4))
    >>> near.dense()[0, 0]
    tensor([[-1.0000, -0.5000,  0.0000, -0.5000]])
    >>> q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 4, 8)
    >>> out = attention(q, k, k, causal(2), bias=near)
    >>> torch.allclose(out, attention(q, k, k, causal(2), bias=near.dense()))
    True
    """

    def __init__(
        self, slopes: Tensor, query_positions: TensorLike, key_positions: TensorLike
    ) -> None:
        require_tensor("slopes", slopes, "a tensor of floating numbers [H]")
        query_positions = to_tensor(
            "query_positions", query_positions, "integers [L] or [B, L]", device=slopes.device
        )
        key_positions = to_tensor(
            "key_positions", key_positions, "integers [S] or [B, S]", device=query_positions.device
        )
        if not slopes.is_floating_point():
            raise TypeError(
                f"slopes is {slopes.dtype}: expected floating numbers, one for each head; convert"
                " it, slopes.float()"
            )
        if slopes.ndim != 1:
            raise MultiheadError(
                f"slopes{list(slopes.shape)}: expected [H], one number for each head of the queries"
            )
        if slopes.requires_grad:
            raise MultiheadError(
                f"slopes{list(slopes.shape)} requires a gradient, which AlibiBias doesn't support:"
                " pass slopes.detach(), or, to train them, a dense bias computed from them"
            )
        for name, x, axis in (
            ("query_positions", query_positions, "L"),
            ("key_positions", key_positions, "S"),
        ):
            if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
                raise TypeError(
                    f"{name} is {x.dtype}: expected integers, the position of each vector; convert"
                    f" it, {name}.long()"
                )
            if x.ndim not in (1, 2):
                raise MultiheadError(
                    f"{name}{list(x.shape)}: expected [{axis}] or [B, {axis}]; pass one position"
                    " for each vector"
                )
        both = (
            f"query_positions{list(query_positions.shape)} and"
            f" key_positions{list(key_positions.shape)}"
        )
        if query_positions.device != key_positions.device:
            raise MultiheadError(
                f"{both} are on {query_positions.device} and {key_positions.device}: expected one"
                " device, that of the queries; move one,"
                f" key_positions.to({str(query_positions.device)!r})"
            )
        # int64: in uint8 a difference below 0 would wrap around
        at, key_at = (
            copied(x if x.ndim == 2 else x[None]).long() for x in (query_positions, key_positions)
        )
        if at.shape[0] != key_at.shape[0] and 1 not in (at.shape[0], key_at.shape[0]):
            raise MultiheadError(
                f"{both}: expected one batch size B; pass positions of the same batch, or [L]"
                " and [S] where they are the same for all batch elements"
            )
        self.slopes = copied(slopes).to(at.device)
        self.query_positions = at
        self.key_positions = key_at

    def __repr__(self) -> str:
        return (
            f"AlibiBias(slopes{list(self.slopes.shape)},"
            f" query_positions{list(self.query_positions.shape)},"
            f" key_positions{list(self.key_positions.shape)})"
        )

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The bias as a tensor `[1 or B, H, L, S]`."""
        return falling(self.slopes[None], self.query_positions, self.key_positions, dtype)

    def check(self, q: Tensor, k: Tensor) -> None:
        """Raise where slopes or positions don't fit q `[B, H, L, E]` and k `[B, G, S, E]`."""
        shapes = f"q{list(q.shape)} and k{list(k.shape)}"
        for name, x, n, of in (
            ("slopes", self.slopes, q.shape[1], "query heads"),
            ("query_positions", self.query_positions, q.shape[2], "queries"),
            ("key_positions", self.key_positions, k.shape[2], "keys"),
        ):
            if x.shape[-1] != n:
                raise MultiheadError(
                    f"bias: {name}{list(x.shape)} of AlibiBias, but {shapes}: expected one number "
                    f"for each of the {n} {of}; build an AlibiBias for this call"
                )
            if x.ndim == 2 and x.shape[0] not in (1, q.shape[0]):
                raise MultiheadError(
                    f"bias: {name}{list(x.shape)} of AlibiBias is for a batch of {x.shape[0]}, but"
                    f" {shapes} have one of {q.shape[0]}; pass positions for each batch"
                    " element, or one set for all"
                )
        if self.slopes.device != q.device:
            raise MultiheadError(
                f"bias: the positions of AlibiBias are on {self.slopes.device}, but q is on"
                f" {q.device}; build it from positions on {q.device}"
            )


def falling(slopes: Tensor, at: Tensor, key_at: Tensor, dtype: torch.dtype) -> Tensor:
    """`slopes` `[1 or B, H]`, `at` `[1 or B, L]` and `key_at` `[1 or B, S]`, int64 -> what to add,
    `[1 or B, H, L, S]`.
    """
    distance = key_at[:, None] - at[:, :, None]
    return slopes.to(dtype)[:, :, None, None] * (-distance.abs()).to(dtype)[:, None]


def dense(bias: Tensor | AlibiBias | None, dtype: torch.dtype) -> Tensor | None:
    """The bias as a tensor; that of slopes in `dtype` or float32, whichever is finer."""
    return (
        bias.dense(torch.promote_types(dtype, torch.float32))
        if isinstance(bias, AlibiBias)
        else bias
    )
