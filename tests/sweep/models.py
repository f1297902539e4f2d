"""Sweep over every model type of the installed transformers, tiny and random: is it read correctly,
or is the reason named?

    make sweep                                # all types; earlier results are kept in CACHE
    make sweep ARGS="llama qwen3_next --again"
    make sweep-pruning

Each model runs under `multihead.reading`, unpadded, padded on either side, packed, and in chunks
with a cache, and is compared with its own eager attention: the outputs, and the statistics of every
head from the weights that eager attention returned. `make sweep-pruning` removes a group of heads from
every layer instead, and compares the model with the one whose heads are zero. A worker process
does the work and is replaced where it dies or takes too long.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CACHE, PRUNED = Path("/tmp/multihead_sweep.json"), Path("/tmp/multihead_sweep_pruned.json")
ORDER = ("failed", "read", "refused", "no attention", "not built")


class Worker:
    """One process that judges model types, one after another."""

    def __init__(self, pruning: bool) -> None:
        path = os.pathsep.join(str(ROOT / folder) for folder in ("src", "tests"))
        environment = os.environ | {
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "sweep.models",
                "--worker",
                *["--pruning"] * pruning,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        self.pending = b""

    def judge(self, name: str, timeout: float) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{name}\n".encode())
        self.process.stdin.flush()
        end = time.monotonic() + timeout
        while b"\n" not in self.pending:
            left = end - time.monotonic()
            ready = left > 0 and select.select([self.process.stdout], [], [], left)[0]
            more = os.read(self.process.stdout.fileno(), 1 << 16) if ready else b""
            if not more:
                self.process.kill()
                self.process.wait()
                why = f"took more than {timeout:.0f} s" if not ready else "its process died"
                return {"type": name, "verdict": "not built", "reason": why}
            self.pending += more
        line, _, self.pending = self.pending.partition(b"\n")
        return dict(json.loads(line))

    @property
    def alive(self) -> bool:
        return self.process.poll() is None


def work(pruning: bool) -> None:
    """The worker: a name in, a line of JSON out."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what models print is nobody's answer
    from sweep import judge

    if pruning:
        from sweep import pruning as sweep_pruning

        judge.judge = sweep_pruning.judge

    for line in sys.stdin:
        try:
            found = judge.judge_type(line.strip())
        except Exception as error:  # a mistake of the script's own must not pass for a model's
            found = {
                "type": line.strip(),
                "verdict": "failed",
                "reason": f"the sweep: {type(error).__name__}: {error}",
                "trace": traceback.format_exc(),
            }
        answers.write(json.dumps(found) + "\n")
        answers.flush()


def sweep(
    names: list[str], timeout: float, *, again: bool, pruning: bool = False
) -> dict[str, dict[str, Any]]:
    cache = PRUNED if pruning else CACHE
    known: dict[str, dict[str, Any]] = json.loads(cache.read_text()) if cache.exists() else {}
    worker: Worker | None = None
    todo = [name for name in names if again or name not in known]
    for number, name in enumerate(todo, 1):
        if worker is None or not worker.alive:
            worker = Worker(pruning)
        known[name] = found = worker.judge(name, timeout)
        cache.with_suffix(".part").write_text(json.dumps(known, indent=1))
        cache.with_suffix(".part").replace(cache)
        print(
            f"{number}/{len(todo)} {name}: {found['verdict']} {found.get('reason', '')[:200]}",
            flush=True,
        )
    if worker is not None and worker.alive:
        worker.process.kill()
    return {name: known[name] for name in names}


GROUPS = (  # verdict, what its reason says, in words
    (
        "refused",
        "doesn't go through",
        "its attention doesn't go through transformers' attention interface",
    ),
    (
        "refused",
        "output projection|width of its heads",
        "a projection or a width that the table of families doesn't know",
    ),
    (
        "refused",
        "which multihead doesn't know",
        "it hands attention a keyword whose meaning isn't known",
    ),
    (
        "refused",
        "under reading than before",
        "its outputs under reading aren't those that it came with",
    ),
    ("refused", "", "what its heads give isn't what its projection takes"),
    ("not built", "ImportError", "it needs a package that wasn't there"),
    (
        "not built",
        "parameters|took more",
        "it is too large or too slow even with the smallest settings tried",
    ),
    ("not built", "", "no small settings or inputs were found that it runs with"),
)


