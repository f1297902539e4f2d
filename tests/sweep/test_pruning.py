"""The sweep over model types, pruned: which plain transformers loads is measured."""

from __future__ import annotations

from typing import Any

import pytest

from sweep import judge, pruning


@pytest.mark.parametrize(
    ("name", "plain", "against", "uneven"),
    [
        ("llama", "some numbers", "not with 7: The hidden size (48) is not a multiple", "no"),
        ("qwen2", "yes", "", "no"),
        ("laguna", "yes", "", "yes"),  # a list of numbers by layer
        ("t5", "no", "T5Config makes encoder.block.0.layer.0.SelfAttention.relative", "no"),
        ("bert", "no", "hidden_size 48 is not a multiple of 5 heads", "no"),
    ],
)
def test_which_plain_transformers_loads(
    monkeypatch: Any, name: str, plain: str, against: str, uneven: str
) -> None:
    monkeypatch.setattr(judge, "judge", pruning.judge)
    found = judge.judge_type(name)
    assert found["verdict"] == "read"
    assert (found["plain"], found["uneven"]) == (plain, uneven)
    assert found["against"].startswith(against) and bool(against) == bool(found["against"])
    page = pruning.page({name: found}, "5")
    assert f"| {plain} | 1 |" in page and f"| {name} | {plain}" in page
