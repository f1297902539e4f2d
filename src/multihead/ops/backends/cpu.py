"""Attention, its gradients and statistics by the compiled CPU kernels (kernels/, jit.py)."""

from __future__ import annotations

import ctypes
import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...errors import DeviceError
from ..call import AttentionCall, slice_axes
from . import jit
from .blockwise import Gradients, attend_blockwise, widen

# Multiply-adds from which on the kernels are chosen: below, no call should wait for a compiler.
ENOUGH = 1 << 22
# keys of a long KV cache to a task, where the few queries of a decoding step would use one thread
CHUNK = 512
FEW_TILES = 64  # tiles of a call, below which caches are cut into chunks
A_THREAD = 1 << 18  # multiply-adds that are worth one more thread
MANY_TASKS = 256  # from which on a thread takes neighbouring tiles together
FEW_ROWS = 16  # queries of a key/value head that fit the narrow tile
ROWS = 32  # of the wide tile
ENOUGH_INT8 = 1 << 19  # the same, where int8 would be converted first
INT8_ROWS = 64  # queries of a key/value head that read int8 as it is; it is converted once a tile
EMPTY = 1  # address of a tensor without elements, which nothing is read from
# Where tasks sum over rows, a head's rows are cut where there are fewer heads than
BACKWARD_TASKS, OBSERVE_TASKS = 16, 64


def unsupported_reason(call: AttentionCall, return_weights: bool = False) -> str | None:
    """Why the kernels can't compute a call exactly, or None."""
    if call.q.device.type not in ("cpu", "meta"):  # of meta tensors they give the shapes
        return f"the kernels run on a CPU, and q is on {call.q.device}"
    if jit.MISSING:
        return jit.MISSING
    if call.dropout or return_weights:
        return f"the kernels have no {'dropout' if call.dropout else 'weights'}"
    return None


def slow_reason(call: AttentionCall) -> str | None:
    """Why another backend computes a call better, though the kernels could, or None."""
    if torch.compiler.is_exporting():
        return "an exported graph is for any length and any machine"
    (batch, heads, length, width), (keys, value_width) = call.q.shape, call.v.shape[2:]
    enough = ENOUGH if call.k_scale is None else ENOUGH_INT8
    if batch * heads * length * keys * (width + value_width) < enough:
        return "so little work isn't worth compiling for"
    few = call.k_scale is None and heads // call.k.shape[1] * length <= FEW_ROWS
    if few and call.q.dtype == torch.bfloat16:
        return "for a few queries of each key/value head torch's kernel is as fast"
    return None


def int8_reason(call: AttentionCall) -> str | None:
    """Why no kernel reads the call's int8 keys and values where they lie, or None."""
    rows = call.q.shape[1] // call.k.shape[1] * call.q.shape[2]
    if rows > INT8_ROWS:
        return f"for more than {INT8_ROWS} queries of a key/value head float numbers are faster"
    if call.score_dtype() != torch.float32:
        return "the kernel of int8 numbers computes in float32"
    return "the kernel of int8 numbers has no gradients" if call.is_tracked() else None


@cache
def _record() -> type[ctypes.Structure]:
    from .kernels.tile import CALL

    class Record(ctypes.Structure):
        _fields_ = [
            (name, ctypes.c_double if CALL[name].kind == "f" else ctypes.c_int64)
            for name in CALL.names or ()
        ]

    return Record


def _address(name: str, x: Tensor) -> int:
    """The address of a tensor's numbers, never 0, which is that of a tensor that isn't given."""
    if not x.is_cpu:
        raise DeviceError(
            "Expected all tensors to be on the same device, but found q on cpu and"
            f" {name}{list(x.shape)} on {x.device}; move {name} to the CPU"
        )
    address = x.data_ptr()
    if not address and x.numel():
        raise DeviceError(
            f"{name}{list(x.shape)} has no memory: its storage was freed, or it is a fake tensor;"
            " expected a tensor with numbers"
        )
    return address or EMPTY


