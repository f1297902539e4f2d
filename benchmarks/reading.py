"""Reading SmolLM2-135M (30 layers of 9 heads): time and memory against transformers' own passes over the same text.

Each way runs in a process of its own, so that peaks don't mix; times are taken in one process, in turns.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

GGUF = Path(__file__).resolve().parents[1] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
LENGTH = 1024
TURNS = 7
WAYS = ("plain", "reading", "eager")


def load(length: int) -> tuple[Any, dict[str, Any]]:
    """The model and so many tokens of Python's own documentation."""
    import pydoc_data.topics

    from multihead.models.loading import load as load_model

    if not GGUF.exists():
        sys.exit(f"{GGUF} is missing; run: python scripts/fetch_models.py")
    found = load_model(GGUF)
    words = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    ids = found.tokenizer(words[: 8 * length], return_tensors="pt").input_ids[:, :length]
    assert ids.shape[1] == length
    return found.model, {"input_ids": ids, "use_cache": False}


def way(name: str, model: Any, inputs: dict[str, Any]) -> Any:
    """One pass over the text; what comes out is thrown away, as a caller would."""
    import torch

    import multihead

    with torch.no_grad():
        if name == "plain":
            return model(**inputs).logits
        if name == "reading":
            with multihead.reading(model, verify=False) as reading:
                logits = model(**inputs).logits
            assert reading.table().count("norm").all()
            return logits
        if name == "reading, checked":
            with multihead.reading(model):
                return model(**inputs).logits
        model.set_attn_implementation("eager")
        out = model(**inputs, output_attentions=True)
        model.set_attn_implementation("sdpa")
        assert len(out.attentions) == model.config.num_hidden_layers
        return out.logits


def peak(name: str) -> None:
    """In a process of its own: the highest resident memory of one pass, in bytes, as JSON."""
    model, inputs = load(LENGTH)
    way("plain", model, {**inputs, "input_ids": inputs["input_ids"][:, :16]})  # libraries load and threads start
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of loading
    way(name, model, inputs)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(json.dumps(int(status["VmHWM"].split()[0]) * 1024))


def times(model: Any, inputs: dict[str, Any]) -> dict[str, float]:
    """Median seconds of each way, taken in turns."""
    names = ("plain", "reading", "reading, checked", "eager")
    taken: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(TURNS + 1):
        for name in names:
            start = time.perf_counter()
            way(name, model, inputs)
            if turn:  # the first turn warms up
                taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def whole(model: Any, inputs: dict[str, Any]) -> Callable[[], float]:
    """`multihead.read` as a user calls it: checks, probe and table included."""
    import multihead

    def run() -> float:
        start = time.perf_counter()
        multihead.read(model, [{"input_ids": inputs["input_ids"]}])
        return time.perf_counter() - start

    return run


def tables() -> Iterator[tuple[str, list[dict[str, str]], str]]:
    model, inputs = load(LENGTH)
    want, got = way("plain", model, inputs), way("reading, checked", model, inputs)
    assert (want - got).abs().max() <= 1e-4 * want.abs().max(), "reading changes the model's outputs: nothing is timed"
    seconds = times(model, inputs)
    run = whole(model, inputs)
    run()
    seconds["multihead.read"] = statistics.median(run() for _ in range(3))
    del model
    peaks = {name: json.loads(subprocess.run([sys.executable, __file__, name], check=True, capture_output=True,
                                             text=True).stdout.splitlines()[-1]) for name in WAYS}
    names = {
        "plain": "plain forward pass (sdpa)",
        "reading": "the same pass under `multihead.reading`: all statistics of 270 heads",
        "reading, checked": "its first input, which is also run as the model came",
        "multihead.read": "`multihead.read`: that, and the probe",
        "eager": "eager with `output_attentions`, no statistic computed yet",
    }
    rows = []
    for name, text in names.items():
        beyond = f"{(peaks[name] - peaks['plain']) / 2**30:.2f} GiB" if name in peaks and name != "plain" else ""
        rows.append({"way": text, "time": f"{seconds[name]:.2f} s", "time / plain": f"{seconds[name] / seconds['plain']:.2f}",
                     "memory beyond plain": beyond})
    yield (f"Reading SmolLM2-135M, float32, {LENGTH:,} tokens", rows,
           "Goals: at most 2.5 times the plain pass and 0.2 GiB beyond it. Medians of "
           f"{TURNS} turns; memory is the peak of a process of its own.")


if __name__ == "__main__":
    peak(sys.argv[1])
