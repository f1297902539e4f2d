"""Compiling the kernels, keeping them on disk, and running them on torch's threads."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from multihead import attention
from multihead.masks import causal
from multihead.ops import backend_for
from multihead.ops.backends import jit

pytestmark = pytest.mark.skipif(
    jit.MISSING is not None, reason="without Numba there are no kernels"
)


def test_threads_of_our_own_where_torch_has_none_to_lend(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(1, 4, 100, 16) for _ in range(3))
    want = attention(q, k, v, causal(), backend="cpu")
    monkeypatch.setattr(jit, "_parallel", lambda: jit._run_in_pool)
    assert torch.equal(attention(q, k, v, causal(), backend="cpu"), want)


PROGRAM = """
    import sys, torch
    from multihead import attention
    from multihead.ops.backends import jit
    x = torch.ones(1, 1, 40, 8)
    assert torch.allclose(attention(x, x, x, backend="cpu"), x)
    print(jit._found["forward_float32"].cache_hits)
"""


def started(folder: Path, program: str = PROGRAM, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "NUMBA_CACHE_DIR": str(folder), **more},
    )


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


def test_what_was_compiled_is_kept(tmp_path: Path) -> None:
    """Two processes at once compile once; a third finds it; damaged, it is made anew."""
    both = [started(tmp_path) for _ in range(2)]
    done = [p.communicate(timeout=300) for p in both]
    assert sorted(out.strip() for out, _ in done) == ["0", "1"], done
    assert sum("compiled forward_float32" in err for _, err in done) == 1
    out, err = started(tmp_path).communicate(timeout=300)
    assert out.strip() == "1" and "compiled" not in err
    for kept in [*tmp_path.rglob("*.nbi"), *tmp_path.rglob("*.nbc")]:
        kept.write_bytes(kept.read_bytes()[:100])
    out, err = started(tmp_path).communicate(timeout=300)
    assert out.strip() == "0" and "compiled forward_float32" in err, err
    out, err = started(tmp_path).communicate(timeout=300)
    assert out.strip() == "1", err


def test_kernels_of_other_sources_are_not_taken(tmp_path: Path) -> None:
    """Numba looks at the age of one file, and a kernel is made of several."""
    out, _ = started(tmp_path).communicate(timeout=300)
    stamp = next(tmp_path.rglob("multihead.sources"))
    stamp.write_text("others")
    out, err = started(tmp_path).communicate(timeout=300)
    assert out.strip() == "0" and "compiled forward_float32" in err
    assert stamp.read_text() != "others"


def test_where_nothing_can_be_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nowhere(function: Any) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr("numba.core.caching.FunctionCache", nowhere)
    monkeypatch.setattr(jit, "_found", {})
    x = torch.ones(1, 1, 40, 8)
    assert torch.allclose(attention(x, x, x, backend="cpu"), x)
    words = capsys.readouterr().err
    assert (
        "forward_float32: its compiled form can't be saved" in words
        and "set NUMBA_CACHE_DIR" in words
    )


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Numba isn't installed."""
    monkeypatch.setattr(jit, "MISSING", "Numba isn't installed (pip install numba)")


def test_without_numba_it_is_said(
    without_kernels: None, capsys: pytest.CaptureFixture[str]
) -> None:
    jit.report_missing.cache_clear()
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
