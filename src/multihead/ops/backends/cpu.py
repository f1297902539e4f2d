"""The CPU kernels as torch sees them: compiled when first needed and kept on disk, run by torch's
own threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import MissingDependency
from ..call import AttentionCall

# Multiply-adds from which on the kernels serve what torch could: below, nobody should wait for a
# compiler.
ENOUGH = 1 << 22
# keys of a long cache to a task, where a decoding step's few rows would keep but one thread busy
CHUNK = 512
FEW_TILES = 64  # of a call, below which caches are cut into chunks
A_THREAD = 1 << 18  # multiply-adds that are worth a further thread
MANY_TASKS = 256  # from which on a thread takes neighbouring tiles together
FEW_ROWS = 16  # of a key/value head's query heads, that fit the narrow tile
ROWS = 32  # of the wide tile
# Where tasks sum over rows, a head's rows are cut where there are fewer heads than
BACKWARD_TASKS, OBSERVE_TASKS = 16, 64
MISSING = None if importlib.util.find_spec("numba") else "Numba isn't installed (pip install numba)"
_AXES = (
    "bhi",
    "bhi",
    "bhi",
    "bhi",
    "bgj",
    "bgj",
    "bi",
    "bi",
    "bhij",
    "bhij",
    "bh",
    "bi",
    "bj",
)  # of what `backward` takes
KERNELS = (
    "decode4_float32",
    *(
        f"{kernel}_{dtype}"
        for dtype in ("float32", "float64")
        for kernel in ("forward", "decode", "backward", "observe", "exact")
    ),
)

_lock = threading.Lock()
_found: dict[str, Any] = {}


def refuses(q: Tensor, dropout: float, return_weights: bool) -> str | None:
    """Why the kernels can't serve an input exactly, or None."""
    if q.device.type != "cpu":
        return f"the kernels run on a CPU, and q is on {q.device}"
    if MISSING:
        return MISSING
    if dropout or return_weights:
        return f"the kernels have no {'dropout' if dropout else 'weights'}"
    return None


