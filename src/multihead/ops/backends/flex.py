"""FlexAttention: torch's compiled kernel that skips the blocks outside of a mask. On CUDA;
elsewhere the others serve.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from ..masks import IntervalMask

WIDTHS = (16, 32, 64, 128, 256)  # of heads, that its kernel is made for


def refuses(q: Tensor, k: Tensor, v: Tensor, dropout: float, return_weights: bool) -> str | None:
    """Why it can't serve an input, or None."""
    if q.device.type != "cuda":
        return f"FlexAttention serves CUDA, and q is on {q.device.type}"
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"FlexAttention has no {q.dtype}"
    if dropout or return_weights:
        return "FlexAttention has no dropout and gives no weights"
    if q.shape[3] not in WIDTHS or v.shape[3] not in WIDTHS:
        return f"FlexAttention wants head widths of {WIDTHS}, not {q.shape[3]} and {v.shape[3]}"
    if 0 in (*q.shape[:3], k.shape[2]):
        return "FlexAttention wants rows and keys"
    return None


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: IntervalMask | Tensor | None,
    *,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    kernel: Any = None,
) -> tuple[Tensor, Tensor]:
    """Output `[B, H, L, Ev]` and log-sum-exp `[B, H, L]`, from `kernel` (the compiled one, unless a
    test gives another).
    """
    batch, heads, length, keys = *q.shape[:3], k.shape[2]
    block_mask = None
    if isinstance(mask, IntervalMask) and mask.static(length, keys) != "all":
        start, stop = (x.expand(batch, -1) for x in mask.bounds(length, keys, q.device))
        block_mask = create_block_mask(
            lambda b, h, i, j: (j >= start[b, i]) & (j < stop[b, i]),
            batch,
            None,
            length,
            keys,
            device=q.device,
        )
    elif isinstance(mask, Tensor):
        may = mask.expand(batch, heads, length, keys)
        block_mask = create_block_mask(
            lambda b, h, i, j: may[b, h, i, j], batch, heads, length, keys, device=q.device
        )
    add = None if bias is None else bias.expand(batch, heads, length, keys)

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        s = s if softcap is None else softcap * torch.tanh(s / softcap)
        return s if add is None else s + add[b, h, i, j]

    changed = softcap is not None or add is not None
    out, aux = (kernel or _compiled())(
        q,
        k,
        v,
        score_mod=score if changed else None,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    lse = aux.lse
    if sinks is not None:
        # a sink joins the softmax and reads nothing: every weight shrinks by the same share of its
        # row
        total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        out, lse = out * torch.exp(lse - total)[..., None].to(out.dtype), total
    return out, lse
