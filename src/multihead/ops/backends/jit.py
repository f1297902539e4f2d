"""The CPU kernels compiled by Numba: when first needed, in the background, kept on disk, and run by
torch's own threads.

Where Numba is missing, can't be imported, can't compile or can't save what it compiled,
`KernelsUnavailable` is raised, and from then on `MISSING` is the reason: torch computes instead.
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
from typing import Any, NoReturn

import torch

from ...errors import MissingDependency
from . import background
from .background import waiting as waiting


class KernelsUnavailable(MissingDependency):
    """The compiled kernels can't be had in this process; the message gives the reason."""


class KernelsCompiling(KernelsUnavailable):
    """A kernel is being compiled in the background; torch computes until it is there."""


def _find_reason() -> str | None:
    """Why there are no kernels, as far as is known without importing Numba."""
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return "NUMBA_DISABLE_JIT is set"
    if not importlib.util.find_spec("numba"):
        return "Numba isn't installed (pip install numba)"
    return None


COMPILING = "kernels for this processor are compiled in the background, once"
MISSING = _find_reason()  # why there are no kernels, for a message; None where there are
KERNELS = (
    "decode4_float32",
    "decode_int8",
    "decode_bfloat16",
    *(
        f"{kernel}_{dtype}"
        for dtype in ("float32", "float64")
        for kernel in ("forward", "decode", "backward", "observe", "exact")
    ),
)
_lock = threading.Lock()
_forked = False  # whether this process is the child of one that had the library
_found: dict[str, Any] = {}


def _renew_after_fork() -> None:
    """Forget the lock, which another thread may have held, and threads, which a child has not;
    OpenMP waits for its own for ever.
    """
    global _lock, _forked
    _lock, _forked = threading.Lock(), True
    background.forget()
    _pool.cache_clear()
    _parallel.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_after_fork)


def kernel(name: str) -> int:
    """The address of a compiled kernel, which the first call on a machine compiles, in the
    background unless it has to wait (`waiting`).

    Raises:
        KernelsCompiling: it is being compiled in the background.
        KernelsUnavailable: Numba can't be imported, can't compile it, or can't save it.
    """
    found = _found.get(name)
    if found is None:
        require_numba()
        if background.is_running(name) and not background.has_to_wait():
            raise KernelsCompiling(COMPILING)
        with _lock:
            found = _found.get(name)
            if found is None:
                try:
                    found = _found[name] = _load(name)
                except KernelsCompiling:
                    raise
                except Exception as error:  # whatever Numba and LLVM raise
                    _give_up(f"Numba can't compile {name}", error)
    return int(found.address)


def require_numba() -> None:
    """Import Numba and the kernels' sources.

    Raises:
        KernelsUnavailable: there is no Numba, or it can't be imported.
    """
    if MISSING:
        raise KernelsUnavailable(MISSING)
    _import_numba()


@cache
def _import_numba() -> None:
    try:
        from numba import config

        _python("forward_float32")
    except Exception as error:  # for instance an ImportError for the version of NumPy
        _give_up("Numba can't be imported", error)
    if config.DISABLE_JIT:
        _give_up("NUMBA_DISABLE_JIT is set")


def _give_up(reason: str, error: Exception | None = None) -> NoReturn:
    """Leave attention to torch for the rest of the process."""
    global MISSING
    if error is not None and not isinstance(error, KernelsUnavailable):
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        detail = f"{type(error).__name__}: {lines[0] if lines else ''}"[:200].rstrip(": ")
        reason = f"{reason} ({detail})"
    elif error is not None:
        reason = str(error)
    MISSING = reason
    raise KernelsUnavailable(reason) from error


