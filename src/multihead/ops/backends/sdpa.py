"""torch's fused kernels, where they compute exactly what the definition says."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..masks import IntervalMask, hidden, transformed
from .blocks import exact

MASK_ELEMENTS = (
    1 << 21
    # of a dense mask that stands for intervals: 8 MiB in float32; of larger ones the blocks are quicker
)
NARROW = 4  # a band that leaves out all but one key in so many is quicker block by block


def refuses(
    q: Tensor,
    v: Tensor,
    softcap: float | None,
    sinks: Tensor | None,
    return_lse: bool,
    return_weights: bool,
) -> str | None:
    """Why these kernels can't serve an input exactly, or None."""
    asked = {
        "soft cap": softcap is not None,
        "sinks": sinks is not None,
        "log-sum-exp": return_lse,
        "weights": return_weights,
    }
    if missing := [name for name, there in asked.items() if there]:
        return f"torch's fused kernels have no {', no '.join(missing)}"
    if 0 in (*q.shape, *v.shape):
        return "torch's fused kernels want rows, keys and widths"
    if q.device.type == "cpu" and q.dtype == torch.float16:
        return (
            "on a CPU torch's fused kernel rounds the weights to float16, and its results are off"
            " by more than a rounding"
        )
    return None


def unsuited(
    q: Tensor, k: Tensor, mask: IntervalMask | Tensor | None, bias: Tensor | None, dropout: float
) -> str | None:
    """Why something else serves this input better, though these kernels could, or None."""
    if q.device.type == "cpu":
        if transformed():
            return (
                "on a CPU torch's fused kernel has no batching rule, so vmap would run it element"
                " by element"
            )
        if dropout:
            return (
                "on a CPU torch's fused kernel has no dropout, and its other way holds all weights"
                " in memory"
            )
        if bias is not None and bias.requires_grad and torch.is_grad_enabled():
            return (
                "on a CPU torch's fused kernel has no gradient of a bias, and its other way holds"
                " all weights in memory"
            )
    elif bias is not None and torch.promote_types(bias.dtype, q.dtype) != q.dtype:
        return "torch's fused kernels would round the bias to the dtype of q"
    known = mask.static(q.shape[2], k.shape[2]) if isinstance(mask, IntervalMask) else "all"
    if isinstance(mask, IntervalMask) and (
        known is None or (known == "causal" and bias is not None)
    ):
        if torch.compiler.is_exporting():
            return (
                "an exported graph serves any length, and from some length on the blocks serve"
                " better"
            )
        if (
            mask.low is not None
            and mask.high is not None
            and mask.high - mask.low <= k.shape[2] // NARROW
        ):
            return "blocks outside a narrow window are skipped"
        if q.shape[0] * q.shape[2] * k.shape[2] > MASK_ELEMENTS:
            return (
                f"a dense mask of [{q.shape[0]}, {q.shape[2]}, {k.shape[2]}] would take more memory"
                " than the blocks"
            )
    return None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: IntervalMask | Tensor | None,
    *,
    bias: Tensor | None,
    scale: float,
    dropout: float,
) -> Tensor | None:
    """Output `[B, H, L, Ev]`, for inputs that `refuses` has nothing against; None where NaN or
    infinite numbers stand in the inputs, of which these kernels make something else than the
    definition does.
    """
    is_causal = False
    if isinstance(mask, IntervalMask):
        known = mask.static(q.shape[2], k.shape[2])
        is_causal = known == "causal" and bias is None
        mask = None if known == "all" or is_causal else mask.dense(q.shape[2], k.shape[2], q.device)
    if bias is not None:
        # the kernel on a CPU adds float32 to scores of half types, so a finer bias isn't rounded to
        # them
        add = bias.to(
            q.dtype if bias.dtype == q.dtype else torch.promote_types(q.dtype, torch.float32)
        )
        mask = add if mask is None else torch.where(mask, add, -torch.inf)
    if mask is not None:
        mask = mask[(None,) * (4 - mask.ndim)]
    width = v.shape[3]
    on_cpu = q.device.type == "cpu"
    whole = q
    if on_cpu:
        # other widths, or a last axis with gaps, send torch to its unfused way, which holds all
        # weights in memory
        wide = max(q.shape[3], width)
        q, k, v = (F.pad(x, (0, wide - x.shape[3])) if x.shape[3] < wide else x for x in (q, k, v))
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    grouped = True if q.shape[1] != k.shape[1] else False  # noqa: SIM210 - of symbolic sizes, bool() would stay symbolic
    with exact(q):
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=grouped,
        )
    if out.shape[3] != width:
        out = out[..., :width]
    if not on_cpu:
        return out
    # The CPU kernel gives zeros to a query that holds NaN, and lets NaN through a mask. Both show
    # in the first column.
    if hidden(out):
        return (
            out
            if mask is not None
            else out.masked_fill(whole.detach().isnan().any(-1, keepdim=True), torch.nan)
        )
    first = out.detach()[..., 0]
    if mask is not None and bool(first.isnan().any()):
        return None
    return None if bool((first == 0).any()) and bool(whole.isnan().any()) else out
