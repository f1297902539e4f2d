"""Results of pruning, sharing and tuning as text for a terminal, and as a JSON report."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..io import write_text
from ..pruning.checkpoint import Written, is_gguf
from ..pruning.gqa import Shared
from ..pruning.job import Judgement, Outcome
from ..pruning.prune import Pruned
from ..pruning.pruner import Candidate
from ..terminal import Grid, Paragraph, Part, to_text

__all__ = ["evaluation_text", "outcome_text", "save_report"]


def save_report(report: Mapping[str, Any] | Judgement, path: Path) -> None:
    """Write a report as JSON."""
    data = report.to_json() if isinstance(report, Judgement) else report
    write_text(path, json.dumps(data, indent=1))


def outcome_text(outcome: Outcome) -> str:
    """The result of a job as text: the heads, the size, the measurements, and who loads it."""
    result = outcome.result
    parts: list[Part] = []
    if isinstance(result, Shared):
        parts += _shared(result)
    elif isinstance(result, Pruned):
        if result.candidates:
            parts += [*_candidates(result), ""]
        parts += _pruned(result)
    for name, judgement in outcome.judgements.items():
        begin = f"{name}, " if name.startswith("after") else ""
        parts += [f"{begin}{line}" if n == 0 else line for n, line in enumerate(_lines(judgement))]
    if outcome.saved is None:
        parts.append(f"a checkpoint of it (--save): {outcome.loads}")
    else:
        folder = outcome.saved.path.absolute()
        loads = "multihead.load loads it" if is_gguf(folder) else outcome.loads
        parts.append(f"wrote {folder} and loaded it again in a fresh process: {loads}")
        parts += _written(outcome.saved)
    return to_text(parts)


def evaluation_text(result: Judgement | Mapping[str, Any]) -> str:
    """The measure of one model, or of two with the interval of their difference."""
    if isinstance(result, Judgement):
        return "\n".join(_lines(result))
    lines = [f"{result['measure']}: {_number(result['value'])}"]
    if result["perplexity"] is not None:
        lines.append(f"perplexity: {result['perplexity']:.2f}")
    return "\n".join(lines)


def _shared(shared: Shared) -> list[Part]:
    before, after = shared.num_kv_heads
    size, left = shared.num_parameters
    errors = ", ".join(f"{label} {error:.1%}" for label, error in shared.errors.items())
    return [
        f"{before} key/value heads become {after} (method {shared.method}, choice"
        f" {shared.choice}): {_sizes(size, left)}",
        "relative squared error of each layer's output on the calibration text:",
        Paragraph(errors, indent=2),
    ]


def _pruned(pruned: Pruned) -> list[Part]:
    before, after = pruned.num_heads
    parts: list[Part] = [
        f"{before - after} of {before} heads removed ({pruned.plan.kind}; criterion"
        f" {pruned.criterion}, compensation {pruned.compensate}): {_sizes(*pruned.num_parameters)}"
    ]
    if pruned.unprunable:
        why = next(iter(pruned.unprunable.values()))
        parts.append(f"not pruned: {', '.join(pruned.unprunable)} ({why})")
    by_layer: dict[str, list[str]] = {}
    for label in pruned.plan.remove:
        layer, dot, head = label.rpartition(".H")
        by_layer.setdefault(layer or label, []).append(f"H{head}" if dot else "all heads")
    removed = "; ".join(f"{layer}: {' '.join(heads)}" for layer, heads in by_layer.items())
    return [*parts, Paragraph(removed, indent=2)]


def _candidates(pruned: Pruned) -> list[Part]:
    """The criteria in order of their loss, with random plans among them."""
    chosen = (pruned.criterion, pruned.compensate)
    names = ["criterion", "compensation", "heads", "loss", "increase", ""]
    rows = [_candidate(c, pruned.base_loss, chosen) for c in pruned.candidates]
    title = (
        f"{pruned.loss_name} on the held-out part of the calibration text, by criterion (unpruned:"
        f" {_number(pruned.base_loss)})"
    )
    return [Grid(names, rows, title, left=(0, 1, 5))]


def _candidate(candidate: Candidate, base: float, chosen: Sequence[str]) -> list[str]:
    note = ""
    if (candidate.criterion, candidate.compensate) == tuple(chosen):
        note = "<- chosen"
    elif candidate.criterion == "random" and candidate.spread:
        note = f"(mean of 10 plans, sd {_number(candidate.spread)})"
    return [
        candidate.criterion,
        candidate.compensate,
        str(len(candidate.plan.remove)),
        _number(candidate.loss),
        _number(candidate.loss - base, "+"),
        note,
    ]


def _lines(judgement: Judgement) -> list[str]:
    change = judgement.change
    before, after = _number(judgement.before), _number(judgement.after)
    text = f"{judgement.name}: {before} becomes {after} ({_number(change.mean, '+')}"
    if not math.isnan(change.low):
        interval = f"{_number(change.low, '+')} to {_number(change.high, '+')}"
        text += f", 95% interval {interval} over {change.documents:,} documents"
    lines = [f"{text})"]
    if judgement.perplexities is not None:
        a, b = judgement.perplexities
        lines.append(f"perplexity: {a:.2f} becomes {b:.2f} ({b / a:.3f} times)")
    return lines


def _written(written: Written) -> list[Part]:
    """The size on disk, the types of the weights, and the files that were left out."""
    before, after = written.bytes_on_disk
    sizes = f"weights on disk: {after:,} bytes"
    if before is not None:
        sizes = f"weights on disk: {before:,} bytes become {after:,} ({after / before - 1:+.1%})"
    types, stored = (", ".join(kinds) for kinds in written.stored_in)
    changed = f"{types} become {stored}" if types and set(types) != set(stored) else stored
    parts: list[Part] = [f"{sizes}, {changed}"]
    if written.has_code:
        parts.append(
            "with trust_remote_code=True and multihead installed, plain transformers opens it too,"
            " and what builds on it (pipelines, sentence-transformers)"
        )
    if written.left_out:
        named = "; ".join(f"{name} ({why})" for name, why in written.left_out.items())
        parts.append(Paragraph(f"left out: {named}"))
    return parts


def _number(x: float, sign: str = "") -> str:
    """Four decimals; of smaller numbers three digits."""
    return f"{x:{sign}.4f}" if x == 0 or not abs(x) < 1e-3 else f"{x:{sign}.2e}"


def _sizes(before: int, after: int) -> str:
    return f"{before:,} parameters become {after:,} ({after / before - 1:+.1%})"