def _load(name: str) -> Any:
    from filelock import FileLock, Timeout
    from numba import cfunc
    from numba.core.caching import FunctionCache

    from .kernels.tile import SIGNATURE

    python = _python(name)
    try:
        kept = FunctionCache(python)
        folder = Path(kept.cache_path)
        folder.mkdir(parents=True, exist_ok=True)
        # without the lock, which a process that compiles holds
        if background.may_start(name) and not (
            _is_current(folder) and _is_saved(python, SIGNATURE)
        ):
            background.start(name)
            raise KernelsCompiling(COMPILING)
        lock = FileLock(folder / "multihead.lock")
        # of two processes that compile at once, one could read a half-written file
        try:
            lock.acquire(timeout=1)
        except Timeout:
            _print(f"{name}: waiting for another process, which compiles ({lock.lock_file})")
            lock.acquire()
    except (RuntimeError, OSError) as error:
        _give_up_saving(error)
    try:
        _forget_older(folder)
        start = time.perf_counter()
        try:
            found = cfunc(SIGNATURE, cache=True)(python)
        except OSError:
            raise
        except Exception:  # the saved file is damaged, in one of many ways: compile again
            kept.flush()
            found = cfunc(SIGNATURE, cache=True)(python)
        if not found.cache_hits:
            _print(f"compiled {name} in {time.perf_counter() - start:.0f} s, saved in {folder}")
        return found
    except OSError as error:  # for instance a full disk
        _give_up_saving(error)
    finally:
        lock.release()


def _is_saved(python: Any, signature: Any) -> bool:
    """Whether a compiled kernel is on disk, whole."""
    from numba.core.ccallback import CFunc
    from numba.core.sigutils import normalize_signature

    found: Any = CFunc(python, normalize_signature(signature), locals={}, options={})
    found.enable_caching()
    try:
        kept = found._cache.load_overload(found._sig, found._targetdescr.target_context)
    except OSError:
        raise
    except Exception:  # damaged, in one of many ways
        return False
    return kept is not None


def _give_up_saving(error: Exception) -> NoReturn:
    raise KernelsUnavailable(
        f"compiled kernels can't be saved ({error}); set NUMBA_CACHE_DIR to a writable folder"
    )


def _python(name: str) -> Any:
    from .kernels import backward, bf16, forward, int8, stats, weights

    if name in ("decode_int8", "decode_bfloat16"):
        return getattr(int8, name)
    modules = {"backward": backward, "observe": stats, "exact": weights, "paired": bf16}
    return getattr(modules.get(name.partition("_")[0], forward), name)


def _sources() -> str:
    """A hash of the kernels' sources."""
    sources = sorted((Path(__file__).parent / "kernels").glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def _is_current(folder: Path) -> bool:
    """Whether saved kernels are of these sources."""
    stamp = folder / "multihead.sources"
    return stamp.exists() and stamp.read_text() == _sources()


def _forget_older(folder: Path) -> None:
    """Delete saved kernels of other sources: Numba checks the age of a kernel's file alone, and its
    code lies in several."""
    from numba.core.caching import FunctionCache

    if not _is_current(folder):
        for name in _all():
            FunctionCache(_python(name)).flush()
        (folder / "multihead.sources").write_text(_sources())


def _print(message: str) -> None:
    print(f"multihead: {message}", file=sys.stderr, flush=True)


def report_missing() -> None:
    """Print once in a process that the kernels are missing, or being compiled."""
    (_report_missing if MISSING else _report_compiling)()


@cache
def _report_compiling() -> None:
    _print(f"{COMPILING}; until then torch computes, with the same results")


@cache
def _report_missing() -> None:
    _print(
        f"{MISSING}, so attention on this CPU is computed by torch: slower, with the same results"
    )


def _all() -> tuple[str, ...]:
    from .kernels.bf16 import THERE

    return (*KERNELS, "paired_float32") if THERE else KERNELS


def compile_all() -> int:
    """Compile all kernels, so that no first call waits: a minute and a half, once on a machine.
    Returns their number; raises `KernelsUnavailable` where that isn't possible.
    """
    require_numba()
    with waiting():
        for name in _all():
            kernel(name)
    return len(_all())


@cache
def _parallel() -> Callable[[int, int, int], None]:
    """A function that calls a function of one pointer on several threads: on torch's own, where it
    uses OpenMP. A second pool would compete with torch's threads, which spin for milliseconds after
    their work.
    """
    if _forked:
        return _run_in_pool
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
