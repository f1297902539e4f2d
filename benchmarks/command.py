"""The README's first command as a whole process: built-in model, built-in text, table printed and
page written.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

TURNS = 5


def tables(toy: bool = False) -> Iterator[tuple[str, list[dict[str, str]], str]]:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "heads.html"
        ways = {
            "importing torch and a model of transformers": [
                "-c",
                "import torch; from transformers import LlamaForCausalLM",
            ],
            "`multihead read --page heads.html`": ["-m", "multihead", "read", "--page", str(page)],
            "`multihead --help`": ["-m", "multihead", "--help"],
        }
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(1 if toy else TURNS + 1):
            for name, arguments in ways.items():
                start = time.perf_counter()
                subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
                if turn or toy:  # the first turn warms the disk's cache
                    taken[name].append(time.perf_counter() - start)
        assert page.stat().st_size < 3_000_000
    seconds = {name: statistics.median(values) for name, values in taken.items()}
    peer = next(iter(seconds.values()))
    rows = [
        {"process": name, "time": f"{value:.2f} s", "time / imports alone": f"{value / peer:.2f}"}
        for name, value in seconds.items()
    ]
    yield (
        "The first command",
        rows,
        f"Goals: 60 s, and 0.5 s for `--help`. Medians of {TURNS} turns, whole processes.",
    )
