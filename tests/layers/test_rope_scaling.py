"""Scaled frequencies are transformers'; a config.json's mapping is parsed as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from multihead.layers.rope_scaling import KEYS, parse_scaling, scaled_frequencies

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def test_none_and_empty_entries_count_as_absent() -> None:
    assert parse_scaling(None) == {"rope_type": "default"}
    parsed = parse_scaling({"type": "linear", "factor": 2.0, "beta_fast": None})
    assert parsed == {"rope_type": "linear", "factor": 2.0}
    assert set(KEYS) == {
        *("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional")
    }


@pytest.mark.parametrize("rotary_dim", [4, 10, 64])
def test_yarn_ramp_by_the_paper(rotary_dim: int) -> None:
    """Equations 17 to 22 of Peng et al. 2023, with ends at whole pairs."""
    import math

    theta = 10000.0
    frequencies, attention_factor = scaled_frequencies(rotary_dim, theta, "yarn", YARN)

    def pair(turns: float) -> float:
        return rotary_dim * math.log(64 / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair(32.0)), 0)
    high = min(math.ceil(pair(1.0)), rotary_dim - 1)
    high = high + 0.001 if low == high else high
    for p, got in enumerate(frequencies):
        plain = theta ** (-2 * p / rotary_dim)
        scaled = min(max((p - low) / (high - low), 0.0), 1.0)
        assert got == pytest.approx(plain * (1 - scaled) + plain / 4.0 * scaled, rel=1e-6), p
    assert attention_factor == pytest.approx(0.1 * math.log(4.0) + 1.0)


def test_frequencies_are_exact_in_float32_and_repeat() -> None:
    frequencies, _ = scaled_frequencies(16, 1e4, "linear", {"factor": 3.0})
    as_float32 = torch.tensor(frequencies, dtype=torch.float32)
    assert as_float32.tolist() == list(frequencies)
    with torch.device("meta"):  # a model that is created without memory
        assert scaled_frequencies(16, 1e4, "linear", {"factor": 3.0})[0] == frequencies


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_type": "YARN"}, ["did you mean 'yarn'?"]),
        ({"betafast": 3.0}, ["'betafast'", "did you mean 'beta_fast'?"]),
        ({"factor": None}, ["lacks 'factor'"]),
        ({"beta_slow": 40.0}, ["must be at most scaling['beta_fast']=32.0"]),
    ],
)
def test_messages(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        parse_scaling(YARN | change)
    assert all(word in str(caught.value) for word in words), str(caught.value)
