"""exp and tanh of the kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from multihead.ops.backends import jit

pytestmark = pytest.mark.skipif(
    jit.MISSING is not None, reason="without Numba there are no kernels"
)


@pytest.mark.parametrize("name", ["exp_nonpositive", "tanh"])
def test_the_functions_written_out(name: str) -> None:
    from numba import njit

    from multihead.ops.backends.kernels import intrinsics as tiles

    function = getattr(tiles, name)

    @njit
    def over(x: Any, out: Any) -> None:
        for i in range(len(x)):
            out[i] = function(x[i])

    x = np.linspace(
        -87 if name == "exp_nonpositive" else -40,
        0 if name == "exp_nonpositive" else 40,
        2_000_003,
        dtype=np.float32,
    )
    out = np.empty_like(x)
    over(x, out)
    want = (np.exp if name == "exp_nonpositive" else np.tanh)(x.astype(np.float64))
    # of far numbers exp's argument is itself rounded: to half a bit of 87 * log2(e)
    error = np.abs(out - want) / np.maximum(np.abs(want), 1e-30)
    assert error[np.abs(x) < 1].max() < 3e-7 and error.max() < (
        8e-6 if name == "exp_nonpositive" else 3e-7
    )
    ends = (
        np.array([-np.inf, np.nan, -200.0], np.float32)
        if name == "exp_nonpositive"
        else np.array([-np.inf, np.nan, np.inf], np.float32)
    )
    found = np.empty_like(ends)
    over(ends, found)
    np.testing.assert_array_equal(
        found,
        np.array([0, np.nan, 0] if name == "exp_nonpositive" else [-1, np.nan, 1], np.float32),
    )