def unsuited(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why something else serves this input better, though the kernels could, or None."""
    if torch.compiler.is_exporting():
        return "an exported graph serves any length and any machine"
    work = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * (q.shape[3] + v.shape[3])
    if work < ENOUGH:
        return "so little work isn't worth a compiler's time"
    if q.dtype == torch.bfloat16 and q.shape[1] == k.shape[1] and q.shape[2] <= FEW_ROWS:
        return "for so few rows all keys and values would be widened to float32"
    return None


def kernel(name: str) -> int:
    """The address of a compiled kernel; compiles it, once a machine, where that hasn't been
    done.
    """
    found = _found.get(name)
    if found is None:
        with _lock:
            found = _found.get(name) or _load(name)
            _found[name] = found
    return int(found.address)


def _load(name: str) -> Any:
    from filelock import FileLock
    from numba import cfunc
    from numba.core.caching import FunctionCache

    from .kernels.forward import SIGNATURE

    python = _python(name)
    try:
        kept = FunctionCache(python)
        folder = Path(kept.cache_path)
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / "multihead.lock")
        # of two processes that compile at once, one could read what the other has half written
        lock.acquire()
    except (RuntimeError, OSError) as error:
        _say(
            f"{name}: its compiled form can't be kept ({error}); set NUMBA_CACHE_DIR to a folder"
            " that can be written"
        )
        return cfunc(SIGNATURE)(python)
    try:
        _forget_older(folder)
        start = time.perf_counter()
        try:
            found = cfunc(SIGNATURE, cache=True)(python)
        except Exception:  # what was kept is damaged, in one of many ways: once more, from nothing
            kept.flush()
            found = cfunc(SIGNATURE, cache=True)(python)
        if not found.cache_hits:
            _say(f"compiled {name} in {time.perf_counter() - start:.0f} s, kept in {folder}")
        return found
    finally:
        lock.release()


def _python(name: str) -> Any:
    from .kernels import backward as gradients
    from .kernels import bf16 as bfloat16
    from .kernels import forward as kernels
    from .kernels import stats as probes
    from .kernels import weights as exact

    homes = {"backward": gradients, "observe": probes, "exact": exact, "paired": bfloat16}
    return getattr(homes.get(name.partition("_")[0], kernels), name)


def _forget_older(folder: Path) -> None:
    """Numba looks at the age of a kernel's own file; what it is made of lies in several."""
    from numba.core.caching import FunctionCache

    sources = sorted((Path(__file__).parent / "kernels").glob("*.py"))
    now = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    stamp = folder / "multihead.sources"
    if not stamp.exists() or stamp.read_text() != now:
        for name in _all():
            FunctionCache(_python(name)).flush()
        stamp.write_text(now)


def _say(words: str) -> None:
    print(f"multihead: {words}", file=sys.stderr, flush=True)


@cache
def say_missing() -> None:
    """Once a process."""
    _say(
        f"{MISSING}, so attention on this CPU goes through torch, slower and with the same results"
    )


def _all() -> tuple[str, ...]:
    from .kernels.bf16 import THERE

    return (*KERNELS, "paired_float32") if THERE else KERNELS


def warm() -> int:
    """Compile all kernels ahead, so that no first call waits: a minute and a half, once a machine.
    Returns their number.
    """
    if MISSING:
        raise MissingDependency(MISSING)
    for name in _all():
        kernel(name)
    return len(_all())


@cache
def _parallel() -> Callable[[int, int, int], None]:
    """Calls a function of one pointer on several threads at once: on those that torch itself works
    with, where it uses OpenMP.

    A second pool of threads would fight with torch's for the cores: OpenMP's threads spin for
    milliseconds after their work.
    """
    try:
        library = next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))
        parallel = ctypes.CDLL(
            str(library)
        ).GOMP_parallel  # of the library that torch was linked with
    except (StopIteration, OSError, AttributeError):
        return _by_hand
    parallel.argtypes, parallel.restype = (
        [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint],
        None,
    )
    return lambda function, data, threads: parallel(function, data, threads, 0)


_prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _alone(function: int, data: int, threads: int) -> None:
    _prototype(function)(data)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="multihead")


def _by_hand(function: int, data: int, threads: int) -> None:
    run = _prototype(function)
    others = [_pool().submit(run, data) for _ in range(threads - 1)]
    run(data)
    for other in others:
        other.result()


@cache
def _record() -> type[ctypes.Structure]:
    from .kernels.forward import CALL

    class Record(ctypes.Structure):
        _fields_ = [
            (name, ctypes.c_double if CALL[name].kind == "f" else ctypes.c_int64)
            for name in CALL.names or ()
        ]

    return Record


