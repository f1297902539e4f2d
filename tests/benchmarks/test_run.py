"""Every benchmark runs, at toy size: it checks its results and gives its tables."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.run import ALL

ROOT = Path(__file__).parents[2]
ROWS = {
    "layer": 1,
    "latent": 3,
    "grouped": 2,
    "replace": 2,
    "attention": 10,
    "quantized_cache": 14,
    "reading": 6,
    "command": 3,
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.run", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_runs_at_toy_size(name: str) -> None:
    done = run(name, "--toy")
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    headers = done.stdout.count("## ")
    assert headers and len(lines) - 2 * headers >= ROWS[name], done.stdout


def test_an_unknown_benchmark() -> None:
    done = run("laier", "--toy")
    assert done.returncode == 1 and "no benchmark laier" in done.stderr
