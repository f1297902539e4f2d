"""A kernel that isn't there yet is compiled in the background, and torch computes meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from multihead import attention
from multihead.masks import causal
from multihead.ops import backend_for
from multihead.ops.backends import background, cpu, jit

pytestmark = pytest.mark.skipif(
    jit.MISSING is not None, reason="without Numba there are no kernels"
)


@pytest.fixture
def unsaved(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without compiled kernels, whose background processes do nothing."""
    monkeypatch.setattr(jit, "_found", {})
    monkeypatch.setattr(jit, "_is_saved", lambda *_: False)
    monkeypatch.setattr(jit, "_forget_older", lambda _: None)
    monkeypatch.setattr(background, "_started", {})
    monkeypatch.setattr(background, "PROGRAM", "import time; time.sleep(60)")
    monkeypatch.setattr(cpu, "ENOUGH", 0)
    jit._report_compiling.cache_clear()


def end(name: str = "forward_float32") -> None:
    process = background._started[name]
    process.kill()
    process.wait()


X = torch.randn(1, 2, 512, 8, generator=torch.Generator().manual_seed(0))


def test_torch_computes_until_a_kernel_is_there(
    unsaved: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    want = attention(X, X, X, causal(), softcap=3.0, backend="torch")
    began = time.monotonic()
    for _ in range(2):
        torch.testing.assert_close(attention(X, X, X, causal(), softcap=3.0), want)
    assert time.monotonic() - began < 30 and not jit._found
    err = capsys.readouterr().err
    assert err.count("compiled in the background, once; until then torch computes") == 1
    assert [*background._started] == ["forward_float32"]
    assert backend_for(X, X, X, causal()).backend == "sdpa"
    end()
    # what ended without a kernel isn't tried again in the background
    assert backend_for(X, X, X, causal()).backend == "cpu"
    monkeypatch.setattr(jit, "_is_saved", lambda *_: True)
    torch.testing.assert_close(attention(X, X, X, causal(), softcap=3.0), want)
    assert [*jit._found] == ["forward_float32"]


def test_who_asks_for_the_kernels_waits_for_them(unsaved: None) -> None:
    attention(X, X, X, causal(), backend="cpu")
    assert [*jit._found] == ["forward_float32"] and not background._started


def test_a_call_waits_where_no_process_can_be_started(
    unsaved: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", None)
    attention(X, X, X, causal())
    assert [*jit._found] == ["forward_float32"] and not background._started


def test_gradients_and_readings_go_on_too(unsaved: None) -> None:
    import multihead
    from small import IDS, llama

    leaf = X.clone().requires_grad_()
    want = torch.autograd.grad(attention(leaf, X, X, backend="torch").square().sum(), leaf)
    got = torch.autograd.grad(attention(leaf, X, X).square().sum(), leaf)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    table = multihead.read(llama(), [{"input_ids": IDS}], probe=False)
    assert table.meta["documents"] == 2 and not jit._found
    for name in background._started:
        end(name)


CHILD = """
    import os, sys
    from multihead.ops.backends import background, jit
    background._started["forward_float32"] = background.subprocess.Popen([sys.executable, "-c", ""])
    child = os.fork()
    if child == 0:
        os._exit(int(bool(background._started) or background.is_busy()))
    print(os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_forgets_the_processes_of_another() -> None:
    code = textwrap.dedent(CHILD)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "0", done.stderr


@pytest.mark.slow
def test_the_next_command_has_what_was_compiled(tmp_path: Path) -> None:
    program = """
        import sys, time, torch
        from multihead import attention
        from multihead.ops.backends import background, jit
        x = torch.randn(1, 4, 512, 32)
        attention(x, x, x, softcap=5.0)
        print(*(jit._found or background._started))
    """
    env: dict[str, Any] = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}

    def run() -> str:
        code = textwrap.dedent(program)
        return subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=env
        ).stdout.strip()

    assert run() == "forward_float32"
    deadline = time.monotonic() + 200
    while not [*tmp_path.rglob("*forward_float32*.nbc")] and time.monotonic() < deadline:
        time.sleep(0.5)
    began = time.monotonic()
    assert run() == "forward_float32" and time.monotonic() - began < 60
    assert len([*tmp_path.rglob("*.nbc")]) == 1