class KernelArguments:
    """The record that a kernel reads (sizes, addresses and strides), and the tensors that it points
    to, which have to live until the kernel returns.

    Its first counters: whether a number isn't finite, the next task, and `counters` more.
    """

    def __init__(self, call: AttentionCall, counters: int = 0) -> None:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in call[:3])
        # on the device of q, whatever the default device is
        self.counter = q.new_zeros(2 + counters, dtype=torch.int64)
        (batch, heads, length, width), (q_b, q_h, q_i, _) = q.shape, q.stride()
        (_, groups, keys, _), (k_b, k_h, k_j, _), (v_b, v_h, v_j, _) = (
            k.shape,
            k.stride(),
            v.stride(),
        )
        self.numbers: dict[str, Any] = dict(
            nan=_address("counter", self.counter),
            counter=_address("counter", self.counter) + 8,
            batch=batch,
            heads=heads,
            groups=groups,
            length=length,
            keys=keys,
            width=width,
            value_width=v.shape[3],
            scale=call.scale,
            softcap=call.softcap or 0.0,
            q=_address("q", q),
            q_b=q_b,
            q_h=q_h,
            q_i=q_i,
            k=_address("k", k),
            k_b=k_b,
            k_h=k_h,
            k_j=k_j,
            v=_address("v", v),
            v_b=v_b,
            v_h=v_h,
            v_j=v_j,
        )
        self.kept: list[Tensor] = [q, k, v]
        if (bounds := call.bounds(torch.int32)) is not None:
            start, stop = torch.broadcast_tensors(*bounds)
            self.give("start", start.contiguous(), "b")
            self.give("stop", stop.contiguous())
        if call.mask is not None:
            self.give("mask", call.mask.view(torch.uint8), "bhij")
        if call.bias is not None:
            self.give("bias", call.bias.to(q.dtype), "bhij")
        if call.sinks is not None:
            self.give("sinks", call.sinks.to(q.dtype).contiguous())
        if call.k_scale is not None and call.v_scale is not None:
            self.give("k_scale", call.k_scale.to(q.dtype), "bhj")
            self.give("v_scale", call.v_scale.to(q.dtype), "bhj")
        if call.slopes is not None and call.query_pos is not None and call.key_pos is not None:
            self.give("slopes", call.slopes.to(q.dtype).contiguous())
            self.give("query_pos", call.query_pos.contiguous(), "b")
            self.give("key_pos", call.key_pos.contiguous(), "b")

    def give(self, name: str, x: Tensor, axes: str = "") -> None:
        """Add a tensor's address, and its strides along the axes named; 0 along one of size 1,
        which is broadcast.
        """
        self.kept.append(x)
        self.numbers[name] = _address(name, x)
        for axis, size, step in zip(axes, x.shape, x.stride()):
            self.numbers[f"{name}_{axis}"] = step if size > 1 else 0

    def run(self, name: str, tasks: int) -> None:
        """Run a kernel on as many threads as its tasks and its work are worth."""
        n = self.numbers
        widths = n["width"] + n["value_width"]
        work = n["batch"] * n["heads"] * n["length"] * n["keys"] * widths
        # waking a thread takes as long as so much work
        threads = min(torch.get_num_threads(), tasks, 1 + work // A_THREAD)
        record = _record()(**n)
        jit.run_kernel(name, ctypes.addressof(record), threads)


def _name(kernel: str, dtype: torch.dtype) -> str:
    return f"{kernel}_{str(dtype).removeprefix('torch.')}"


def attend_compiled(call: AttentionCall, out: Tensor, lse: Tensor | None) -> bool:
    """Compute into `out` `[B, H, L, Ev]` and, if given, `lse` `[B, H, L]`; False where numbers or
    sizes are such that the kernels' result isn't that of the definition.
    """
    jit.require_numba()
    q, v = call.q, call.v
    dtype = call.score_dtype()
    if not v.shape[3] or (call.sinks is not None and not bool((call.sinks < torch.inf).all())):
        return False
    if lse is None and call.bias is not None:
        lse = q.new_empty(q.shape[:3], dtype=dtype)
    if q.dtype == dtype:
        (_attend if call.k_scale is None else _attend_narrow)(call, out, lse)
    else:
        wide = torch.empty_like(out, dtype=dtype)
        if call.k_scale is not None:
            _attend_narrow(call._replace(q=q.to(dtype)), wide, lse)
        elif not (
            q.dtype == torch.bfloat16
            and dtype == torch.float32
            and (_decode_bfloat16(call, wide, lse) or _paired(call, wide, lse))
        ):
            _attend(widen(call), wide, lse)
        out.copy_(wide)
    if lse is None or call.bias is None or not bool(lse.isneginf().any()):
        return True
    # a query may seem to have no key because finite biases were added up to -inf
    lowest = torch.finfo(dtype).min / 2
    return not bool(((call.bias < lowest) & (call.bias > -torch.inf)).any())


def _attend(call: AttentionCall, out: Tensor, lse: Tensor | None) -> None:
    """Compute into `out` and `lse`, of the dtype of q."""
    q, k, v = call[:3]
    batch, heads, length, width = q.shape
    groups, keys, value_width = *k.shape[1:3], v.shape[3]
    if not out.numel():
        return
    rows = heads // groups * length
    lanes = 16 if rows <= FEW_ROWS else ROWS
    parts = 4 if rows <= 4 and q.dtype == torch.float32 and width % 4 == value_width % 4 == 0 else 1
    tiles = -(-rows * parts // lanes)
    # chunks whose number doesn't depend on the threads, so that neither does the result
    chunks = -(-keys // CHUNK) if tiles <= 2 and batch * groups * tiles < FEW_TILES and keys else 1
    tasks = batch * groups * tiles * chunks
    arguments = KernelArguments(call, tasks // chunks if chunks > 1 else 0)
    arguments.numbers |= {
        "lot": min(tiles, 4) if tasks >= MANY_TASKS else 1,
        "chunk": CHUNK if chunks > 1 else keys,
        "chunks": chunks,
    }
    arguments.give("out", out, "bhi")
    if lse is not None:
        arguments.give("lse", lse)
    if chunks > 1:
        arguments.give("partial", q.new_empty(tasks * (value_width // parts + 2) * lanes))
    name = _name("decode4" if parts == 4 else "decode" if lanes == 16 else "forward", q.dtype)
    arguments.run(name, tasks)
    if arguments.counter[
        0
    ]:  # some number isn't finite: let it reach only queries that may attend to it
        arguments.counter.zero_()
        arguments.numbers["careful"] = 1
        arguments.run(name, tasks)


def _decode_bfloat16(call: AttentionCall, out: Tensor, lse: Tensor | None) -> bool:
    """Compute a call of few queries, whose keys and values are read as they lie; False for more, or
    where some number isn't finite.
    """
    rows = call.q.shape[1] // call.k.shape[1] * call.q.shape[2]
    return rows <= FEW_ROWS and _attend_narrow(call._replace(q=call.q.float()), out, lse)


def _attend_narrow(call: AttentionCall, out: Tensor, lse: Tensor | None) -> bool:
    """Compute a call of int8 or bfloat16 keys and values and float32 queries into `out` and `lse`;
    returns whether all is finite.
    """
    batch, heads, length, _ = call.q.shape
    groups, keys, width = call.v.shape[1:]
    if not out.numel():
        return True
    chunks = -(-keys // CHUNK) if batch * groups < FEW_TILES and keys else 1
    tasks = batch * groups * chunks
    arguments = KernelArguments(call, tasks // chunks if chunks > 1 else 0)
    arguments.numbers |= {"chunk": CHUNK if chunks > 1 else keys, "chunks": chunks}
    arguments.give("out", out, "bhi")
    if lse is not None:
        arguments.give("lse", lse)
    if chunks > 1:
        rows = heads // groups * length
        # its columns are filled up to whole vectors
        size = rows * (-(-width // 16) * 16 + 2)
        arguments.give("partial", call.q.new_empty(tasks * size))
    arguments.run(_name("decode", call.k.dtype), tasks)
    return not arguments.counter[0]


def _paired(call: AttentionCall, out: Tensor, lse: Tensor | None) -> bool:
    """Compute bfloat16 where the processor multiplies pairs of them; False where it doesn't, or
    some number isn't finite."""
    from .kernels.bf16 import THERE

    q, k, v = call[:3]
    rows = q.shape[1] // k.shape[1] * q.shape[2]
    if not THERE or q.shape[3] % 2 or rows <= FEW_ROWS or not k.shape[2]:
        return False
    batch, groups, keys, width = v.shape
    # made anew: contiguous() may leave odd strides as they are
    values = v.new_empty(batch, groups, -(-keys // 2), width, 2)
    values.copy_(torch.nn.functional.pad(v, (0, 0, 0, keys % 2)).unflatten(2, (-1, 2)).mT)
    if k.stride(-1) != 1 or any(step % 2 for step in (*k.stride()[:3], k.storage_offset())):
        k = k.new_empty(k.shape).copy_(k)
    power = 2.0 ** (math.frexp(call.scale)[1] - 1)
    pairs = call._replace(
        q=q.float() * power,
        k=k.view(torch.int32),
        v=values.view(torch.int32).squeeze(-1),
        scale=call.scale / power,
    )
    arguments = KernelArguments(pairs)
    arguments.numbers |= {"value_width": width, "chunks": 1}
    arguments.give("out", out, "bhi")
    if lse is not None:
        arguments.give("lse", lse)
    arguments.run("paired_float32", batch * groups * -(-rows // ROWS))
    return not arguments.counter[0]


def differentiate_compiled(
    call: AttentionCall, grad: Tensor, reach: Tensor, lse: Tensor, with_bias: bool = False
) -> Gradients:
    """Gradients of q, k, v and, `with_bias`, of the bias, in float32 or float64.

    `reach` `[B, H, L]` is rowsum(grad * out) less the gradient of the log-sum-exp.
    """
    jit.require_numba()
    call = widen(call)
    bias = call.bias if with_bias else None
    dbias = (
        None
        if bias is None
        else torch.zeros_like(bias, dtype=call.q.dtype, memory_format=torch.contiguous_format)
    )
    return Gradients(*_backward(call, grad, reach, lse, dbias), dbias, None)


def _backward(
    call: AttentionCall, grad: Tensor, reach: Tensor, lse: Tensor, dbias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; that of the bias is added to `dbias`, of the bias' shape."""
    q, k, v = call[:3]
    for n, axis in enumerate(("batch", "head") if dbias is not None else ()):
        if dbias is not None and dbias.shape[n] < q.shape[n]:
            # batch elements, or heads, that share a bias take turns: of threads that add to one
            # number chance would determine the order
            found = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
            for i in range(q.shape[n]):
                g = i * k.shape[1] // q.shape[1]
                one = slice(i, i + 1)
                if axis == "batch":
                    part, index = call.slice(batch=one), {"B": one}
                else:
                    part, index = call.slice(head=one), {"H": one, "G": slice(g, g + 1)}
                of_part = [slice_axes(x, "B H L", index) for x in (grad, reach, lse)]
                parts = _backward(part, of_part[0], of_part[1], of_part[2], dbias)
                for x, axes, y in zip(found, ("B H", "B G", "B G"), parts, strict=True):
                    slice_axes(x, axes, index).add_(y)
            return found
    (batch, heads, length, width), (groups, keys, value_width) = q.shape, v.shape[1:]
    tiles = -(-heads // groups * length // ROWS)
    slices = max(1, min(-(-BACKWARD_TASKS // (batch * groups)), tiles))  # whatever the threads
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk, dv = (
        q.new_empty(batch, groups, slices, keys, -(-w // 16) * 16) for w in (width, value_width)
    )
    arguments = KernelArguments(call._replace(sinks=None))
    arguments.numbers["chunks"] = slices
    arguments.give("out", dq, "bhi")
    arguments.give("grad", grad if grad.stride(-1) == 1 else grad.contiguous(), "bhi")
    arguments.give("lse", lse.to(q.dtype).contiguous())
    arguments.give("reach", reach.to(q.dtype).contiguous())
    arguments.give("partial", dk)
    arguments.give("partial_v", dv)
    change = None
    if dbias is not None:
        # of queries that share a bias each task adds up its part
        change = dbias.new_zeros(slices, *dbias.shape) if dbias.shape[2] < length else dbias[None]
        arguments.give("change", change, "sbhij")
    arguments.run(_name("backward", q.dtype), batch * groups * slices)
    if dbias is not None and change is not None and dbias.shape[2] < length:
        dbias += change.sum(0)
    return dq, dk.sum(2)[..., :width].contiguous(), dv.sum(2)[..., :value_width].contiguous()


def attend_with_statistics(
    call: AttentionCall,
    columns: Tensor,
    places: Tensor,
    offset: int,
    ids: tuple[Tensor, Tensor, Tensor] | None,
    counted: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output with statistics of each query, without the weights in memory.

    Args:
        columns: `[B, H, S, C]`, values of keys to sum with the weights; the first are the norms of
            the keys' contributions.
        places: `[B, P, L]`, key positions whose weights are wanted.
        offset: key position of query 0.
        ids: token ids of queries `[B, L]`, of keys `[B, S]`, and of the tokens before the keys.
        counted: `[B, L]`, what each query's weights count in the sum that a key receives.

    Returns:
        Output `[B, H, L, Ev]`; log-sum-exp `[B, H, L]`; statistics of each query
        `[numbers, B, H, L]`, in the order of kernels/stats.py; and the sum of the weights that each
        key receives `[B, H, S]`.
    """
    jit.require_numba()
    from .kernels import stats as order

    q, k, v = call[:3]
    batch, heads, length = q.shape[:3]
    out = q.new_empty(batch, length, heads, v.shape[3]).transpose(1, 2)
    lse = q.new_empty(batch, heads, length)
    numbers = order.SINGLE + places.shape[1] + 2 * order.PAIRED + columns.shape[3]
    stats = q.new_empty(numbers, batch, heads, length)
    # whatever the threads
    slices = max(1, min(-(-OBSERVE_TASKS // (batch * heads)), -(-length // ROWS)))
    received = q.new_empty(batch, heads, slices, k.shape[2])
    arguments = KernelArguments(call)
    arguments.numbers |= {
        "columns_n": columns.shape[3],
        "places_n": places.shape[1],
        "offset": offset,
        "chunks": slices,
    }
    arguments.give("out", out, "bhi")
    arguments.give("lse", lse)
    arguments.give("stats", stats)
    arguments.give("columns", columns.contiguous())
    arguments.give("places", places.contiguous())
    for name, x in zip(("ids", "key_ids", "before_ids"), ids or (), strict=False):
        arguments.give(name, x.to(torch.int32).contiguous())
    arguments.give("partial", received)
    arguments.give("reach", counted.to(q.dtype).contiguous())
    arguments.run(_name("observe", q.dtype), batch * heads * slices)
    return out, lse, stats, received.sum(2)


def attend_for_weights(call: AttentionCall) -> Tensor:
    """The weights of all queries, `[B, H, L, S]`, float32 or float64 as q is."""
    q, k, _ = call[:3]
    batch, heads, length = q.shape[:3]
    out = q.new_zeros(batch, heads, length, k.shape[2])
    arguments = KernelArguments(call._replace(v=k))
    arguments.give("out", out, "bhi")
    groups = k.shape[1]
    tasks = batch * groups * -(-heads // groups * length // ROWS)
    try:
        jit.require_numba()
        arguments.run(_name("exact", q.dtype), tasks)
    except jit.KernelsUnavailable:
        jit.report_missing()
        nothing = k[..., :0]
        attend_blockwise(call._replace(v=nothing), None, out[..., :0], None, out)
    return out
