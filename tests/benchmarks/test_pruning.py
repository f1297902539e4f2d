"""The benchmark of pruning runs at toy size: every job, and the tables of what was measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_runs_at_toy_size() -> None:
    command = [sys.executable, "-m", "benchmarks.pruning", "--toy"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for row in ("| uniform | taylor |", "| taylor |", "| random |", "| 1 | svd refit |", "| cache"):
        assert row in done.stdout, f"no row {row}\n{done.stdout}"


def test_an_unknown_job() -> None:
    command = [sys.executable, "-m", "benchmarks.pruning", "lossses"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "expected one or several of chosen, losses" in done.stderr
