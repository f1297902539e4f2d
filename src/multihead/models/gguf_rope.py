"""The table of a GGUF file that scales rotary frequencies as Llama 3.1 does.

A frequency with a long wavelength is divided by a factor, one with a short wavelength is kept, and
between them both are mixed (Grattafiori et al. 2024, "The Llama 3 herd of models"). llama.cpp keeps
the divisors, a number a pair of dimensions, as the tensor rope_freqs.weight; transformers keeps the
rule, as rope_parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import MultiheadError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["TABLE", "rope_divisors", "rule_of"]

TABLE = "rope_freqs.weight"
USUAL = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope_divisors(rope: Mapping[str, Any], width: int) -> np.ndarray:
    """The divisors `[width / 2]` of the frequencies of a head of this width.

    >>> rope = {"rope_theta": 1e4, "factor": 8.0, **USUAL}
    >>> rope_divisors(rope, 8).tolist()
    [1.0, 1.0, 1.0, 4.68...]
    """
    import numpy as np

    waves = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, width, 2) / width)
    length = rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    kept = np.clip((length / waves - low) / (high - low), 0, 1)
    return (1 / ((1 - kept) / factor + kept)).astype(np.float32)


def rule_of(table: np.ndarray, theta: float) -> dict[str, Any] | None:
    """The `rope_parameters` that give a table, None for one of ones.

    Raises:
        MultiheadError: no such parameters give it.
    """
    import numpy as np

    table = table.astype(np.float64)
    factor = float(table.max())
    if np.allclose(table, 1):
        return None
    candidates = [USUAL]
    waves = 2 * math.pi * theta ** (np.arange(len(table)) / len(table))
    between = (table > 1 + 1e-4) & (table < factor * (1 - 1e-4))
    if between.sum() > 1:  # there the kept part is linear in the frequency
        kept = (1 / table[between] - 1 / factor) / (1 - 1 / factor)
        slope, start = np.polyfit(1 / waves[between], kept, 1)
        length = USUAL["original_max_position_embeddings"]
        low = -start * length / slope
        high = low + length / slope
        candidates.append({**USUAL, "low_freq_factor": low, "high_freq_factor": high})
    for candidate in candidates:
        rope = {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **candidate}
        if np.allclose(rope_divisors(rope, 2 * len(table)), table, rtol=1e-3):
            return rope
    raise MultiheadError(
        f"its table {TABLE} scales rotary frequencies in another way than Llama 3.1's, which"
        " transformers doesn't read from GGUF; take the model from a folder"
    )
