"""`AttentionCall`: one attention call, lowered from masks and biases to tensors and numbers.

The public operator, transformers' attention interface and patched modules of other libraries all
lower their arguments here, once; backends, statistics and interventions take the result. Its fields
are the only list of an attention call's tensors, numbers and axes: slicing and the schema of the
custom operator (backends/custom_op.py) are generated from them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, NamedTuple, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import DeviceError, MultiheadError
from .masks import IntervalMask
from .modes import hidden
from .numbers import (
    add_biases,
    check_scales,
    default_scale,
    dequantize,
    fold_scale,
    to_dropout,
    to_softcap,
)
from .slopes import AlibiBias, dense, falling
from .tensors import TensorLike, require_tensor, to_tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class CallContext(NamedTuple):
    """Facts that a patched module knows of a call beyond the arguments of the operator; None where
    the inputs of the model tell it.
    """

    key_valid: Tensor | None = None  # bool [B, S]: keys that are tokens and not padding
    offset: int | None = None  # key position of the first query, from the module's own cache
    cross: bool | None = None  # whether the keys are of another sequence than the queries
    empty: Tensor | None = None  # bool [B or 1, 1 or H, L]: queries that may read nothing


class AttentionCall(NamedTuple):
    """One attention call: everything that the definition needs, keys and values not repeated.

    Annotations name the axes: `B` batch, `H` query heads, `G` key/value heads (H divisible by G),
    `L` queries, `S` keys, `E` and `Ev` head widths. An axis of every field but q, k and v may be of
    size 1 where it holds for all. Query i may attend to key j where all of these allow it:
    `start[i] <= j < stop[i]`, `i + low <= j < i + high`, `mask[i, j]`; None is no limit.

    Build one with `AttentionCall.lower`, which checks its arguments and raises `MultiheadError` or
    `TypeError` where they don't fit together.

    >>> from multihead.masks import causal
    >>> q, k, v = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    >>> call = AttentionCall.lower(q, k, v, causal())
    >>> call.allowed().shape, call.slice(head=slice(2, 4)).k.shape
    (torch.Size([1, 1, 5, 5]), torch.Size([1, 1, 5, 8]))
    """

    q: Annotated[Tensor, "B H L E"]
    k: Annotated[Tensor, "B G S E"]
    v: Annotated[Tensor, "B G S Ev"]
    start: Annotated[Tensor | None, "B L"] = None
    stop: Annotated[Tensor | None, "B L"] = None
    mask: Annotated[Tensor | None, "B H L S"] = None
    bias: Annotated[Tensor | None, "B H L S"] = None
    sinks: Annotated[Tensor | None, "H"] = None
    # ALiBi: -slopes[h] * |key_pos[j] - query_pos[i]| is added to the scores; positions are int64
    slopes: Annotated[Tensor | None, "H"] = None
    query_pos: Annotated[Tensor | None, "B L"] = None
    key_pos: Annotated[Tensor | None, "B S"] = None
    # of int8 keys and values: what they are multiplied with
    k_scale: Annotated[Tensor | None, "B G S"] = None
    v_scale: Annotated[Tensor | None, "B G S"] = None
    low: int | None = None
    high: int | None = None
    scale: float = 1.0
    softcap: float | None = None
    dropout: float = 0.0
    context: CallContext = CallContext()  # not an argument of the operator

    @classmethod
    def lower(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: IntervalMask | TensorLike | None = None,
        *,
        bias: Tensor | AlibiBias | None = None,
        scale: float | Tensor | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        dropout: float = 0.0,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> AttentionCall:
        """Check the arguments of `multihead.attention` and lower its mask and bias. Under
        `torch.autocast` q, k and v are cast as torch does for `scaled_dot_product_attention`.

        Raises:
            MultiheadError: shapes that don't fit together, numbers out of range.
            TypeError: an integer mask, a bias of other numbers, dtypes that differ.

        >>> from multihead.masks import causal
        >>> x = torch.randn(1, 4, 5, 8)
        >>> call = AttentionCall.lower(x, x, x, causal())
        >>> call.high, call.start, call.slice(query=slice(3, 5)).start.tolist()
        (1, None, [[0, 0]])
        """
        for name, x in (("q", q), ("k", k), ("v", v)):
            require_tensor(name, x)
            if x.is_nested:
                raise MultiheadError(
                    f"{name} is a nested tensor: only attention() and the layers take those; pad it"
                    ", x.to_padded_tensor(0.0), and mask the padding with padding(lengths)"
                )
        factors = scale if isinstance(scale, Tensor) and scale.ndim else None
        _check_memory(q=q, k=k, v=v, mask=mask, bias=bias, sinks=sinks, scale=factors)
        _check_memory(q=q, k_scale=k_scale, v_scale=v_scale)
        q, k, v = _cast(q, k, v)
        _check_inputs(q, k, v, k_scale is not None or v_scale is not None)
        for name, x, scales in (("k", k, k_scale), ("v", v, v_scale)):
            check_scales(name, x, scales)
        if (k_scale is None) != (v_scale is None):
            given, lacking = ("k", "v") if v_scale is None else ("v", "k")
            raise MultiheadError(
                f"{given}_scale was given and {lacking}_scale wasn't: expected int8 keys and values"
                f" with both; multiply first, {given} = {given}.float() * {given}_scale[..., None]"
            )
        may, bias = split_mask_bias(mask, bias, q)
        _check_mask_bias(q, k, may, bias)
        _check_sinks(q, sinks)
        q, scale = (q, default_scale(q.shape[-1])) if scale is None else fold_scale(q, scale)
        softcap = None if softcap is None else to_softcap(softcap)
        dropout = 0.0 if isinstance(dropout, float) and dropout == 0 else to_dropout(dropout)
        start = stop = low = high = allowed = add = slopes = query_pos = key_pos = None
        if isinstance(may, IntervalMask):
            low, high = _needed_limits(may, q.shape[2], k.shape[2])
            if may.rules:
                try:
                    start, stop = may.bounds(q.shape[2], k.shape[2], q.device)
                except NotImplementedError as error:  # torch's for a copy of a meta tensor
                    raise _device_error(q.device, "mask", torch.device("meta")) from error
                if start.shape[0] not in (1, q.shape[0]):
                    raise MultiheadError(
                        f"mask is for a batch of {start.shape[0]}, but q{list(q.shape)} and"
                        f" k{list(k.shape)} have one of {q.shape[0]}"
                    )
        elif may is not None:
            allowed = may[(None,) * (4 - may.ndim)]
        if isinstance(bias, AlibiBias):
            slopes, query_pos, key_pos = bias.slopes, bias.query_positions, bias.key_positions
        elif bias is not None:
            add = bias[(None,) * (4 - bias.ndim)]
        return cls(
            q,
            k,
            v,
            start,
            stop,
            allowed,
            add,
            sinks,
            slopes,
            query_pos,
            key_pos,
            k_scale,
            v_scale,
            low,
            high,
            scale,
            softcap,
            dropout,
        )

    def score_dtype(self) -> torch.dtype:
        """The dtype in which scores and weights are computed: float64 where q or the bias is,
        else float32."""
        dtype = torch.promote_types(self.q.dtype, torch.float32)
        return dtype if self.bias is None else torch.promote_types(dtype, self.bias.dtype)

    def dequantized(self) -> AttentionCall:
        """The call with int8 keys and values as numbers of the dtype of q, without their scales."""
        if self.k_scale is None or self.v_scale is None:
            return self
        k, v = (
            dequantize(x, scales, self.q.dtype)
            for x, scales in ((self.k, self.k_scale), (self.v, self.v_scale))
        )
        return self._replace(k=k, v=v, k_scale=None, v_scale=None)

    def tensors(self) -> list[Tensor]:
        """The tensors of the call, q first."""
        return [x for x in self[:_TENSORS] if isinstance(x, Tensor)]

    def is_unmasked(self) -> bool:
        """Whether every query may attend to every key, as far as is known without a look at the
        tensors."""
        return self.start is None and self.mask is None and self.low is None and self.high is None

    def is_causal(self) -> bool:
        """Whether query i may attend to keys 0..i and no other, as far as is known without a look
        at the tensors."""
        limits = self.start is None and self.mask is None and self.low is None
        return limits and not isinstance(self.high, torch.SymInt) and self.high == 1

    def is_tracked(self) -> bool:
        """Whether autograd records the call."""
        return torch.is_grad_enabled() and any(
            x is not None and x.requires_grad
            for x in (self.q, self.k, self.v, self.bias, self.sinks)
        )

    def bounds(self, dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor] | None:
        """The limits of each query's keys, `start` and `stop` `[B or 1, L]`; None without limits. A
        dense `mask` is not part of them."""
        if self.start is not None and self.stop is not None:
            return self.start.to(dtype), self.stop.to(dtype)
        if self.low is None and self.high is None:
            return None
        length, keys = self.q.shape[2], self.k.shape[2]
        if hidden(self.q) or not self.q.is_cpu:
            start, stop = IntervalMask((), self.low, self.high).bounds(length, keys, self.q.device)
            return start.to(dtype), stop.to(dtype)
        arrays = _band(self.low, self.high, length, keys, dtype)
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # the caller may save them for a backward pass later
                return torch.from_numpy(arrays[0]), torch.from_numpy(arrays[1])
        return torch.from_numpy(arrays[0]), torch.from_numpy(arrays[1])

    def allowed(self) -> Tensor | None:
        """Bool `[B or 1, 1 or H, L, S]`, True where a query may attend to a key; None where it may
        everywhere."""
        bounds = self.bounds()
        if bounds is None:
            return self.mask
        key = torch.arange(self.k.shape[2], device=self.q.device)
        start, stop = (x[:, None, :, None] for x in bounds)
        inside = (key >= start) & (key < stop)
        return inside if self.mask is None else inside & self.mask

    def added(self, dtype: torch.dtype) -> Tensor | None:
        """The sum that is added to the scores, `[B or 1, 1 or H, L or 1, S or 1]`: the bias and, in
        `dtype`, that of the slopes.
        """
        if self.slopes is None or self.query_pos is None or self.key_pos is None:
            return self.bias
        add = falling(self.slopes[None], self.query_pos, self.key_pos, dtype)
        return add if self.bias is None else add_biases(add, self.bias)

    def slice(
        self,
        *,
        batch: slice | Tensor | None = None,
        head: slice | Tensor | None = None,
        query: slice | Tensor | None = None,
        key: slice | None = None,
    ) -> AttentionCall:
        """The part of the call with some batch elements, query heads (and the key/value heads that
        they attend to), queries or keys: slices, or index tensors `[n]` (keys: a slice)."""
        call = self
        if query is not None or key is not None:
            bounds = self.bounds()
            start, stop = (None, None) if bounds is None else bounds
            if key is not None and bounds is not None:
                first, last, _ = key.indices(self.k.shape[2])
                start, stop = (x.sub(first).clamp(0, last - first) for x in bounds)
            call = self._replace(start=start, stop=stop, low=None, high=None)
        group = None if head is None else _groups_of(head, self.q.shape[1], self.k.shape[1])
        index = {"B": batch, "H": head, "G": group, "L": query, "S": key}
        return AttentionCall._make(
            slice_axes(x, axes, index) if isinstance(x, Tensor) else x
            for x, axes in zip(call, AXES, strict=True)
        )


_TENSORS = AttentionCall._fields.index("low")  # the number of fields that are tensors
# Axes of each field, "" for numbers: "B H L E" of q, and so on.
AXES: tuple[str, ...] = tuple(
    getattr(get_type_hints(AttentionCall, include_extras=True)[name], "__metadata__", ("",))[0]
    for name in AttentionCall._fields
)


def slice_axes(x: Tensor, axes: str, index: dict[str, Any]) -> Tensor:
    """Index a tensor along named axes; an axis of size 1, which holds for all, stays.

    >>> slice_axes(torch.arange(6).view(1, 2, 3), "B H L", {"B": slice(4, 5), "L": slice(1, 3)})
    tensor([[[1, 2],
             [4, 5]]])
    """
    for n, axis in enumerate(axes.split()):
        wanted = index.get(axis)
        if wanted is not None and x.shape[n] > 1:
            x = x[(slice(None),) * n + (wanted,)]
    return x


def _groups_of(head: slice | Tensor, heads: int, groups: int) -> slice | Tensor:
    """The key/value heads that some query heads attend to: a slice where they share them evenly,
    else one for each."""
    share = heads // groups
    if isinstance(head, Tensor):
        return head // share
    first, last, _ = head.indices(heads)
    if first // share == max(last - 1, first) // share:
        return slice(first // share, first // share + 1)
    if first % share == last % share == 0:
        return slice(first // share, last // share)
    return torch.arange(first, last, device="cpu") // share


@lru_cache(maxsize=16)
def _band(
    low: int | None, high: int | None, length: int, keys: int, dtype: torch.dtype
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The bounds of a band on a CPU, as `IntervalMask.bounds` has them, kept for the layers that
    follow: computing them takes as long as a small call.

    Arrays and not tensors: a tensor would keep the modes it was made in (inference mode, fake
    tensors, a trace, a transform) and bring them into later calls.
    """
    row = np.arange(length, dtype=np.int64)[None]
    stop = np.full_like(row, keys) if high is None else (row + high).clip(0, keys)
    start = np.zeros_like(row) if low is None else (row + low).clip(0)
    kind = np.int32 if dtype == torch.int32 else np.int64
    return np.minimum(start, stop).astype(kind), stop.astype(kind)


