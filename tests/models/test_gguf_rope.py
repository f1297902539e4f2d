"""Rotary frequencies that are scaled as Llama 3.1's, in transformers' rule and in GGUF's table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from multihead.models.gguf_rope import USUAL, rope_divisors, rule_of

RULES: list[dict[str, Any]] = [
    {"factor": 8.0, **USUAL},
    {"factor": 32.0, **USUAL},
    {**USUAL, "factor": 4.0, "high_freq_factor": 8.0, "original_max_position_embeddings": 1024},
]


@pytest.mark.parametrize("rule", RULES)
def test_the_table_is_that_of_transformers(rule: dict[str, Any]) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, **rule}
    config = tf.LlamaConfig(head_dim=64, rope_parameters=rope, max_position_embeddings=1 << 17)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    whole = 5e5 ** -(np.arange(0, 64, 2) / 64)
    table = rope_divisors(rope, 64)
    np.testing.assert_allclose(whole / scaled.numpy(), table, rtol=1e-5)
    found = rule_of(table, 5e5)
    assert found is not None and found["rope_type"] == "llama3"
    np.testing.assert_allclose(rope_divisors(found, 64), table, rtol=1e-3)
    if rule["high_freq_factor"] == 4:
        assert found == rope


def test_tables_of_ones_and_of_anything() -> None:
    assert rule_of(np.ones(32, dtype=np.float32), 1e4) is None
    with pytest.raises(ValueError, match="scales rotary frequencies in another way than Llama 3"):
        rule_of(np.linspace(1, 9, 32), 1e4)
