"""Runs the benchmarks and prints their tables: every figure is a ratio against a named peer in the
same run.

    OMP_WAIT_POLICY=passive python -m benchmarks.run            all of them
    OMP_WAIT_POLICY=passive python -m benchmarks.run reading    one
    ... --write docs/performance.md                             and keep the tables there
    ... --toy                                                   small sizes, in seconds

Threads that spin while they wait take the cores from what is timed beside them, so without
OMP_WAIT_POLICY=passive nothing is timed. Numbers are medians; nothing is timed before it was
checked to be right.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
import time
from pathlib import Path

ALL = (
    "layer",
    "latent",
    "grouped",
    "replace",
    "attention",
    "quantized_cache",
    "reading",
    "command",
)


def machine() -> str:
    """What the figures were measured on."""
    import torch
    import transformers

    processor = platform.processor() or platform.machine()
    for line in (
        Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    ):
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
    return (
        f"{time.strftime('%Y-%m-%d')}, {processor}, {torch.get_num_threads()} threads, Python"
        f" {platform.python_version()}, torch {torch.__version__}, transformers"
        f" {transformers.__version__}"
    )


def table(title: str, rows: list[dict[str, str]]) -> str:
    """A Markdown table."""
    names = list(rows[0])
    lines = [
        f"## {title}",
        "",
        "| " + " | ".join(names) + " |",
        "| " + " | ".join("---" for _ in names) + " |",
    ]
    return "\n".join([*lines, *("| " + " | ".join(row[n] for n in names) + " |" for row in rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=list(ALL), help=f"of {', '.join(ALL)}")
    parser.add_argument("--write", type=Path, help="Markdown file to write the tables to")
    parser.add_argument("--toy", action="store_true", help="small sizes, once each: a smoke test")
    arguments = parser.parse_args()
    if not arguments.toy and os.environ.get("OMP_WAIT_POLICY", "").lower() != "passive":
        sys.exit(
            "OMP_WAIT_POLICY isn't passive, so timings would be false; run: "
            "OMP_WAIT_POLICY=passive python -m benchmarks.run (make bench does)"
        )
    if unknown := set(arguments.names) - set(ALL):
        sys.exit(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(ALL)}")
    if not arguments.toy:
        from multihead.ops.backends import jit

        jit.compile_all()  # no process may compile while times are taken
    parts = [f"Measured {machine()}."]
    for name in arguments.names:
        module = importlib.import_module(f"benchmarks.{name}")
        for title, rows, notes in module.tables(toy=arguments.toy):
            parts.append(table(title, rows) + (f"\n\n{notes}" if notes else ""))
            print("\n" + parts[-1], flush=True)
    if arguments.write:
        arguments.write.write_text(
            "# Performance\n\nMade by `make bench`.\n\n" + "\n\n".join(parts) + "\n"
        )


if __name__ == "__main__":
    main()