def _needed_limits(mask: IntervalMask, length: int, keys: int) -> tuple[int | None, int | None]:
    """The limits of a band that leave out some key of some query."""
    low, high = mask.low, mask.high
    if not torch.compiler.is_exporting():  # a graph for any length compares none
        low = None if low is not None and length + low <= 1 else low
        high = None if high is not None and high >= keys else high
    return low, high


def _cast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as autocast casts them for torch's own operator: all but float64."""
    kind = q.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        q, k, v = (
            x if x.dtype == torch.float64 or not x.is_floating_point() else x.to(dtype)
            for x in (q, k, v)
        )
    return q, k, v


def split_mask_bias(
    mask: IntervalMask | TensorLike | None,
    bias: Tensor | AlibiBias | None,
    q: Tensor,
    name: str = "bias",
) -> tuple[IntervalMask | Tensor | None, Tensor | AlibiBias | None]:
    """Mask and bias of queries q, where a floating mask has been added to the bias; `name` is that
    of the argument `bias`.

    Raises:
        TypeError: a mask that is neither an interval mask nor numbers, a bias that isn't a tensor.
        MultiheadError: a floating mask of nothing but 0 and 1, which is most likely a boolean one.
    """
    if bias is not None and not isinstance(bias, AlibiBias):
        require_tensor(name, bias, "a tensor of floating numbers, or AlibiBias(...)")
    if mask is None or isinstance(mask, IntervalMask):
        return mask, bias
    for what, x in (("mask", mask), (name, bias)):
        if isinstance(x, Tensor) and x.is_nested:
            raise MultiheadError(
                f"{what} is a nested tensor: expected one that broadcasts to [B, H, L, S]; pad it"
            )
    expected = "an interval mask such as causal(), or booleans"
    mask = to_tensor("mask", mask, expected, device=q.device, empty=torch.bool)
    if mask.is_floating_point():
        if (
            not hidden(mask)
            and mask.numel()
            and bool(((mask == 0) | (mask == 1)).all())
            and bool(mask.any())
        ):
            raise MultiheadError(
                f"mask{list(mask.shape)} is {mask.dtype} and holds only 0 and 1. Numbers are added"
                " to the scores, so it would mask nothing: use mask.bool() if 1 means that a"
                " query may attend, ~mask.bool() for the opposite, bias=mask to add it all the same"
            )
        add = dense(bias, q.dtype)
        return None, mask if add is None else add_biases(mask, add)
    return mask, bias


