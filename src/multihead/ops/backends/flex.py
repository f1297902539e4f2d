"""FlexAttention: torch's compiled kernel that skips the blocks outside of a mask. On CUDA;
elsewhere the others serve.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from ..call import AttentionCall
from . import AttentionOutput

WIDTHS = (16, 32, 64, 128, 256)  # of heads, that its kernel is made for


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=False)


class FlexBackend:
    """FlexAttention; `kernel` replaces the compiled one."""

    def __init__(self, kernel: Any = None) -> None:
        self.kernel = kernel

    def unsupported_reason(
        self, call: AttentionCall, *, return_lse: bool = False, return_weights: bool = False
    ) -> str | None:
        """Why FlexAttention can't compute a call exactly, or None."""
        q, k, v = call[:3]
        if q.device.type != "cuda":
            return f"FlexAttention runs on CUDA, and q is on {q.device.type}"
        if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"FlexAttention doesn't support {q.dtype}"
        if call.score_dtype() != torch.float32:
            return "FlexAttention would round a bias of float64"
        if call.dropout or return_weights:
            return "FlexAttention has no dropout and returns no weights"
        if q.shape[3] not in WIDTHS or v.shape[3] not in WIDTHS:
            return f"FlexAttention needs head widths of {WIDTHS}, not {q.shape[3]} and {v.shape[3]}"
        if 0 in (*q.shape[:3], k.shape[2]):
            return "FlexAttention needs at least one query and key"
        return None

    def forward(
        self, call: AttentionCall, *, return_lse: bool = False, return_weights: bool = False
    ) -> AttentionOutput:
        """Output and log-sum-exp."""
        q, k, v = call[:3]
        batch, heads, length, keys = *q.shape[:3], k.shape[2]
        softcap, sinks, block_mask = call.softcap, call.sinks, None
        make = partial(create_block_mask, B=batch, Q_LEN=length, KV_LEN=keys, device=q.device)
        if call.mask is not None and (allowed := call.allowed()) is not None:
            may = allowed.expand(batch, heads, length, keys)
            block_mask = make(lambda b, h, i, j: may[b, h, i, j], H=heads)
        elif (bounds := call.bounds()) is not None:
            start, stop = (x.expand(batch, -1) for x in bounds)
            block_mask = make(lambda b, h, i, j: (j >= start[b, i]) & (j < stop[b, i]), H=None)
        bias = call.added(torch.promote_types(q.dtype, torch.float32))
        add = None if bias is None else bias.expand(batch, heads, length, keys)

        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            s = s if softcap is None else softcap * torch.tanh(s / softcap)
            return s if add is None else s + add[b, h, i, j]

        changed = softcap is not None or add is not None
        out, aux = (self.kernel or _compiled())(
            q,
            k,
            v,
            score_mod=score if changed else None,
            block_mask=block_mask,
            scale=call.scale,
            enable_gqa=q.shape[1] != k.shape[1],
            return_aux=AuxRequest(lse=True),
        )
        lse = aux.lse
        if sinks is not None:
            # a sink joins the softmax and reads nothing: every weight shrinks by the same share of
            # its
            # row
            total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            out, lse = out * torch.exp(lse - total)[..., None].to(out.dtype), total
        return AttentionOutput(out, lse)
