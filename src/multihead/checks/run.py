"""`check`: test the properties, recompute the output, and merge what they find into a report."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import MultiheadError
from .bugs import BUGS, Bug
from .callee import Callee
from .code_names import is_called_causal
from .discover import find_callee
from .facts import Facts
from .finding import DEFINITION, BugName, Finding, NotApplicable, NotJudged
from .judge import judge_weights
from .properties import PROPERTIES, Property
from .readout import CannotRead
from .recompute import Recomputed, recompute, right_scales
from .report import CallWeights, Report
from .signature import NotAttention
from .unexplained import find_reasons, has_projections, to_finding
from .weights import read_calls

__all__ = ["check"]

# Differences that modules of libraries have on purpose, by library and bug, and the reason.
KNOWN = {
    ("torch", BugName.EMPTY_ROW_NAN): (
        "nn.MultiheadAttention gives NaN where a query has no key, by its definition; leave every"
        " query a key, or use an operator that gives zeros (multihead.layers.from_torch)."
    ),
    ("timm", BugName.EMPTY_ROW_NAN): (
        "timm adds -inf where a mask hides; its own masks leave every query a key."
    ),
    ("transformers", BugName.EMPTY_ROW_LEAKS): (
        "transformers' eager attention hides with the lowest finite number, so that a query without"
        " a key reads all keys evenly. Such queries are padding, and their outputs aren't used."
    ),
    ("transformers", BugName.EMPTY_ROW_NAN): (
        "transformers never hides all keys with -inf: its own masks use the lowest finite number,"
        " and queries without a key are padding."
    ),
    ("transformers", BugName.NO_OUTPUT): (
        "This class leaves its output projection to its parent (BERT's is in output.dense)."
    ),
    ("transformers", BugName.STRIDES): (
        "GPT-2's Conv1D views its input; a model's residual stream is contiguous."
    ),
    ("keras", BugName.EMPTY_ROW_LEAKS): (
        "Keras hides with a large finite number, so that a query without a key reads all keys"
        " evenly; mask the outputs of such queries."
    ),
}
# Findings that random dropout causes by itself.
FOLLOWS_DROPOUT = {
    BugName.MIXED,
    BugName.NOT_NORMALISED,
    BugName.PADDING_LEAKS,
    BugName.STRIDES,
    BugName.CACHE,
    BugName.WEIGHTS_FLAG,
    BugName.HALF,
    BugName.AXIS,
    BugName.EMPTY_ROW_LEAKS,
}


def check(
    target: Any,
    *,
    causal: bool | None = None,
    num_heads: int | None = None,
    scale: float | None = None,
    arguments: Mapping[str, Any] | None = None,
    strict: bool = False,
    bugs: Sequence[Bug] = (),
    properties: Sequence[Property] = (),
) -> Report:
    """Check an attention implementation: a module, function or object, in torch or NumPy.

    First the properties that hold for any attention are tested (causality, order, batch, gradients,
    caches, ...). Then, where its projections can be read, the output is recomputed. Where it
    differs, each known bug is put into the definition until one reproduces the output: that one is
    certain. The check works on a copy with large random weights, so that a bug shows; seeds are
    fixed.

    Args:
        target: an `nn.Module` that takes x `[B, L, D]`, or q, k, v; or a function of them, also by
            heads `[B, H, L, E]`, also in NumPy, also of one sequence `[L, D]`.
        causal: whether it should hide later tokens. Inferred unless given; a causal mask that is
            missing altogether is found only if `causal=True`, or where the name of the class or
            function has "causal".
        num_heads: number of query heads, where no attribute such as num_heads states it.
        scale: factor of the scores, where that isn't meant to be 1 / sqrt(E).
        arguments: further arguments, by name, for every call.
        strict: whether policies that are a matter of taste are defects too, rather than notes: what
            a query without a key gives, and what True means in an `attention_mask`.
        bugs: further bugs to look for.
        properties: further properties to test.

    Returns:
        A `Report`, with the `verdict` "right" (its `ok` is True), "wrong" (False; `findings` lists
        the bugs) or "partly judged" (None; `unjudged` lists what wasn't judged).

    Raises:
        MultiheadError: it can't be called, with what is missing, or it isn't attention.

    >>> report = check(torch.nn.functional.scaled_dot_product_attention)
    >>> report.ok, report.bugs
    (True, set())
    """
    for name, value in (("num_heads", num_heads), ("scale", scale)):
        if value is not None and not 0 < value < torch.inf:
            raise MultiheadError(f"{name}={value}: expected a number above 0, or leave it out")
    with _undisturbed():
        _check_division(target, num_heads)
        try:
            callee = find_callee(target, arguments or {}, num_heads)
        except NotAttention as error:
            if not has_projections(target):
                raise
            return _report_fixed(target, error)
        code = callee.module if callee.module is not None else callee.function
        by_name = causal is None and _is_causal_by_name(callee)
        facts = Facts(callee, True if by_name else causal, code)
        report = Report(callee.name, _describe_call(facts))
        findings = _test_properties(facts, (*PROPERTIES, *properties), report)
        known_bugs = (*bugs, *BUGS)
        names = {finding.bug for finding in findings}
        first_bugs: Sequence[Bug] | None = None
        if BugName.DROPOUT in names:
            first_bugs = ()
        elif BugName.BATCH in names:
            first_bugs = [bug for bug in known_bugs if bug.crosses_batch]
        try:
            recomputed = recompute(facts, scale, known_bugs, first_bugs)
        except Exception as error:
            recomputed = Recomputed(note=f"recomputing its output failed ({_summarize(error)})")
        if recomputed.note and not (names & {BugName.DROPOUT, BugName.BATCH}):
            _judge(facts, scale, recomputed, report)
        if any(re.search("with (a bias by|ALiBi)", line) for line in report.passed):
            # The order matters by a bias that was read out: no tokens are mixed.
            findings = [f for f in findings if f.found_by != ["token order"]]
        is_open = recomputed.match is None and (recomputed.note or report.unjudged)
        has_failed = " failed (" in f"{recomputed.note} {' '.join(report.unjudged)}"
        if (
            is_open
            and not has_failed
            and not findings
            and not recomputed.findings
            and not recomputed.explained  # by a pattern that the weights have exactly
            and not find_reasons(facts)
        ):
            what = recomputed.note or report.unjudged.pop()
            recomputed.note = ""
            recomputed.findings.append(to_finding(facts, what[0].upper() + what[1:]))
    _conclude(report, findings, recomputed, known_bugs, callee.library or "", strict)

    def read() -> list[CallWeights]:
        with _undisturbed():
            try:
                return read_calls(facts, recomputed.match, scale, is_wrong=bool(report.findings))
            except Exception as error:
                why = f"reading out its weights failed ({_summarize(error)})"
                return [CallWeights("with its inputs alone", None, None, why, why)]

    report.read_calls = read
    return report


def _check_division(target: Any, num_heads: int | None) -> None:
    """Raise an error if no matrix of a module divides into `num_heads`: then it's a slip."""
    if num_heads is None or not isinstance(target, torch.nn.Module):
        return
    sizes = sorted({n for p in target.parameters() if p.ndim > 1 for n in p.shape})
    if sizes and all(n % num_heads for n in sizes):
        raise MultiheadError(
            f"num_heads={num_heads}: none of its matrices divides into so many heads, they have"
            f" {', '.join(map(str, sizes[:6]))} rows or columns. Give another number, or leave it"
            " out where an attribute states it"
        )


def _is_causal_by_name(callee: Callee) -> bool:
    """Whether the name has "causal", and no argument or attribute may switch that on or off."""
    by_argument = {"mask", "causal"} & set(callee.roles.values())
    if callee.library is not None or callee.form != "self" or by_argument:
        return False
    attributes = getattr(callee.module, "__dict__", {})
    is_off = any("causal" in n and v is False for n, v in attributes.items())
    return is_called_causal(callee.name) and not is_off


def _report_fixed(target: Any, error: Exception) -> Report:
    """The report of a module with projections, and no weights that depend on its input."""
    report = Report(type(target).__name__, "f(x)")
    look = "Whether q k' reaches the softmax, and its weights the values."
    report.findings.append(Finding(BugName.FIXED, str(error), "any", look, ["calling it"]))
    return report


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Without gradients and effects on torch's generator, and with one thread: in hundreds of small
    calls, threads mostly wait for each other.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            yield
    finally:
        torch.set_num_threads(num_threads)


def _judge(facts: Facts, scale: float | None, recomputed: Recomputed, report: Report) -> None:
    """Judge what the definition doesn't reproduce by the weights that can be read out."""
    try:
        judged = judge_weights(facts, right_scales(facts, scale))
    except CannotRead as reason:
        recomputed.note += f"; its weights can't be read out: {reason}"
        return
    except Exception as error:
        recomputed.note += f"; reading out its weights failed ({_summarize(error)})"
        return
    names = {finding.bug for finding in recomputed.findings}
    recomputed.findings += [f for f in judged.findings if f.bug not in names]
    if judged.passed:
        report.passed.append(f"weights were read out: {', '.join(judged.passed)}")
    report.unjudged += judged.unjudged
    recomputed.explained |= judged.explained
    recomputed.note = ""


def _test_properties(facts: Facts, properties: Sequence[Property], report: Report) -> list[Finding]:
    findings: list[Finding] = []
    for each in properties:
        try:
            contradictions = each.test(facts)
        except NotApplicable as reason:
            report.skipped[each.name] = str(reason)
            continue
        except NotJudged as reason:
            report.unjudged.append(f"{each.name}: {reason}")
            continue
        except Exception as error:
            report.unjudged.append(f"{each.name}: the test of it failed ({_summarize(error)})")
            continue
        for finding in contradictions:
            finding.found_by.append(each.name)
        findings += contradictions
        if not contradictions:
            report.passed.append(each.name)
    return findings


def _summarize(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _describe_call(facts: Facts) -> str:
    callee = facts.callee
    forms = {
        "self": "f(x)",
        "cross": "f(q, k, v)",
        "memory": "f(x, memory)",
        "heads": "f(q, k, v), by heads",
    }
    parts = [f"{forms[callee.form]} with {callee.layout}", f"D={callee.embed_dim}"]
    parts += [f"{callee.num_heads} heads"] if callee.num_heads else []
    parts += ["in NumPy"] if callee.numpy else []
    parts.append(str(callee.dtype).removeprefix("torch."))
    options = [f"masks as {m.description}" for m in (callee.mask, callee.padding) if m]
    options += [f"{flag}=True" for flag in (callee.causal_flag, callee.weights_flag) if flag]
    options.append("causal" if facts.is_causal else "not causal by itself")
    return "; ".join([", ".join(parts), *options])


def _conclude(
    report: Report,
    findings: list[Finding],
    recomputed: Recomputed,
    bugs: Sequence[Bug],
    library: str,
    strict: bool,
) -> None:
    """One finding a bug: a bug that the definition names explains what properties found of it."""
    named = recomputed.findings
    explained = {
        f.bug: {f.bug, *(name for bug in bugs if bug.name == f.bug for name in bug.explains)}
        for f in named
    }
    has_dropout = any(f.bug == BugName.DROPOUT for f in findings)
    overflow = next((f for f in findings if f.bug == BugName.OVERFLOW), None)
    others: list[Finding] = []
    for finding in findings:
        if has_dropout and finding.bug in FOLLOWS_DROPOUT:
            report.notes.append(
                f"{finding.bug}: found too, but dropout alone causes it; remove it, then check"
            )
            continue
        if (pattern := recomputed.explained.get(finding.bug)) is not None:
            report.notes.append(f"{finding.bug}: follows from {pattern}")
            continue
        causes = [f for f in named if finding.bug in explained[f.bug]]
        causes += [f for f in others if f.bug == finding.bug]
        if overflow is not None and finding.bug == BugName.HALF:
            causes = [overflow]
        if causes:
            causes[0].found_by += finding.found_by
        else:
            others.append(finding)
    match = recomputed.match
    if recomputed.calls and not named:
        calls = ", and ".join(recomputed.calls)
        by = f" ({match.description})" if match and match.description else ""
        report.passed.append(f"recomputed by the definition, {calls}{by}")
    report.unjudged += [note for note in (recomputed.note, *recomputed.unjudged) if note]
    all_findings = [*named, *others]
    if match and match.assignment and match.definition.num_heads > 1 and match.assignment.o is None:
        all_findings.append(
            Finding(
                BugName.NO_OUTPUT,
                "The heads' outputs are returned concatenated: no output projection was found, and"
                " the output is reproduced without one.",
                "any",
                "After merging, one more Linear over all heads: return self.out_proj(merged).",
                [DEFINITION],
            )
        )
    for finding in all_findings:
        finding.known = KNOWN.get((library, finding.bug), "")
        if finding.is_policy and not finding.known and not strict:
            report.notes.append(f"{finding.bug} (an error if strict): {finding.message}")
            continue
        (report.known if finding.known else report.findings).append(finding)
