"""The seven sums that a table keeps of each head and column, and the terms they add up."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

# Indices into the seven sums over documents: of x, y, rows, x*x, x*y, y*y and 1.
X, Y, ROWS, XX, XY, YY, TERMS = range(7)
Sums = NDArray[np.float64]  # [heads, 7]


def terms(x: Any, y: Any, rows: Any) -> Sums:
    """The seven terms of one document, `[..., 7]`, from numerators, denominators and row counts of
    one shape `[...]`.
    """
    return np.stack([x, y, rows, x * x, x * y, y * y, np.ones_like(x)], axis=-1)
