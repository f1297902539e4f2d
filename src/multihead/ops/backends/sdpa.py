"""torch's fused kernels (`scaled_dot_product_attention`), where they compute the definition
exactly.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..call import AttentionCall
from ..modes import has_plain_memory, hidden, listening, transformed
from ..numbers import default_scale
from . import AttentionOutput
from .blocks import autocast_off
from .cpu import ENOUGH
from .custom_op import FAR, TorchBackend, differentiate_dense
from .dense import attend_dense

# of a dense mask made from intervals, 8 MiB in float32; for larger ones the blocks are faster
MASK_ELEMENTS = 1 << 21
LARGE_SCALE = 100.0
NARROW = 4  # a band of at most one key in so many is faster block by block


class SdpaBackend:
    """torch's fused kernels: outputs alone, without soft cap and sinks."""

    def unsupported_reason(
        self, call: AttentionCall, *, return_lse: bool = False, return_weights: bool = False
    ) -> str | None:
        """Why these kernels can't compute a call exactly, or None."""
        if return_lse or return_weights or call.softcap is not None or call.sinks is not None:
            wanted = {
                "soft cap": call.softcap is not None,
                "sinks": call.sinks is not None,
                "log-sum-exp": return_lse,
                "weights": return_weights,
            }
            missing = ", no ".join(name for name, is_wanted in wanted.items() if is_wanted)
            return f"torch's fused kernels have no {missing}"
        if 0 in (*call.q.shape, *call.v.shape):
            return "torch's fused kernels need at least one query, key and column"
        if not call.scale > torch.finfo(torch.float32).tiny:
            return "torch's fused kernels need a scale above 0"
        if call.scale > LARGE_SCALE and call.is_tracked():
            return "the gradients of torch's fused kernels are rounded where scores are large"
        if call.q.device.type == "cpu" and call.q.dtype == torch.float16:
            return (
                "on a CPU torch's fused kernel rounds the weights to float16, and its results are"
                " off by more than a rounding"
            )
        return None

    def slow_reason(self, call: AttentionCall) -> str | None:
        """Why another backend computes a call better, though these kernels could, or None."""
        q, keys, bias = call.q, call.k.shape[2], call.bias
        if _is_finer(call):
            return "torch's fused kernels would round a bias of float64"
        if q.device.type == "cpu":
            if call.dropout:
                return (
                    "on a CPU torch's fused kernel has no dropout, and its unfused path holds all"
                    " weights in memory"
                )
            if bias is not None and bias.requires_grad and torch.is_grad_enabled():
                return (
                    "on a CPU torch's fused kernel has no gradient of a bias, and its unfused path"
                    " holds all weights in memory"
                )
        else:
            work = torch.promote_types(q.dtype, torch.float32)
            dtype = work if call.slopes is not None else q.dtype if bias is None else bias.dtype
            if torch.promote_types(dtype, q.dtype) != q.dtype:
                return "torch's fused kernels would round the bias to the dtype of q"
        added = bias is not None or call.slopes is not None
        if call.mask is None and not call.is_unmasked() and (added or not call.is_causal()):
            if torch.compiler.is_exporting():
                return (
                    "an exported graph is for any length, and for long inputs the blocks are faster"
                )
            if (
                call.low is not None
                and call.high is not None
                and call.high - call.low <= keys // NARROW
            ):
                return "blocks outside a narrow window are skipped"
            if q.shape[0] * q.shape[2] * keys > MASK_ELEMENTS:
                return (
                    f"a dense mask of [{q.shape[0]}, {q.shape[2]}, {keys}] would take more memory"
                    " than the blocks"
                )
        return None

    def forward(
        self, call: AttentionCall, *, return_lse: bool = False, return_weights: bool = False
    ) -> AttentionOutput:
        """The output alone; by blocks for NaN or infinite inputs, which these kernels treat unlike
        the definition.
        """
        if transformed():  # these kernels have no forward-mode derivatives and no batching rule
            return attend_dense(call)
        out = self._fused(call)
        if out is None:
            return TorchBackend().forward(call)
        if out.requires_grad and not call.dropout and not hidden(out):
            tensors = call.tensors()
            names = [name for name, x in zip(call._fields, call) if isinstance(x, Tensor)]
            numbers = {name: x for name, x in call._asdict().items() if name not in names}
            out = _Twice.apply(out, numbers, names, *tensors)
        return AttentionOutput(out)

    def _fused(self, call: AttentionCall) -> Tensor | None:
        q, k, v = call[:3]
        if _is_finer(call):
            return None
        bias = call.added(torch.promote_types(q.dtype, torch.float32))
        if not hidden(q):
            q, k, v = (_with_memory(x) for x in (q, k, v))
            bias = None if bias is None else _with_memory(bias)
        is_causal = call.is_causal() and bias is None
        mask = None if is_causal else call.allowed()
        if bias is not None:
            # the kernel on a CPU adds float32 to scores of half types, so a finer bias isn't
            # rounded to
            # them
            add = bias.to(
                q.dtype if bias.dtype == q.dtype else torch.promote_types(q.dtype, torch.float32)
            )
            mask = add if mask is None else torch.where(mask, add, -torch.inf)
        width = v.shape[3]
        on_cpu = q.device.type == "cpu"
        whole = q
        if on_cpu and not listening():
            # unequal widths, or a strided last axis, take torch's unfused path, which holds all
            # weights in memory
            wide = max(q.shape[3], width)
            q, k, v = (
                F.pad(x, (0, wide - x.shape[3])) if x.shape[3] < wide else x for x in (q, k, v)
            )
            q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        # of symbolic sizes, bool() would stay symbolic
        grouped = True if q.shape[1] != k.shape[1] else False  # noqa: SIM210
        with autocast_off(q):
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                dropout_p=call.dropout,
                is_causal=is_causal,
                scale=call.scale,
                enable_gqa=grouped,
            )
        if out.shape[3] != width:
            out = out[..., :width]
        if not on_cpu:
            return out
        # The CPU kernel gives zeros to a query whose scores are all NaN (it holds NaN, or all its
        # keys do), and lets NaN through a mask. Both show in the first column.
        if hidden(out):
            return (
                out
                if mask is not None
                else out.masked_fill(whole.detach().isnan().any(-1, keepdim=True), torch.nan)
            )
        first = out.detach()[..., 0]
        if mask is not None and bool(first.isnan().any()):
            return None
        if not bool(first.all()) and (
            not all(bool(x.isfinite().all()) for x in (whole, k)) or _has_lowest(bias)
        ):
            return None
        # the kernel's gradients come from its log-sum-exp, which is rounded
        return None if bias is not None and call.is_tracked() and _is_low(bias) else out


