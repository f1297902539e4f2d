"""Backends of `multihead.attention`: each computes a lowered call, all to the same definition.

`reference` (NumPy float64, the definition itself) judges the others: `sdpa` (torch's fused
kernels), `cpu` (kernels compiled by Numba), `flex` (FlexAttention, on CUDA), `blockwise` (torch, a
block of queries at a time) and `dense` (torch, all weights at once, differentiable any number of
times).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from ..call import AttentionCall


class AttentionOutput(NamedTuple):
    """Results of one attention call: what `Backend.forward` returns.

    >>> import torch
    >>> result = AttentionOutput(torch.zeros(1, 4, 5, 8))
    >>> result.out.shape, result.lse, result.weights
    (torch.Size([1, 4, 5, 8]), None, None)
    """

    out: Tensor  # [B, H, L, Ev], of the dtype of q
    lse: Tensor | None = None  # [B, H, L], float32 or float64: log-sum-exp of each query's scores
    weights: Tensor | None = None  # [B, H, L, S], of the dtype of q: before dropout


@runtime_checkable
class Backend(Protocol):
    """Computes attention calls; pass one as `attention(..., backend=...)`.

    >>> import torch
    >>> from multihead import attention
    >>> from multihead.ops import AttentionCall, AttentionOutput
    >>> class Sdpa:
    ...     def unsupported_reason(self, call, *, return_lse=False, return_weights=False):
    ...         if return_lse or return_weights or call.softcap or call.sinks is not None:
    ...             return "it computes outputs alone, without softcap and sinks"
    ...         return None
    ...     def forward(self, call, *, return_lse=False, return_weights=False):
    ...         q, k, v = call[:3]
    ...         out = torch.nn.functional.scaled_dot_product_attention(
    ...             q, k, v, call.allowed(), scale=call.scale, enable_gqa=True
    ...         )
    ...         return AttentionOutput(out)
    >>> q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    >>> torch.allclose(attention(q, k, k, backend=Sdpa()), attention(q, k, k), atol=1e-6)
    True
    """

    def unsupported_reason(
        self, call: AttentionCall, *, return_lse: bool = False, return_weights: bool = False
    ) -> str | None:
        """Why the backend can't compute the call exactly, a phrase for an error message; or
        None.
        """

    def forward(
        self, call: AttentionCall, *, return_lse: bool = False, return_weights: bool = False
    ) -> AttentionOutput:
        """The output, with the log-sum-exp and the weights where they are asked for. Called for
        calls without an `unsupported_reason` alone."""
