"""Compiling the kernels, keeping them on disk, and running them on torch's threads."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch

import multihead
from multihead import attention
from multihead.errors import MultiheadError
from multihead.masks import causal
from multihead.ops import AttentionCall, backend_for
from multihead.ops.backends import background, cpu, jit
from small import IDS, llama

pytestmark = pytest.mark.skipif(
    jit.MISSING is not None, reason="without Numba there are no kernels"
)


def test_threads_of_our_own_where_torch_has_none_to_lend(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(1, 4, 100, 16) for _ in range(3))
    want = attention(q, k, v, causal(), backend="cpu")
    monkeypatch.setattr(jit, "_parallel", lambda: jit._run_in_pool)
    assert torch.equal(attention(q, k, v, causal(), backend="cpu"), want)


# a kernel of one line in place of a real one: what is kept doesn't depend on its length
PROGRAM = """
    import sys
    sys.path.insert(0, FOLDER)
    import tiny
    from multihead.ops.backends import background, jit
    background.ALLOWED = False
    jit._python = lambda name: tiny.kernel
    jit.kernel("exact_float32")
    print(jit._found["exact_float32"].cache_hits)
"""


def started(folder: Path, program: str = PROGRAM, **more: str) -> subprocess.Popen[str]:
    code = textwrap.dedent(program).replace("FOLDER", repr(str(folder)))
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "NUMBA_CACHE_DIR": str(folder), **more},
    )


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names a processor of that kind")
@pytest.mark.parametrize(
    ("name", "features", "width"), [("haswell", "+avx,+avx2,+fma", 32), ("x86-64", "+sse2", 16)]
)
def test_processors_with_narrower_vectors(
    name: str, features: str, width: int, tmp_path: Path
) -> None:
    program = """
        import torch
        from multihead import attention
        from multihead.masks import causal
        from multihead.ops.backends.kernels import intrinsics as tiles
        for length, keys in ((50, 50), (1, 700), (40, 90)):
            q, k, v = torch.randn(1, 4, length, 16), torch.randn(1, 2, keys, 16), torch.randn(1, 2, keys, 24)
            for mask, bias in ((causal(keys - length), None), (None, torch.randn(length, keys))):
                out, want = (attention(q, k, v, mask, bias=bias, backend=b) for b in ("cpu", "reference"))
                assert (out - want).abs().max() < 1e-5
        print(tiles.BYTES)
    """
    out, err = started(
        tmp_path, program, NUMBA_CPU_NAME=name, NUMBA_CPU_FEATURES=features
    ).communicate(timeout=300)
    assert out.strip() == str(width), err


@pytest.mark.slow
def test_what_was_compiled_is_kept(tmp_path: Path) -> None:
    """Two processes at once compile once; a third finds it; damaged, or compiled of other sources,
    it is made anew. (Numba looks at the age of one file, and a kernel is made of several.)
    """
    (tmp_path / "tiny.py").write_text("def kernel(data):\n    pass\n")
    both = [started(tmp_path) for _ in range(2)]
    done = [p.communicate(timeout=300) for p in both]
    assert sorted(out.strip() for out, _ in done) == ["0", "1"], done
    assert sum("compiled exact_float32" in err for _, err in done) == 1
    out, err = started(tmp_path).communicate(timeout=300)
    assert out.strip() == "1" and "compiled" not in err
    for kept in [*tmp_path.rglob("*.nbi"), *tmp_path.rglob("*.nbc")]:
        kept.write_bytes(kept.read_bytes()[:100])
    out, err = started(tmp_path).communicate(timeout=300)
    assert out.strip() == "0" and "compiled exact_float32" in err, err
    stamp = next(tmp_path.rglob("multihead.sources"))
    stamp.write_text("others")
    out, err = started(tmp_path).communicate(timeout=300)
    assert out.strip() == "0" and "compiled exact_float32" in err
    assert stamp.read_text() != "others"


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process in which no kernel was loaded."""
    monkeypatch.setattr(jit, "_found", {})
    monkeypatch.setattr(jit, "MISSING", None)
    monkeypatch.setattr(background, "ALLOWED", False)
    jit._report_missing.cache_clear()