class Call:
    """What a kernel is told, and what has to live until it returns."""

    def __init__(self, **numbers: float) -> None:
        self.numbers: dict[str, Any] = numbers
        self.kept: list[Tensor] = []

    def give(self, name: str, x: Tensor, axes: str = "") -> None:
        """A tensor's address, and its strides along the axes named; 0 along one of size 1, which is
        broadcast.
        """
        self.kept.append(x)
        self.numbers[name] = x.data_ptr()
        for axis, size, step in zip(axes, x.shape, x.stride()):
            self.numbers[f"{name}_{axis}"] = step if size > 1 else 0

    def run(self, name: str, tasks: int) -> None:
        told = self.numbers
        work = (
            told["batch"]
            * told["heads"]
            * told["length"]
            * told["keys"]
            * (told["width"] + told["value_width"])
        )
        threads = min(
            torch.get_num_threads(), tasks, 1 + work // A_THREAD
        )  # waking one takes as long as so much work
        record = _record()(**told)
        run = _parallel() if threads > 1 else _alone
        run(kernel(name), ctypes.addressof(record), threads)


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor | None,
    stop: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    at: Tensor | None,
    key_at: Tensor | None,
    scale: float,
    softcap: float | None,
    counters: int = 0,
) -> tuple[Call, Tensor]:
    """What all kernels are told, and the counters that they share: whether a NaN was met, the next
    task, and `counters` more.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    counter = torch.zeros(2 + counters, dtype=torch.int64)
    (batch, heads, length, width), (q_b, q_h, q_i, _) = q.shape, q.stride()
    (_, groups, keys, _), (k_b, k_h, k_j, _), (v_b, v_h, v_j, _) = k.shape, k.stride(), v.stride()
    call = Call(
        nan=counter.data_ptr(),
        counter=counter.data_ptr() + 8,
        batch=batch,
        heads=heads,
        groups=groups,
        length=length,
        keys=keys,
        width=width,
        value_width=v.shape[3],
        scale=scale,
        softcap=softcap or 0.0,
        q=q.data_ptr(),
        q_b=q_b,
        q_h=q_h,
        q_i=q_i,
        k=k.data_ptr(),
        k_b=k_b,
        k_h=k_h,
        k_j=k_j,
        v=v.data_ptr(),
        v_b=v_b,
        v_h=v_h,
        v_j=v_j,
    )
    call.kept += [counter, q, k, v]
    if start is not None and stop is not None:
        start, stop = torch.broadcast_tensors(start, stop)
        call.give("start", start.to(torch.int32).contiguous(), "b")
        call.give("stop", stop.to(torch.int32).contiguous())
    if mask is not None:
        call.give("mask", mask.view(torch.uint8), "bhij")
    if bias is not None:
        call.give("bias", bias.to(q.dtype), "bhij")
    if sinks is not None:
        call.give("sinks", sinks.to(q.dtype).contiguous(), "b")
    if slopes is not None and at is not None and key_at is not None:
        call.give("slopes", slopes.to(q.dtype).contiguous(), "b")
        call.give("at", at.contiguous(), "b")
        call.give("key_at", key_at.contiguous(), "b")
    return call, counter


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor | None,
    stop: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    at: Tensor | None,
    key_at: Tensor | None,
    scale: float,
    softcap: float | None,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Into `out` `[B, H, L, Ev]` and, if given, `lse` `[B, H, L]`."""
    if q.dtype.itemsize == 2:
        wide = torch.empty_like(out, dtype=torch.float32)
        rest = (start, stop, mask, bias, sinks, slopes, at, key_at)
        if q.dtype == torch.bfloat16 and _paired(q, k, v, *rest, scale, softcap, wide, lse):
            out.copy_(wide)
            return
        forward(q.float(), k.float(), v.float(), *rest, scale, softcap, wide, lse)
        out.copy_(wide)
        return
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
    call, counter = _call(
        q,
        k,
        v,
        start,
        stop,
        mask,
        bias,
        sinks,
        slopes,
        at,
        key_at,
        scale,
        softcap,
        tasks // chunks if chunks > 1 else 0,
    )
    call.numbers |= {
        "lot": min(tiles, 4) if tasks >= MANY_TASKS else 1,
        "chunk": CHUNK if chunks > 1 else keys,
        "chunks": chunks,
    }
    call.give("out", out, "bhi")
    if lse is not None:
        call.give("lse", lse)
    if chunks > 1:
        call.give("partial", q.new_empty(tasks * (value_width // parts + 2) * lanes))
    name = f"{'decode4' if parts == 4 else 'decode' if lanes == 16 else 'forward'}_{str(q.dtype).removeprefix('torch.')}"
    call.run(name, tasks)
    if counter[0]:  # some number isn't finite: let it reach just the rows that may read it
        counter.zero_()
        call.numbers["careful"] = 1
        call.run(name, tasks)


def _paired(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor | None,
    stop: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    at: Tensor | None,
    key_at: Tensor | None,
    scale: float,
    softcap: float | None,
    out: Tensor,
    lse: Tensor | None,
) -> bool:
    """The same for bfloat16 where the processor multiplies pairs of them; False where it doesn't,
    or some number isn't finite.
    """
    from .kernels.bf16 import THERE

    rows = q.shape[1] // k.shape[1] * q.shape[2]
    if not THERE or q.shape[3] % 2 or rows <= FEW_ROWS or not k.shape[2]:
        return False
    batch, groups, keys, width = v.shape
    values = v.new_empty(
        batch, groups, -(-keys // 2), width, 2
    )  # made anew: contiguous() may leave odd strides as they are
    values.copy_(torch.nn.functional.pad(v, (0, 0, 0, keys % 2)).unflatten(2, (-1, 2)).mT)
    if k.stride(-1) != 1 or any(step % 2 for step in (*k.stride()[:3], k.storage_offset())):
        k = k.new_empty(k.shape).copy_(k)
    power = 2.0 ** (math.frexp(scale)[1] - 1)
    call, counter = _call(
        q.float() * power,
        k.view(torch.int32),
        values.view(torch.int32).squeeze(-1),
        start,
        stop,
        mask,
        bias,
        sinks,
        slopes,
        at,
        key_at,
        scale / power,
        softcap,
    )
    call.numbers |= {"value_width": width, "chunks": 1}
    call.give("out", out, "bhi")
    if lse is not None:
        call.give("lse", lse)
    call.run("paired_float32", batch * groups * -(-rows // ROWS))
    return not counter[0]


def cut(x: Any, axes: str, **wanted: Any) -> Any:
    """Of a tensor, or None, some numbers or a slice along the axes named; one of size 1 holds for
    all.
    """
    for n, axis in enumerate(axes if x is not None else ""):
        if axis in wanted and x.shape[n] > 1:
            x = x[(slice(None),) * n + (wanted[axis],)]
    return x


def backward(
    grad: Tensor,
    reach: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor | None,
    stop: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    slopes: Tensor | None,
    at: Tensor | None,
    key_at: Tensor | None,
    scale: float,
    softcap: float | None,
    dbias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, in their dtype, float32 or float64; that of the bias is added to
    `dbias`, of the bias' shape.

    `reach` `[B, H, L]`: rowsum(grad * out) - grad of lse.
    """
    for n, axis in enumerate("bh" if dbias is not None else ""):
        if dbias is not None and dbias.shape[n] < q.shape[n]:
            # texts, or heads, that share a bias take turns: of threads that add to one number
            # chance would say the order
            found = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
            for i in range(q.shape[n]):
                g = i * k.shape[1] // q.shape[1]
                one = {axis: slice(i, i + 1)} | ({"g": slice(g, g + 1)} if axis == "h" else {})
                inputs = [
                    cut(x, axes, **one)
                    for x, axes in zip(
                        (grad, reach, lse, q, k, v, start, stop, mask, bias, slopes, at, key_at),
                        _AXES,
                        strict=True,
                    )
                ]
                inputs += [scale, softcap, dbias]
                for x, axes, y in zip(found, ("bh", "bg", "bg"), backward(*inputs), strict=True):
                    cut(x, axes, **one).add_(y)
            return found
    (batch, heads, length, width), (groups, keys, value_width) = q.shape, v.shape[1:]
    tiles = -(-heads // groups * length // ROWS)
    slices = max(1, min(-(-BACKWARD_TASKS // (batch * groups)), tiles))  # whatever the threads
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk, dv = (
        q.new_empty(batch, groups, slices, keys, -(-w // 16) * 16) for w in (width, value_width)
    )
    call, _ = _call(q, k, v, start, stop, mask, bias, None, slopes, at, key_at, scale, softcap)
    call.numbers["chunks"] = slices
    call.give("out", dq, "bhi")
    call.give("grad", grad if grad.stride(-1) == 1 else grad.contiguous(), "bhi")
    call.give("lse", lse.to(q.dtype).contiguous())
    call.give("reach", reach.to(q.dtype).contiguous())
    call.give("partial", dk)
    call.give("partial_v", dv)
    change = None
    if dbias is not None:
        # of rows that share a bias each task adds up its own
        change = dbias.new_zeros(slices, *dbias.shape) if dbias.shape[2] < length else dbias[None]
        call.give("change", change, "sbhij")
    call.run(f"backward_{str(q.dtype).removeprefix('torch.')}", batch * groups * slices)
    if dbias is not None and change is not None and dbias.shape[2] < length:
        dbias += change.sum(0)
    return dq, dk.sum(2)[..., :width].contiguous(), dv.sum(2)[..., :value_width].contiguous()


def observe(
    attention: AttentionCall,
    columns: Tensor,
    places: Tensor,
    offset: int,
    ids: tuple[Tensor, Tensor, Tensor] | None,
    counted: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, log-sum-exp, what probes.py tells of each row, `[numbers, B, H, L]` in its order, and
    what each key gets from all rows, `[B, H, S]`: the sum of their weights, each row's times
    `counted` `[B, L]`.

    `columns` `[B, H, S, C]`, the first the norms of the keys' contributions; `places` `[B, P, L]`,
    key numbers; `ids` of rows `[B, L]`, of keys `[B, S]`, and of the tokens before keys. Row i
    stands at key number `offset + i`.
    """
    from .kernels import stats as probes

    q, k, v = attention[:3]
    batch, heads, length = q.shape[:3]
    out = q.new_empty(batch, length, heads, v.shape[3]).transpose(1, 2)
    lse = q.new_empty(batch, heads, length)
    stats = q.new_empty(
        probes.SINGLE + places.shape[1] + 2 * probes.PAIRED + columns.shape[3], batch, heads, length
    )
    call, _ = _call(*_flat(attention))
    call.numbers |= {"columns_n": columns.shape[3], "places_n": places.shape[1], "offset": offset}
    call.give("out", out, "bhi")
    call.give("lse", lse)
    call.give("stats", stats)
    call.give("columns", columns.contiguous())
    call.give("places", places.contiguous())
    for name, x in zip(("ids", "key_ids", "before_ids"), ids or (), strict=False):
        call.give(name, x.to(torch.int32).contiguous())
    slices = max(
        1, min(-(-OBSERVE_TASKS // (batch * heads)), -(-length // ROWS))
    )  # whatever the threads
    received = q.new_empty(batch, heads, slices, k.shape[2])
    call.numbers["chunks"] = slices
    call.give("partial", received)
    call.give("reach", counted.to(q.dtype).contiguous())
    call.run(f"observe_{str(q.dtype).removeprefix('torch.')}", batch * heads * slices)
    return out, lse, stats, received.sum(2)


def weights(attention: AttentionCall) -> Tensor:
    """The weights of all queries, `[B, H, L, S]`, float32 or float64 as q is."""
    q, k, _ = attention[:3]
    batch, heads, length = q.shape[:3]
    out = q.new_zeros(batch, heads, length, k.shape[2])
    call, _ = _call(*_flat(attention._replace(v=k)))
    call.give("out", out, "bhi")
    call.run(
        f"exact_{str(q.dtype).removeprefix('torch.')}",
        batch * k.shape[1] * -(-heads // k.shape[1] * length // ROWS),
    )
    return out


def _flat(call: AttentionCall) -> tuple[Any, ...]:
    start, stop = call.bounds(torch.int32) or (None, None)
    sinks, slopes = (x if x is None else x[None] for x in (call.sinks, call.slopes))
    rest = (call.mask, call.bias, sinks, slopes, call.query_pos, call.key_pos)
    return (*call[:3], start, stop, *rest, call.scale, call.softcap)
