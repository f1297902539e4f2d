"""Run a fuzzer for as long as asked: `PYTHONPATH=tests python -m fuzz.run operator --minutes 120`.

Each case comes from a seed, so `--seed N --cases 1` repeats it. Cases run in a separate process,
which is started again if a case ends it; the last line gives how many cases ran, of which modes,
and the seeds of those that failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import subprocess
import sys
import time
import traceback
from collections import Counter

TARGETS = ("operator", "layers", "readings")
LIMIT = 300  # seconds after which a case counts as hanging


def work(target: str, seed: int, stop: int | None, seconds: float) -> None:
    """Run cases and print a line for each, "seed mode" or "seed ! error"."""
    run = importlib.import_module(f"fuzz.{target}").run
    end = time.monotonic() + seconds
    while time.monotonic() < end and (stop is None or seed < stop):
        print(f"> {seed}", flush=True)
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        try:
            print(f"= {seed} {run(seed)}", flush=True)
        except Exception as error:
            notes = " | ".join(getattr(error, "__notes__", ()))
            at = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {error} [{at.filename}:{at.lineno}] {notes}"
            print(f"! {seed} {' '.join(text.split())[:1500]}", flush=True)
        faulthandler.cancel_dump_traceback_later()
        seed += 1


def supervise(target: str, seed: int, stop: int | None, seconds: float) -> int:
    """Run the worker, again after a crash; print failures and a summary; return their number."""
    end, ran, failed = time.monotonic() + seconds, Counter[str](), []
    while (left := end - time.monotonic()) > 1 and (stop is None or seed < stop):
        command = [sys.executable, "-m", "fuzz.run", target, "--worker", "--seed", str(seed)]
        command += ["--minutes", str(left / 60)]
        command += [] if stop is None else ["--cases", str(stop - seed)]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert worker.stdout is not None
        current = seed
        for line in worker.stdout:
            kind, _, rest = line.partition(" ")
            number, _, text = rest.strip().partition(" ")
            if kind == ">":
                current = int(number)
            elif kind == "=":
                ran[text] += 1
            elif kind == "!":
                ran["failed"] += 1
                failed.append(current)
                print(f"{target} seed {number}: {text}", flush=True)
        if worker.wait() != 0:
            failed.append(current)
            ran["crashed"] += 1
            print(f"{target} seed {current}: ended the process ({worker.returncode})", flush=True)
        elif stop is None:
            break
        seed = current + 1
    modes = ", ".join(f"{name} {count:,}" for name, count in ran.most_common())
    print(f"{target}: {sum(ran.values()):,} cases ({modes}); failed {len(failed)}: {failed[:50]}")
    return len(failed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--cases", type=int, help="how many, at most")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    stop = None if given.cases is None else given.seed + given.cases
    if given.worker:
        work(given.target, given.seed, stop, 60 * given.minutes)
    else:
        sys.exit(supervise(given.target, given.seed, stop, 60 * given.minutes) > 0)


if __name__ == "__main__":
    main()
