"""`multihead warm`; `multihead check` is tested with the checks."""

from __future__ import annotations

import pytest

from cli.commands import call


def test_warm_compiles_every_kernel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from multihead.ops.backends import jit

    asked = []
    monkeypatch.setattr(jit, "kernel", asked.append)
    code, out, err = call(monkeypatch, capsys, "warm")
    if jit.MISSING is None:
        assert (
            code == 0
            and f"{len(asked)} kernels are ready" in out
            and set(asked) >= set(jit.KERNELS)
        ), err
    monkeypatch.setattr(jit, "MISSING", "Numba isn't installed (pip install numba)")
    code, out, err = call(monkeypatch, capsys, "warm")
    assert code == 2 and not out and "pip install numba" in err