def _check_memory(q: Tensor, **others: object) -> None:
    device = q.device
    for name, x in (("q", q), *others.items()):
        if not isinstance(x, Tensor):
            continue
        if x.device != device:
            raise _device_error(device, name, x.device)
        if x.layout != torch.strided:
            raise TypeError(
                f"{name} is of the layout {x.layout}: expected a dense tensor; convert it"
            )


def _device_error(device: torch.device, name: str, other: torch.device) -> DeviceError:
    return DeviceError(
        f"Expected all tensors to be on the same device, but found q on {device} and {name} on"
        f" {other}; create {name} on {device}, or move it there"
    )


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, is_quantized: bool = False) -> None:
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise MultiheadError(
            f"{_shapes(q, k, v)}: expected q[B, H, L, E], k[B, G, S, E], v[B, G, S, Ev]; "
            "split [B, L, H*E] with split_heads"
        )
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise MultiheadError(
            f"{_shapes(q, k, v)}: the batch of all three, the head width of q and k, and the heads"
            " and length of k and v must agree"
        )
    if k.shape[1] == 0 or q.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise MultiheadError(
            f"{_shapes(q, k, v)}: {q.shape[1]} query heads can't be shared evenly by"
            f" {k.shape[1]} key/value heads; H must be a multiple of G"
        )
    if is_quantized and q.dtype in DTYPES:
        return  # the scales know
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        raise TypeError(
            f"q is {q.dtype}, k {k.dtype}, v {v.dtype}: expected one floating dtype for all three,"
            " float64, float32, bfloat16 or float16"
        )


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q{list(q.shape)}, k{list(k.shape)}, v{list(v.shape)}"


