"""What `prune` and `share` have in common: a report in JSON, and files next to the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from multihead.pruning import result
from multihead.pruning.gqa import Shared
from multihead.pruning.plan import Plan
from multihead.pruning.prune import Pruned
from multihead.pruning.result import SmallerModel, count_parameters

PRUNED = Pruned(
    nn.Linear(2, 3), None, True, (20, 9), (4, 3), Plan(("L0.H1",)), "given", "refit", 2.5
)
SHARED = Shared(nn.Linear(2, 3), None, False, (20, 9), (8, 4), "mean", "similar", {"L0": 0.25})


@pytest.mark.parametrize(
    ("smaller", "files"), [(PRUNED, {"plan.json", "pruning.json"}), (SHARED, {"sharing.json"})]
)
def test_a_report_lies_next_to_the_weights(
    smaller: SmallerModel, files: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: dict[str, Any] = {}
    monkeypatch.setattr(
        result, "save", lambda model, tokenizer, out, **given: saved.update(given, out=out)
    )
    smaller.save(Path("it"))
    assert saved["out"] == Path("it") and saved["plain"] == smaller.loads_in_transformers
    assert set(saved["extra"]) == files
    report = smaller.to_json()
    assert json.loads(json.dumps(report)) == report and report["parameters"] == [20, 9]
    smaller.save(Path("it"), {"model": "mine"})
    assert {"model": "mine"} in saved["extra"].values()


def test_parameters_are_counted_once() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    assert count_parameters(model) == 9 + 8
    model[1].weight = nn.Parameter(model[0].weight.T.clone())
    model.append(model[0])
    assert count_parameters(model) == 9 + 8
