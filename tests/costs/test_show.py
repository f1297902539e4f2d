"""The tables and the picture of a cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers as tf

from multihead import cost
from multihead.costs.show import format_bytes, format_operations


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
def test_the_tables_fit(config: Any) -> None:
    shown = str(cost(config, batch_size=64)).splitlines()
    assert max(len(line) for line in shown if not line.startswith("note")) <= 100
    assert ("no cache" in "\n".join(shown)) == (config.model_type in ("bert", "clip"))


def test_every_kind_of_module_has_a_row() -> None:
    config = tf.Gemma3TextConfig(num_hidden_layers=6, sliding_window=512)
    shown = str(cost(config, context_length=1000)).splitlines()
    rows = [line.split() for line in shown[3:5]]
    assert rows[0][:5] == ["L0-L4", "5", "8/4", "x", "256"] and rows[0][5:7] == ["window", "512"]
    assert rows[1][:6] == ["L5", "1", "8/4", "x", "256", "before"]
    assert any(line.endswith("until windows are full") for line in shown)


def test_numbers_are_aligned_right_and_in_units() -> None:
    shown = str(cost(embed_dim=512, num_heads=8, num_kv_heads=2, num_layers=3))
    assert "parameters     in all\nquery         786,432  40.0%" in shown
    assert "prefill, every pair (eager)      16.11 GFLOP" in shown
    assert [format_bytes(2**n) for n in (0, 10, 45)] == ["1 B", "1.00 KiB", "32.00 TiB"]
    assert [format_operations(n) for n in (7, 1e19)] == ["7 FLOP", "1e+04 PFLOP"]


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "cost.svg"
    cost(embed_dim=64, num_heads=8, num_kv_heads=2).plot(path)
    text = path.read_text()
    assert text.lstrip().startswith("<?xml") and [p.name for p in tmp_path.iterdir()] == [path.name]
