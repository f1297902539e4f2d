"""The check itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from . import caches, numerics, properties
from .bugs import BUGS
from .discover import find_subject
from .facts import Facts, Finding, NotApplicable, Property
from .recompute import Recomputed, recompute
from .report import Report

__all__ = ["check"]

# What is asked of everything, in this order; the names are those of the report.
PROPERTIES: dict[str, Property] = {
    "finite outputs": properties.finite,
    "causality": properties.causality,
    "independent batch elements": properties.batch,
    "order of tokens": properties.order,
    "weights of a row sum to one": properties.whole,
    "independent rows": properties.rows,
    "masks hide": properties.masks,
    "padding": properties.padding,
    "rows without a key": properties.hidden_rows,
    "cache and full pass": caches.cached,
    "weights asked for": numerics.asked_weights,
    "gradients": numerics.gradients,
    "no dropout in evaluation": numerics.dropout,
    "inputs that aren't contiguous": numerics.strides,
    "large scores": numerics.large_scores,
    "half precision": numerics.half,
}
# True differences that modules of libraries have, and why they are no bugs there.
KNOWN = {
    ("torch", "masked rows that give NaN"): (
        "nn.MultiheadAttention gives NaN where a row has no key to read, by its "
        "definition; keep "
        "one key for every row, or use an operator that gives zeros (multihead.layers.from_torch)."
    ),
    (
        "timm",
        "masked rows that give NaN",
    ): "timm adds -inf where a mask hides; its own masks leave every row a key.",
    ("transformers", "leak where everything is masked"): (
        "transformers' eager attention hides with the lowest finite number, so that a row without a"
        " key reads all keys evenly. Such rows are those of padding, and nobody reads what they"
        " give."
    ),
    ("transformers", "masked rows that give NaN"): (
        "transformers never hides all keys with -inf: its own masks use the lowest "
        "finite "
        "number, and rows without a key are those of padding."
    ),
    (
        "transformers",
        "W_O missing",
    ): "This class leaves its output projection to its parent (BERT's is in output.dense).",
    (
        "transformers",
        "not contiguous inputs",
    ): "GPT-2's Conv1D views its input; a model's residual stream is contiguous.",
    ("keras", "leak where everything is masked"): (
        "Keras hides with a large finite number, so that a row without a key reads all "
        "keys evenly; mask such rows' outputs."
    ),
}


FOLLOWS_DROPOUT = {
    "tokens and heads mixed",
    "weights don't sum to one",
    "padding changes real tokens",
    "not contiguous inputs",
    "cache differs from the full pass",
    "results depend on whether weights are asked for",
    "half-precision softmax overflow",
    "softmax over the wrong axis",
    "leak where everything is masked",
}


def check(
    target: Any,
    *,
    causal: bool | None = None,
    heads: int | None = None,
    scale: float | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Report:
    """Judge whether attention that somebody wrote is right: a module, a function or an object, in
    torch or NumPy.

    First by what must hold of any attention (causality, order, batch, gradients, caches, ...);
    then, where its projections can be read, by recomputing its output. Where that differs, each
    known bug is put into the definition until one reproduces the
    output: then it is named with certainty. Works on a copy with large random weights, so that a
        bug shows; seeds are fixed.

    Args:
        target: an `nn.Module` that takes x `[B, L, D]`, or q, k, v; or a function of them, also by
            heads `[B, H, L, E]`, also in NumPy, also of one text `[L, D]`.
        causal: whether it should hide later tokens. Found out unless given, so that a mask that is
            missing altogether can be found only where it's given.
        heads: number of query heads, where no attribute such as num_heads says it.
        scale: what scores are multiplied with, where that isn't meant to be 1 / sqrt(E).
        arguments: further arguments, by name, for every call.

    Returns:
        A `Report`: true where all held; `findings`, what is wrong; printed, all of it in words.

    Raises:
        ValueError: it can't be called, with what is missing, or it isn't attention.

    >>> report = check(torch.nn.functional.scaled_dot_product_attention)
    >>> report.ok, report.bugs
    (True, set())
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad(), _one_thread():
        subject = find_subject(target, arguments or {}, heads)
        facts = Facts(
            subject, causal, subject.module if subject.module is not None else subject.function
        )
        report = Report(subject.name, _called(facts))
        found: list[Finding] = []
        for name, ask in PROPERTIES.items():
            try:
                wrong = ask(facts)
            except NotApplicable as why:
                report.skipped[name] = str(why)
                continue
            for finding in wrong:
                finding.by.append(name)
            found += wrong
            if not wrong:
                report.held.append(name)
        seen = {f.bug for f in found}
        bugs = (
            [b for b in BUGS if b.change.get("axis") == "batch"]
            if "batch elements influence each other" in seen
            else BUGS
        )
        again = recompute(facts, scale, () if "dropout active in evaluation" in seen else bugs)
    _conclude(report, found, again, facts)
    return report


