"""Kernels compiled by a process in the background, while torch computes in their place.

Compiling a kernel takes as long as the work of many calls. So a call whose kernel isn't on disk yet
starts a process that compiles and saves it, and is computed by torch; a later call finds it. The
process goes on after this one has ended, for the seconds that one kernel takes: the next command
has it.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator

ALLOWED = True  # False: a call waits until its kernel is compiled
PROGRAM = """
import os, sys
if hasattr(os, "nice"):
    os.nice(10)
from multihead.ops.backends import jit
with jit.waiting():
    jit.kernel(sys.argv[1])
"""
_started: dict[str, subprocess.Popen[bytes]] = {}
_local = threading.local()


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """For the length of the `with`, calls of this thread wait until their kernels are compiled."""
    before = getattr(_local, "waits", False)
    _local.waits = True
    try:
        yield
    finally:
        _local.waits = before


def has_to_wait() -> bool:
    """Whether this thread's calls wait until their kernels are compiled."""
    return not ALLOWED or getattr(_local, "waits", False)


def may_start(name: str) -> bool:
    """Whether a kernel may be left to the background: it wasn't tried there before."""
    return not has_to_wait() and name not in _started and bool(sys.executable)


def start(name: str) -> None:
    """Begin to compile a kernel. A process that can't be started counts as one that has ended."""
    with contextlib.suppress(OSError):
        # -P: nothing is imported from the current folder
        _started[name] = subprocess.Popen(
            [sys.executable, "-P", "-c", PROGRAM, name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


def is_running(name: str) -> bool:
    """Whether a kernel is being compiled in the background, by this process' wish."""
    process = _started.get(name)
    return process is not None and process.poll() is None


def is_busy() -> bool:
    """Whether any kernel is."""
    return any(process.poll() is None for process in _started.values())


def forget() -> None:
    """Forget the processes, which are another's after a fork."""
    _started.clear()