def grouped(found: dict[str, dict[str, Any]]) -> dict[tuple[str, str], int]:
    """How many model types are refused or not built, and why."""
    counts: dict[tuple[str, str], int] = {}
    for one in found.values():
        why = next(
            (
                words
                for verdict, pattern, words in GROUPS
                if verdict == one["verdict"] and re.search(pattern, one.get("reason", ""))
            ),
            None,
        )
        if why is not None:
            counts[one["verdict"], why] = counts.get((one["verdict"], why), 0) + 1
    return counts


def page(found: dict[str, dict[str, Any]], version: str) -> str:
    """docs/models.md."""
    counts = {verdict: sum(f["verdict"] == verdict for f in found.values()) for verdict in ORDER}
    lines = [
        "# Which models can be read",
        "",
        (f"Written by `make sweep` against transformers {version}: every model type that has"),
        (
            "a base model, built tiny with large random weights and run under `multihead.reading`."
            " **Read** means that its outputs"
        ),
        (
            "and every statistic of every head equal those computed from the weights that its own"
            " eager attention stored: without"
        ),
        (
            "padding, padded on either side, with packed positions, and piece by piece with a"
            " cache, as far as it takes these."
        ),
        (
            "**Refused** means that a reading stops with the message given here, before it says"
            " anything wrong; **not built**, that"
        ),
        (
            "the script couldn't make such a model tiny or found no inputs for it, which says"
            " nothing about reading it."
        ),
        "",
        "| result | model types |",
        "| --- | --- |",
        *(f"| {verdict} | {counts[verdict]} |" for verdict in ORDER),
        "",
        "Those that are refused or weren't built, by reason:",
        "",
        "| result | reason | model types |",
        "| --- | --- | --- |",
        *(
            f"| {verdict} | {why} | {count} |"
            for (verdict, why), count in sorted(grouped(found).items())
        ),
        "",
        (
            "\"Sites read\" are attention modules; those of a part that the whole's inputs didn't"
            " reach (a picture's encoder) were"
        ),
        (
            'read alone where inputs for it were found. "Cache" in the runs is the text in pieces'
            " with a cache, compared with the"
        ),
        (
            "text at once. The remarks name what in a model isn't read: linear attention, state"
            " space layers, its own attention."
        ),
        "",
        "| model type | class | result | sites read | kinds | runs compared | remarks |",
        "| --- " * 7 + "|",
    ]
    for name, one in sorted(found.items()):
        remarks = "; ".join([x for x in [one.get("reason", "")] if x] + one.get("notes", []))
        sites = f"{one['reached']} of {one['sites']}" if one.get("sites") else ""
        lines.append(
            f"| {name} | {one.get('class', '')} | {one['verdict']} | {sites} |"
            f" {', '.join(one.get('kinds', []))} | {', '.join(one.get('runs', []))} |"
            f" {_cell(remarks)} |"
        )
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    text = " ".join(text.replace("|", "/").split())
    return text if len(text) <= 400 else text[:397] + "..."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="model types; all by default")
    parser.add_argument("--write", type=Path, help="write the table of all results to this file")
    parser.add_argument("--again", action="store_true", help="judge again what was found before")
    parser.add_argument("--timeout", type=float, default=60, help="seconds a model type may take")
    parser.add_argument("--pruning", action="store_true", help="prune instead of reading")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        work(chosen.pruning)
        return 0
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    unknown = set(chosen.names) - set(MODEL_MAPPING_NAMES)
    if unknown:
        parser.error(
            f"{sorted(unknown)} aren't among transformers' {len(MODEL_MAPPING_NAMES)} model types;"
            " expected names such as llama or qwen3_next, as in transformers' MODEL_MAPPING_NAMES"
        )
    os.nice(5)
    found = sweep(
        chosen.names or sorted(MODEL_MAPPING_NAMES),
        chosen.timeout,
        again=chosen.again,
        pruning=chosen.pruning,
    )
    for verdict in ORDER:
        print(f"{verdict}: {sum(f['verdict'] == verdict for f in found.values())}")
    if chosen.write:
        everything = sweep(
            sorted(MODEL_MAPPING_NAMES), chosen.timeout, again=False, pruning=chosen.pruning
        )
        if chosen.pruning:
            from sweep.pruning import page as pruning_page

            chosen.write.write_text(pruning_page(everything, transformers.__version__))
        else:
            chosen.write.write_text(page(everything, transformers.__version__))
    return 1 if any(f["verdict"] == "failed" for f in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