@contextmanager
def _one_thread() -> Iterator[None]:
    """Hundreds of small calls: threads that wait for each other would take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _called(facts: Facts) -> str:
    s = facts.subject
    heads = f", {s.heads} heads" if s.heads else ""
    how = {
        "self": "f(x)",
        "cross": "f(q, k, v)",
        "memory": "f(x, memory)",
        "heads": "f(q, k, v), by heads",
    }[s.form]
    more = [f"masks as {m.words}" for m in (s.mask, s.padding) if m] + [
        f"{f}=True" for f in (s.causal_flag, s.weights_flag) if f
    ]
    said = "causal" if facts.by_itself else "not causal by itself"
    return (
        f"{how} with {s.layout}, width {s.width}{heads}{', in NumPy' if s.numpy else ''}, "
        f"{str(s.dtype).removeprefix('torch.')}; " + (f"{'; '.join(more)}; " if more else "") + said
    )


def _conclude(report: Report, found: list[Finding], again: Recomputed, facts: Facts) -> None:
    """One finding a bug: what the definition names explains what properties saw of it."""
    named = again.findings
    explained = {
        f.bug: {e for b in BUGS if b.name == f.bug for e in (*b.explains, b.name)} for f in named
    }
    left: list[Finding] = []
    dropping = any(f.bug == "dropout active in evaluation" for f in found)
    overflows = next((f for f in found if f.bug == "softmax overflows"), None)
    for finding in found:
        if dropping and finding.bug in FOLLOWS_DROPOUT:
            report.notes.append(
                f"{finding.bug}: seen too, but dropout alone would do that; take it out and check"
                " again"
            )
            continue
        if overflows is not None and finding.bug == "half-precision softmax overflow":
            overflows.by += finding.by
            continue
        cause = next(
            (f for f in named if finding.bug == f.bug or finding.bug in explained[f.bug]), None
        )
        if cause is None:
            same = next((f for f in left if f.bug == finding.bug), None)
            if same is None:
                left.append(finding)
            else:
                same.by += finding.by
        else:
            cause.by += finding.by
    for finding in [*named, *left]:
        finding.known = KNOWN.get((facts.subject.library or "", finding.bug), "")
        (report.known if finding.known else report.findings).append(finding)
    if again.scenes and not named:
        words = (
            f" ({again.reading.words}; {again.spec.heads} heads)"
            if again.reading and again.spec
            else ""
        )
        report.held.append(f"recomputed by the definition, {', and '.join(again.scenes)}{words}")
    if again.note:
        report.notes.append(again.note)
    if (
        again.reading is not None
        and again.spec is not None
        and not again.spec.output
        and again.spec.heads > 1
    ):
        finding = Finding(
            "W_O missing",
            "The heads' outputs are handed out side by side: no output projection was found, and "
            "the "
            "output is reproduced without one.",
            "any",
            "After merging, one more Linear over all heads: return self.out_proj(merged).",
            by=["the definition"],
        )
        finding.known = KNOWN.get((facts.subject.library or "", finding.bug), "")
        (report.known if finding.known else report.findings).append(finding)