def cannot_compile(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr("numba.cfunc", fail)
    # what other tests saved stays
    monkeypatch.setattr("numba.core.caching.FunctionCache.flush", lambda _: None)


def cannot_save(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(_: Any) -> Any:
        raise error

    monkeypatch.setattr("numba.core.caching.FunctionCache", fail)


def cannot_lock(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr("filelock.FileLock.acquire", fail)


FAULTS = {
    "Numba raises": (
        cannot_compile,
        RuntimeError("LLVM ERROR: no\nsecond line"),
        "Numba can't compile observe_float32 (RuntimeError: LLVM ERROR: no)",
    ),
    "Numba fails": (cannot_compile, SystemError(), "Numba can't compile observe_float32 (System"),
    "a full disk": (
        cannot_compile,
        OSError(28, "No space left on device"),
        "compiled kernels can't be saved ([Errno 28] No space left on device); set NUMBA_CACHE_DIR",
    ),
    "no folder": (
        cannot_save,
        RuntimeError("cannot cache function: no locator available"),
        "compiled kernels can't be saved (cannot cache function: no locator available); set",
    ),
    "a lock of another user": (
        cannot_lock,
        PermissionError(13, "Permission denied", "multihead.lock"),
        "compiled kernels can't be saved ([Errno 13] Permission denied: 'multihead.lock'); set",
    ),
    "no locks": (
        cannot_lock,
        NotImplementedError("FileSystem does not appear to support flock"),
        "compiled kernels can't be saved (FileSystem does not appear to support flock); set",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_without_kernels_torch_computes_everything(
    fault: str, fresh: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Outputs, gradients and readings, with one line on stderr."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 512, 8, generator=g)
    bias = torch.randn(512, generator=g)

    def compute(backend: str) -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        out, lse = attention(leaf, x, x, causal(), bias=bias, return_lse=True, backend=backend)
        return [out, lse, *torch.autograd.grad(out.sum() + lse.sum(), leaf)]

    want = [*compute("torch"), *read_small()]
    assert not capsys.readouterr().err
    change, error, words = FAULTS[fault]
    monkeypatch.setattr(cpu, "ENOUGH", 0)
    change(monkeypatch, error)
    monkeypatch.setattr(jit, "_found", {})
    for name in ("observe", "forward"):  # whatever is asked for first
        monkeypatch.setattr(jit, "MISSING", None)
        jit._report_missing.cache_clear()
        with pytest.raises(MultiheadError) as caught:
            jit.kernel(f"{name}_float32")
        reason = words.replace("observe", name)
        assert reason in str(caught.value)
        monkeypatch.setattr(jit, "MISSING", None)
        first = read_small if name == "observe" else lambda: compute("auto")
        first()
        for a, b in zip([*compute("auto"), *read_small()], want, strict=True):
            torch.testing.assert_close(a, b)
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and reason in err and "computed by torch" in err, err
        monkeypatch.setattr(jit, "MISSING", None)
        for _ in range(2):
            with pytest.raises(MultiheadError, match="backend='cpu'") as caught:
                compute("cpu")
            assert words.replace("observe", "forward") in str(caught.value)


def read_small() -> list[torch.Tensor]:
    """A reading with statistics and the weights of every query."""
    table = multihead.read(llama(), [{"input_ids": IDS}], probe=False, statistics=["nearest"])
    return [torch.tensor([r["entropy"] for r in table.rows()])]


def test_a_kernel_of_gradients_or_weights_alone_that_fails(
    fresh: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = jit._load

    def fail(name: str) -> Any:
        if name.startswith(("backward", "exact")):
            raise RuntimeError("not this one")
        return load(name)

    monkeypatch.setattr(jit, "_load", fail)
    x = torch.randn(1, 2, 512, 8, requires_grad=True)
    want = torch.autograd.grad(attention(x, x, x, backend="torch").sum(), x)
    got = torch.autograd.grad(attention(x, x, x).sum(), x)
    torch.testing.assert_close(got, want)
    assert "Numba can't compile backward_float32" in capsys.readouterr().err
    monkeypatch.setattr(jit, "MISSING", None)
    call = AttentionCall.lower(x.detach(), x.detach(), x.detach(), causal())
    weights = attention(*call[:3], causal(), return_weights=True, backend="reference")[1]
    torch.testing.assert_close(cpu.attend_for_weights(call), weights)


def test_an_interrupt_ends_the_compilation(
    fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cannot_compile(monkeypatch, KeyboardInterrupt())
    x = torch.randn(1, 2, 512, 8)
    for _ in range(2):  # the locks are free again, or the second would wait for ever
        with pytest.raises(KeyboardInterrupt):
            attention(x, x, x, causal())
        assert jit.MISSING is None and not jit._lock.locked()


def test_an_interrupt_ends_the_wait_for_another_process(
    fresh: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def acquire(lock: Any, timeout: float | None = None, **_: Any) -> Any:
        calls.append(timeout)
        if timeout is not None:
            raise filelock.Timeout(lock.lock_file)
        raise KeyboardInterrupt

    monkeypatch.setattr("filelock.FileLock.acquire", acquire)
    x = torch.randn(1, 2, 512, 8)
    with pytest.raises(KeyboardInterrupt):
        attention(x, x, x, causal())
    assert calls == [1, None] and not jit._lock.locked()
    assert "waiting for another process, which compiles" in capsys.readouterr().err


NO_KERNELS = """
    import torch
    from multihead import attention
    from multihead.masks import causal
    from multihead.ops import backend_for
    x = torch.randn(1, 2, 1024, 8, requires_grad=True)
    for _ in range(2):
        out = attention(x, x, x, causal())
        torch.testing.assert_close(out, attention(x, x, x, causal(), backend="torch"))
        out.sum().backward()
    print(backend_for(x, x, x, causal()).backend)
    try:
        attention(x, x, x, backend="cpu")
    except ValueError as error:
        print(error)
    import sys
    from multihead.cli import main
    sys.argv = ["multihead", "warm"]
    main()
"""


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "raise ImportError('Numba needs NumPy 2.2 or less. Got NumPy 2.9.')",
            "Numba can't be imported (ImportError: Numba needs NumPy 2.2 or less. Got NumPy 2.9.)",
        ),
        ("pass", "Numba can't be imported (ImportError: cannot import name"),
        (None, "NUMBA_DISABLE_JIT is set"),
    ],
)
def test_a_numba_that_cannot_be_used(source: str | None, words: str, tmp_path: Path) -> None:
    more = {"NUMBA_DISABLE_JIT": "1"}
    if source is not None:
        (tmp_path / "numba").mkdir()
        (tmp_path / "numba" / "__init__.py").write_text(source)
        more = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    process = started(tmp_path, NO_KERNELS, **more)
    out, err = process.communicate(timeout=300)
    assert out.splitlines()[0] == "sdpa" and words in out and "backend='cpu'" in out, (out, err)
    assert process.returncode == 2 and err.count("computed by torch") == 1, err
    assert err.count(words) == 2 and "Traceback" not in err  # of attention, and of warm


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    more = {"NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator"}  # no other folder
    _, err = started(file, NO_KERNELS, **more).communicate(timeout=300)
    assert "can't be saved" in err and "set NUMBA_CACHE_DIR" in err and "Traceback" not in err, err


CTRL_C = """
    import os, signal, sys, threading, time
    import numba, torch
    from multihead import attention
    def compile_slowly(*_, **__):
        print("compiling", flush=True)
        time.sleep(100)
    numba.cfunc = compile_slowly
    from multihead.ops.backends import background
    background.ALLOWED = False
    x = torch.randn(1, 2, 1024, 8, requires_grad=sys.argv[1:] == ["tracked"])
    attention(x, x, x)
"""


@pytest.mark.slow
def test_control_c_ends_a_program_that_compiles_or_waits(tmp_path: Path) -> None:
    first = started(tmp_path, CTRL_C)
    assert first.stdout is not None and first.stdout.readline() == "compiling\n"
    second = started(tmp_path, CTRL_C)
    assert second.stderr is not None and "waiting for another process" in second.stderr.readline()
    for process in (second, first):
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode in (1, -signal.SIGINT) and "KeyboardInterrupt" in err
    third = started(tmp_path, CTRL_C)  # the lock is free
    assert third.stdout is not None and third.stdout.readline() == "compiling\n"
    third.kill()
    third.communicate(timeout=60)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_while_another_thread_compiles() -> None:
    """Workers of a DataLoader are forked at any moment; they would wait for the lock for ever."""
    with jit._lock:
        child = os.fork()
        if child == 0:
            x = torch.ones(1, 1, 40, 8)
            with jit._lock:
                os._exit(0 if torch.allclose(attention(x, x, x, backend="torch"), x) else 1)
        deadline = time.monotonic() + 30
        status = None
        while status is None and time.monotonic() < deadline:
            done, code = os.waitpid(child, os.WNOHANG)
            status = code if done else None
            time.sleep(0.02)
        if status is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert status == 0


FORKED = """
    import os, torch
    from multihead import attention
    from multihead.masks import causal
    torch.set_num_threads(2)
    x = torch.randn(2, 4, 256, 32)
    want = attention(x, x, x, causal(), backend="cpu")
    child = os.fork()
    got = attention(x, x, x, causal(), backend="cpu")
    if not child:
        torch.set_num_threads(1)  # torch's own operators would wait for ever too
        os._exit(0 if torch.equal(got, want) else 1)
    print(os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_after_kernels_have_run_on_several_threads() -> None:
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FORKED)], capture_output=True, text=True, timeout=120
    )
    assert process.stdout.strip() == "0", process.stderr


def test_threads_that_need_a_kernel_at_once_load_it_once(
    fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, loaded = jit._load, []

    def slow(name: str) -> Any:
        loaded.append(name)
        time.sleep(0.2)
        return load(name)

    monkeypatch.setattr(jit, "_load", slow)
    x = torch.randn(1, 2, 40, 8)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: attention(x, x, x, backend="cpu"), range(4)))
    assert loaded == ["forward_float32"] and all(torch.equal(found[0], y) for y in found)


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Numba isn't installed."""
    monkeypatch.setattr(jit, "MISSING", "Numba isn't installed (pip install numba)")


def test_without_numba_it_is_said(
    without_kernels: None, capsys: pytest.CaptureFixture[str]
) -> None:
    jit._report_missing.cache_clear()
    x = torch.zeros(1, 2, 1024, 8)
    small = x[:, :, :9]
    attention(small, small, small)
    assert not capsys.readouterr().err
    for _ in range(2):
        assert attention(x, x, x).shape == x.shape
    words = (
        "Numba isn't installed (pip install numba), so attention on this CPU is computed by torch"
    )
    assert capsys.readouterr().err.count(words) == 1
    assert backend_for(x, x, x).backend == "sdpa"
    with pytest.raises(
        ValueError, match="backend='cpu' doesn't support this input: Numba isn't installed"
    ):
        attention(x, x, x, backend="cpu")
