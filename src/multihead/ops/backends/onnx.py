"""The operator in a graph that torch.onnx exports, for inputs of any length.

Where torch's operator computes the call, it is exported as that: opset 23 and later have the
standard Attention operator for it, earlier ones get its products and softmax. Everything else is
exported as plain operations with the same values (dense.py), and so is every call of the exporter
by tracing (`dynamo=False`), which records no sizes inside operators.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..call import AttentionCall
from . import AttentionOutput
from .dense import attend_dense

__all__ = ["OnnxBackend"]


class OnnxBackend:
    """Operations that ONNX has: torch's operator, or plain ones."""

    def unsupported_reason(
        self, call: AttentionCall, *, return_lse: bool = False, return_weights: bool = False
    ) -> str | None:
        return None

    def forward(
        self, call: AttentionCall, *, return_lse: bool = False, return_weights: bool = False
    ) -> AttentionOutput:
        """Output and, on request, log-sum-exp and weights."""
        standard = (
            not (return_lse or return_weights or call.dropout)
            and call.softcap is None
            and call.sinks is None
            and not isinstance(call.scale, Tensor)
            and call.q.dtype in (torch.float32, torch.float64)
            and not torch._C._is_tracing()
        )
        if standard:
            return AttentionOutput(_standard(call))
        return attend_dense(call, return_lse=return_lse, return_weights=return_weights)


def _standard(call: AttentionCall) -> Tensor:
    """The output by torch's operator. The standard operator gives NaN to a query without keys,
    which gets its zeros afterwards.
    """
    q, k, v = call[:3]
    is_causal = call.is_causal() and call.bias is None and call.slopes is None
    mask = None if is_causal else call.allowed()
    some = None if mask is None else mask.any(-1, keepdim=True)
    add = call.added(q.dtype)
    if add is not None:
        add = add.to(q.dtype)
        mask = add if mask is None else torch.where(mask, add, -torch.inf)
        some = (mask != -torch.inf).any(-1, keepdim=True)
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=is_causal,
        scale=call.scale,
        enable_gqa=True if q.shape[1] != k.shape[1] else False,  # noqa: SIM210
    )
    return out if some is None else torch.where(some, out, 0.0)
