"""The tables and the picture of a cost."""

from __future__ import annotations

from typing import Any

import pytest
import transformers as tf

from multihead import cost


@pytest.mark.parametrize(
    "config",
    [
        tf.WhisperConfig(),
        tf.DeepseekV3Config(num_hidden_layers=4),
        tf.Gemma3TextConfig(),
        tf.GptOssConfig(num_hidden_layers=8),
        tf.BertConfig(),
        tf.CLIPConfig(),
    ],
    ids=lambda config: config.model_type,
)
def test_the_table_fits(config: Any) -> None:
    shown = str(cost(config, batch_size=64)).splitlines()
    assert max(len(line) for line in shown if not line.startswith("note")) <= 100
    assert ("no cache" in "\n".join(shown)) == (config.model_type in ("bert", "clip"))
