"""Each fuzzer for a third of a minute; `python -m fuzz.run` runs it for as long as asked."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import multihead
from fuzz import layers, operator, readings

TESTS = Path(__file__).parents[1]
CASES = {"operator": 500, "layers": 200, "readings": 25}


def search(target: str, seed: int, cases: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fuzz.run", target, "--seed", str(seed)]
    command += ["--cases", str(cases), "--minutes", "10"]
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths}
    return subprocess.run(
        command, cwd=TESTS.parent, env=environment, capture_output=True, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("target", CASES)
def test_no_case_fails(target: str) -> None:
    seed = 0 if os.environ.get("CI") else random.randrange(10**6)
    done = search(target, seed, CASES[target])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert f"{target}: {CASES[target]:,} cases" in done.stdout


def failures(run: Any, seeds: range) -> int:
    found = 0
    for seed in seeds:
        try:
            run(seed)
        except Exception:  # a wrong result, or one that stops the case
            found += 1
    return found


def test_a_lost_mask_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = multihead.attention

    def without(q: Any, k: Any, v: Any, mask: Any = None, **options: Any) -> Any:
        return attention(q, k, v, **options)

    monkeypatch.setattr(multihead, "attention", without)
    assert failures(operator.run, range(30)) > 5


def test_a_cache_that_forgets_its_first_key_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    update = multihead.Cache.update

    def forget(self: Any, k: Any, v: Any, valid: Any = None) -> Any:
        if self.length:
            with torch.no_grad():
                self._v = self._v.clone()
                self._v[:, :, 0] = 0
        return update(self, k, v, valid)

    monkeypatch.setattr(multihead.Cache, "update", forget)
    assert failures(layers.run, range(40)) > 3


def test_a_statistic_of_other_weights_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    value = multihead.Table.rows

    def shifted(self: Any) -> Any:
        rows = value(self)
        for row in rows:
            if row.get("entropy") is not None:
                row["entropy"] += 1e-2
        return rows

    monkeypatch.setattr(multihead.Table, "rows", shifted)
    assert failures(readings.run, range(2)) > 0
