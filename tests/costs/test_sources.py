"""What a cost is asked of: files, configs, models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import multihead
from multihead import cost


def numbers(found: multihead.costs.Cost) -> tuple[Any, ...]:
    return (
        found.parameters,
        found.prefill(),
        found.prefill(full=True),
        found.decode(),
        found.cache(),
        found.memory,
    )


def test_the_built_in_model_its_config_alone_and_the_model_itself(tmp_path: Path) -> None:
    found = cost(dtype="float32")
    model, _ = multihead.load_builtin()
    assert (
        numbers(cost(model)) == numbers(found) == numbers(cost(model.config))
    )  # in the dtype that it was loaded in
    assert sum(found.parameters.values()) == 4 * 4 * 192 * 192 and found.name == "built-in"
    (tmp_path / "any.json").write_text(json.dumps(model.config.to_dict()))
    assert (
        numbers(cost(tmp_path / "any.json"))
        == numbers(found)
        == numbers(cost(model.config.to_dict()))
    )
