"""Results of pruning and of an evaluation as text, and as a JSON report."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from multihead.pruning.job import Judgement
from multihead.pruning.losses import Difference
from multihead.report.pruned import evaluation_text, save_report

CHANGE = Difference(0.5, 0.25, 0.75, 12)


def test_a_difference_has_its_interval_and_perplexities() -> None:
    judgement = Judgement("token loss", 3.0, 3.5, CHANGE, perplexities=(20.0, 33.0))
    assert evaluation_text(judgement).splitlines() == [
        "token loss: 3.0000 becomes 3.5000 (+0.5000, 95% interval +0.2500 to +0.7500 over 12"
        " documents)",
        "perplexity: 20.00 becomes 33.00 (1.650 times)",
    ]


def test_one_document_has_no_interval() -> None:
    change = Difference(0.5, math.nan, math.nan, 1)
    assert evaluation_text(Judgement("size", 1.0, 1.5, change)) == (
        "size: 1.0000 becomes 1.5000 (+0.5000)"
    )


@pytest.mark.parametrize("perplexity", [None, 7.389])
def test_one_model(perplexity: float | None) -> None:
    text = evaluation_text({"measure": "token loss", "value": 2.0, "perplexity": perplexity})
    assert text.startswith("token loss: 2.0000")
    assert ("perplexity: 7.39" in text) == (perplexity is not None)


def test_a_report_is_json(tmp_path: Path) -> None:
    save_report(Judgement("token loss", 3.0, 3.5, CHANGE), tmp_path / "r.json")
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["interval"] == [0.25, 0.75] and found["documents"] == 12
