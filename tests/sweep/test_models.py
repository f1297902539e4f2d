"""The sweep's worker processes, its cache and its page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sweep import models


def test_the_script_outlives_models_that_take_too_long(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(models, "CACHE", tmp_path / "cache.json")
    found = models.sweep(["bert", "vit"], 0.2, again=False)
    assert {f["verdict"] for f in found.values()} == {"not built"}
    assert all("took more than" in f["reason"] for f in found.values())
    assert json.loads((tmp_path / "cache.json").read_text()).keys() == {"bert", "vit"}
    page = models.page(found, "5")
    assert "| not built | 2 |" in page and "| bert |" in page and "took more than 0 s" in page


def test_a_model_type_that_does_not_exist() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "sweep.models", "lama"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert run.returncode == 2 and "['lama'] aren't among transformers'" in run.stderr