def _check_mask_bias(
    q: Tensor, k: Tensor, mask: IntervalMask | Tensor | None, bias: Tensor | AlibiBias | None
) -> None:
    if isinstance(mask, Tensor):
        if mask.dtype != torch.bool:
            raise TypeError(
                f"mask is {mask.dtype}: expected bool, True where a query may attend. Use"
                " mask.bool() for a 0/1 mask of that meaning, ~mask.bool() for the opposite,"
                " mask.float() for numbers to add"
            )
        _check_broadcast("mask", mask, q, k)
    if isinstance(bias, AlibiBias):
        bias.check(q, k)
    elif bias is not None:
        if not bias.is_floating_point():
            raise TypeError(
                f"bias is {bias.dtype}: expected floating numbers to add to the scores; a bool goes"
                " to mask="
            )
        _check_broadcast("bias", bias, q, k)


def _check_broadcast(name: str, x: Tensor, q: Tensor, k: Tensor) -> None:
    full = (*q.shape[:3], k.shape[2])
    if x.ndim > 4 or any(
        have not in (1, want) for have, want in zip(x.shape[::-1], full[::-1], strict=False)
    ):
        raise MultiheadError(
            f"{name}{list(x.shape)} doesn't broadcast to [B, H, L, S] = {list(full)}"
        )


def _check_sinks(q: Tensor, sinks: Tensor | None) -> None:
    if sinks is None:
        return
    require_tensor("sinks", sinks, "a tensor of floating numbers [H]")
    if sinks.shape != q.shape[1:2]:
        raise MultiheadError(
            f"sinks{list(sinks.shape)}: expected one logit for each of the {q.shape[1]} query heads"
        )
