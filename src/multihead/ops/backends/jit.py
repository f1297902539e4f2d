"""The CPU kernels compiled by Numba: when first needed, kept on disk, and run by torch's own
threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
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

from ...errors import MissingDependency

MISSING = None if importlib.util.find_spec("numba") else "Numba isn't installed (pip install numba)"
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


def kernel(name: str) -> int:
    """The address of a compiled kernel; compiled on the first call on a machine."""
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

    from .kernels.tile import SIGNATURE

    python = _python(name)
    try:
        kept = FunctionCache(python)
        folder = Path(kept.cache_path)
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / "multihead.lock")
        # of two processes that compile at once, one could read a half-written file
        lock.acquire()
    except (RuntimeError, OSError) as error:
        _print(
            f"{name}: its compiled form can't be saved ({error}); set NUMBA_CACHE_DIR to a"
            " writable folder"
        )
        return cfunc(SIGNATURE)(python)
    try:
        _forget_older(folder)
        start = time.perf_counter()
        try:
            found = cfunc(SIGNATURE, cache=True)(python)
        except Exception:  # the saved file is damaged, in one of many ways: compile again
            kept.flush()
            found = cfunc(SIGNATURE, cache=True)(python)
        if not found.cache_hits:
            _print(f"compiled {name} in {time.perf_counter() - start:.0f} s, saved in {folder}")
        return found
    finally:
        lock.release()


def _python(name: str) -> Any:
    from .kernels import backward, bf16, forward, stats, weights

    modules = {"backward": backward, "observe": stats, "exact": weights, "paired": bf16}
    return getattr(modules.get(name.partition("_")[0], forward), name)


def _forget_older(folder: Path) -> None:
    """Delete saved kernels of other sources: Numba checks the age of a kernel's file alone, and its
    code lies in several."""
    from numba.core.caching import FunctionCache

    sources = sorted((Path(__file__).parent / "kernels").glob("*.py"))
    now = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    stamp = folder / "multihead.sources"
    if not stamp.exists() or stamp.read_text() != now:
        for name in _all():
            FunctionCache(_python(name)).flush()
        stamp.write_text(now)


def _print(message: str) -> None:
    print(f"multihead: {message}", file=sys.stderr, flush=True)


@cache
def report_missing() -> None:
    """Print once in a process that Numba is missing."""
    _print(
        f"{MISSING}, so attention on this CPU is computed by torch: slower, with the same results"
    )


def _all() -> tuple[str, ...]:
    from .kernels.bf16 import THERE

    return (*KERNELS, "paired_float32") if THERE else KERNELS


def compile_all() -> int:
    """Compile all kernels, so that no first call waits: a minute and a half, once on a machine.
    Returns their number; raises `MissingDependency` without Numba.
    """
    if MISSING:
        raise MissingDependency(MISSING)
    for name in _all():
        kernel(name)
    return len(_all())


@cache
def _parallel() -> Callable[[int, int, int], None]:
    """A function that calls a function of one pointer on several threads: on torch's own, where it
    uses OpenMP. A second pool would compete with torch's threads, which spin for milliseconds after
    their work.
    """
    try:
        library = next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))
        parallel = ctypes.CDLL(str(library)).GOMP_parallel  # of the library torch is linked with
    except (StopIteration, OSError, AttributeError):
        return _run_in_pool
    parallel.argtypes, parallel.restype = (
        [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint],
        None,
    )
    return lambda function, data, threads: parallel(function, data, threads, 0)


_prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def run_kernel(name: str, data: int, threads: int) -> None:
    """Run a kernel with the address of its arguments, on so many threads."""
    (_parallel() if threads > 1 else _run_alone)(kernel(name), data, threads)


def _run_alone(function: int, data: int, threads: int) -> None:
    _prototype(function)(data)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="multihead")


def _run_in_pool(function: int, data: int, threads: int) -> None:
    run = _prototype(function)
    others = [_pool().submit(run, data) for _ in range(threads - 1)]
    run(data)
    for other in others:
        other.result()
