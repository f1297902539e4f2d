"""What pruning did, in words and tables for a terminal."""

from __future__ import annotations

import json
import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from ..io import write_text
from ..pruning.gqa import Shared

if TYPE_CHECKING:
    from ..pruning.job import Done, Judgement
    from ..pruning.prune import Pruned

__all__ = ["candidates_text", "judgement_text", "merged_text", "pruned_text", "tell"]


def tell(done: Done, file: Path | None) -> None:
    """Prints what was done, and writes it to `file` as JSON."""
    result = done.result
    if isinstance(result, Shared):
        print(merged_text(result))
    else:
        if result.candidates:
            print(candidates_text(result) + "\n")
        print(pruned_text(result))
    if done.judged is not None:
        print(judgement_text(done.judged))
    if done.tuned is not None:
        print(f"after {done.steps} steps of tuning, {judgement_text(done.tuned)}")
    print(
        f"a checkpoint of it (--out): {done.loads}"
        if done.out is None
        else f"wrote {done.out.absolute()} and loaded it again in a fresh process: {done.loads}"
    )
    if file is not None:
        write_text(file, json.dumps(done.report, indent=1))
        print(f"wrote {file}")


def merged_text(merged: Shared) -> str:
    """How many key/value heads are left, and how far each layer is from what it gave."""
    before, after = merged.num_kv_heads
    size, left = merged.num_parameters
    errors = ", ".join(f"{label} {error:.1%}" for label, error in merged.errors.items())
    lines = [
        (
            f"{before} key/value heads become {after} (method {merged.method}, choice"
            f" {merged.choice}): {size:,} parameters become {left:,} ({left / size - 1:+.1%})"
        ),
        "squared error of each layer's output on the calibration text, in proportion:",
    ]
    return "\n".join(
        [*lines, *textwrap.wrap(errors, 100, initial_indent="  ", subsequent_indent="  ")]
    )


def pruned_text(pruned: Pruned) -> str:
    """Which heads went, and how much smaller the model is."""
    before, after = pruned.num_heads
    size, left = pruned.num_parameters
    lines = [
        f"{before - after} of {before} heads taken out ({pruned.plan.kind}; criterion"
        f" {pruned.criterion}, compensation {pruned.compensate}): {size:,} parameters become"
        f" {left:,} ({left / size - 1:+.1%})"
    ]
    if pruned.unprunable:
        lines.append(
            f"stay whole: {', '.join(pruned.unprunable)} ({next(iter(pruned.unprunable.values()))})"
        )
    by_layer: dict[str, list[str]] = {}
    for label in pruned.plan.remove:
        layer, _, head = label.rpartition(".")
        by_layer.setdefault(layer or label, []).append(head)
    told = "; ".join(f"{layer}: {' '.join(heads)}" for layer, heads in by_layer.items())
    lines += textwrap.wrap(
        told, 100, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
    )
    return "\n".join(lines)


def candidates_text(pruned: Pruned) -> str:
    """All criteria side by side, with random plans, on the held-out part of the calibration
    text.
    """
    lines = [
        f"held-out loss a token, by how heads are chosen (whole model: {pruned.base_loss:.4f})",
        f"  {'criterion':<18} {'compensate':<10} {'heads':>5} {'loss':>9} {'more':>9}",
    ]
    for c in pruned.candidates:
        spread = f" (10 plans, sd {c.spread:.4f})" if c.criterion == "random" and c.spread else ""
        chosen = (
            "  <- chosen"
            if (c.criterion, c.compensate) == (pruned.criterion, pruned.compensate)
            else ""
        )
        lines.append(
            f"  {c.criterion:<18} {c.compensate:<10} {len(c.plan.remove):>5} {c.loss:>9.4f} "
            f"{c.loss - pruned.base_loss:>+9.4f}{spread}{chosen}"
        )
    return "\n".join(lines)


def judgement_text(judged: Judgement) -> str:
    change = judged.change
    text = f"{judged.name}: {judged.before:.4f} becomes {judged.after:.4f} ({change.mean:+.4f}"
    if not math.isnan(change.low):
        text += (
            f", 95% interval {change.low:+.4f} to {change.high:+.4f} over {change.documents:,}"
            " documents"
        )
    text += ")"
    if judged.perplexities is not None:
        before, after = judged.perplexities
        text += f"\nperplexity: {before:.2f} becomes {after:.2f} ({after / before:.3f} times)"
    return text