def attend_step(q: Tensor, k: Tensor, v: Tensor, scale: object) -> Tensor | None:
    """One query of each head that may attend to all keys, without gradients: a step of decoding, in
    which checks and choices would take longer than the attention.

    Returns:
        What `SdpaBackend` returns; None for whatever is unusual, wrong or large, which is left to
        the checks and choices.
    """
    if not has_plain_memory(q, k, v) or torch.is_autocast_enabled("cpu"):
        return None
    if not q.dtype == k.dtype == v.dtype == torch.float32 or not q.ndim == k.ndim == v.ndim == 4:
        return None
    (batch, heads, length, width), (_, groups, keys, _) = q.shape, k.shape
    if length != 1 or k.shape != v.shape or (k.shape[0], k.shape[3]) != (batch, width):
        return None
    if not groups or heads % groups or not batch * keys * width:
        return None
    if scale is None:
        scale = default_scale(width)
    if type(scale) is not float or not 1e-9 < scale < LARGE_SCALE:
        return None
    if (
        2 * batch * heads * keys * width >= ENOUGH
        or not q.stride(3) == k.stride(3) == v.stride(3) == 1
    ):
        return None
    several = heads != groups
    if several and batch * groups >= torch.get_num_threads():
        # the heads of a group as queries of one head, so that keys are read once for all
        q, several = q.reshape(batch, groups, -1, width), False
    out = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=several)
    # zeros may be those of a query that holds NaN
    return out.view(batch, heads, 1, width) if bool(out.select(3, 0).all()) else None


class _Twice(torch.autograd.Function):
    """The output of torch's fused kernels, whose backward passes can't be differentiated: where
    autograd records the backward pass (`create_graph=True`), gradients come from plain torch
    operations instead.
    """

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, numbers: dict[str, Any], names: list[str], *tensors: Tensor
    ) -> Tensor:
        ctx.numbers, ctx.names = numbers, names
        ctx.save_for_backward(*(x.clone() if x.is_inference() else x for x in tensors))
        return out.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return grads[0], None, None, *(None for _ in ctx.names)
        call = AttentionCall(**ctx.numbers, **dict(zip(ctx.names, ctx.saved_tensors, strict=True)))
        inputs = ("q", "k", "v", "bias", "sinks")
        found = dict(
            zip(inputs, differentiate_dense(call, None, (grads[0], None, None)), strict=True)
        )
        return None, None, None, *(found.get(name) for name in ctx.names)


def _with_memory(x: Tensor) -> Tensor:
    """The tensor, if an efficient zero with memory, whose lack torch's kernels overlook."""
    return x.clone() if x._is_zerotensor() else x


def _is_finer(call: AttentionCall) -> bool:
    """Whether the bias is of float64, and q isn't."""
    return call.bias is not None and call.bias.dtype == torch.float64 != call.q.dtype


def _has_lowest(bias: Tensor | None) -> bool:
    """Whether a bias has finite numbers so low that the kernel may add them up to -inf."""
    lowest = torch.finfo(torch.float32).min / 2
    return bias is not None and bool(((bias < lowest) & (bias > -torch.inf)).any())


def _is_low(bias: Tensor) -> bool:
    """Whether all biases of some query are so large that sums with scores are rounded."""
    top = bias.amax(-1)
    return bool(((top.abs() > FAR) & (top > -torch.inf)).any())
