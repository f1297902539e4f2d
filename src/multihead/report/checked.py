"""The page of a check: one HTML file with the verdict, the findings, what was and wasn't judged,
and the weights of each head as read out next to those of the definition.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..checks.properties import PROPERTIES
from ..checks.report import Report
from ..io import write_text
from .colours import LEVELS, colour_rules
from .frame import Frame, read_web_file
from .head_view import CallView, HeadView, MatrixView, view_calls

BUDGET = 1_000_000  # bytes of a whole page
CELL = 24  # bytes of a cell at least
SMALL = 12  # keys beyond which cells are too small for their values
OPEN = 4  # heads of a call that are open at first
NOTHING_TO_COMPARE = "Read out; there is no A of the definition to compare them with."
MARKS = {"right": ("✓", "good"), "wrong": ("✗", "bad"), "partly judged": ("?", "unsure")}


@dataclass(frozen=True)
class _Head:
    """A head as the template shows it."""

    view: HeadView
    tables: list[MatrixView] | None  # None where they are left out
    is_open: bool
    batch: int

    @property
    def state(self) -> str:
        if self.view.largest is None:
            return "not-compared"
        return "differs" if self.view.differs else "equal"

    @property
    def patterns(self) -> str:
        read, expected = self.view.pattern, self.view.expected_pattern
        if read == expected or not (read and expected):
            return f"Queries read {read or expected}." if read or expected else ""
        return f"As read out, queries read {read}; by the definition {expected}."

    @property
    def note(self) -> str:
        shown = []
        for name, size, places in zip(
            ("queries", "keys"), self.view.size, (self.view.queries, self.view.keys), strict=True
        ):
            if len(places) < size:
                shown.append(f"{name} {places.start} to {places.stop - 1} of {size}")
        batch = f"Batch element 0 of {self.batch}." if self.batch > 1 else ""
        return " ".join(filter(None, [f"Shown: {', '.join(shown)}." if shown else "", batch]))


@dataclass(frozen=True)
class _Section:
    """A list of the page: lines of a name and a text, either of which may be empty."""

    id: str
    title: str
    lines: list[tuple[str, str]]
    intro: str = ""


def render_check(report: Report, *, title: str | None = None, budget: int = BUDGET) -> str:
    """The page as HTML of at most `budget` bytes. Tables that don't fit are left out, those of
    heads that are equal to the definition first.
    """
    calls = view_calls(report.calls)
    heads = sorted((h for call in calls for h in call.heads), key=lambda h: not h.differs)
    at_least = itertools.accumulate(CELL * head.num_cells for head in heads)
    heads = heads[: sum(size <= budget for size in at_least)]
    while True:
        shown = {head.id for head in heads}
        numbers = {head.id: head.to_json() for head in heads}
        page = _frame(report, calls, shown, title, budget).render(numbers)
        size = len(page.encode())
        if size <= budget or not heads:
            return page
        heads = heads[: min(len(heads) - 1, len(heads) * budget // size)]


def write_check_page(
    path: str | os.PathLike[str], report: Report, *, title: str | None = None, budget: int = BUDGET
) -> None:
    """Write the page of a report, completely or not at all.

    Raises:
        MultiheadError: its folder doesn't exist, or `path` is one.
        OSError: it can't be written.
    """
    write_text(Path(path), render_check(report, title=title, budget=budget))


def _frame(
    report: Report, calls: Sequence[CallView], shown: set[str], title: str | None, budget: int
) -> Frame:
    mark, style = MARKS[report.verdict]
    before, after = _sections(report)
    sections = [("findings", "What is wrong")] if report.findings else []
    sections += [(s.id, s.title) for s in before] + [("weights", "Weights")]
    sections += [(s.id, s.title) for s in after]
    return Frame(
        "check.html.jinja",
        ("common.js", "check.js"),
        style=read_web_file("check.css") + colour_rules(),
        title=title or f"Check of {report.name}",
        verdict={
            "name": report.verdict,
            "summary": report.summary,
            "code": report.exit_code,
            "mark": mark,
            "style": style,
        },
        called=report.called,
        weights=_weights_summary(calls),
        sections=sections,
        findings=report.findings,
        places=_places(calls),
        before=before,
        after=after,
        calls=[_call(call, shown) for call in calls],
        levels=LEVELS,
        small=SMALL,
        budget=f"{budget / 1e6:g} MB",
    )


def _sections(report: Report) -> tuple[list[_Section], list[_Section]]:
    """The lists above the weights, and those below."""
    known = [(f.bug, f"{f.message} {f.known}") for f in report.known]
    claims = {each.name: each.claim for each in PROPERTIES}
    partly = "Therefore it is partly judged." if report.verdict == "partly judged" else ""
    unjudged = [("", text) for text in report.unjudged]
    before = [_Section("unjudged", "What couldn't be judged", unjudged, partly)]
    after = [
        _Section("known", "Known differences", known, "Done on purpose; not counted as wrong."),
        _Section("passed", "What holds", [(name, claims.get(name, "")) for name in report.passed]),
        _Section("skipped", "What doesn't apply", [(n, why) for n, why in report.skipped.items()]),
        _Section("notes", "Notes", [("", text) for text in report.notes]),
    ]
    return [s for s in before if s.lines], [s for s in after if s.lines]


def _places(calls: Sequence[CallView]) -> list[tuple[HeadView, str]]:
    """The first head of each call whose weights differ, and how it was called."""
    differing = [[(h, call.call) for h in call.heads if h.first is not None] for call in calls]
    return [heads[0] for heads in differing if heads]


def _weights_summary(calls: Sequence[CallView]) -> str:
    """How the weights of the whole check compare, in one sentence."""
    for head, call in _places(calls):
        return f"Called {call}, head {head.head}: {head.verdict}"
    compared = [h.largest for call in calls for h in call.heads if h.largest is not None]
    if compared:
        every = all(h.largest is not None for call in calls for h in call.heads)
        which = "all heads and calls" if every else "the heads and calls that can be compared"
        return f"Equal to the definition's in {which} (to {max(compared):.1g})."
    for each in calls:
        for head in each.heads:
            return head.why_not_read if head.weights is None else NOTHING_TO_COMPARE
    return "The report has none."


def _call(call: CallView, shown: set[str]) -> dict[str, object]:
    differing = [h for h in call.heads if h.differs]
    first = {h.id for h in (differing or call.heads)[:OPEN]}
    heads = []
    for view in call.heads:
        tables = view.tables(call.scale, call.difference) if view.id in shown else None
        heads.append(_Head(view, tables, view.id in first, call.batch))
    compared = sum(h.largest is not None for h in call.heads)
    of = f"of {len(call.heads)} heads" if len(call.heads) > 1 else "of 1 head"
    if differing:
        verb = "differ" if len(differing) > 1 else "differs"
        summary = f"{len(differing)} {of} {verb} from the definition"
    elif compared:
        summary = f"{compared} {of} equal to the definition"
    else:
        is_read = call.heads[0].weights is not None
        summary = "nothing to compare them with" if is_read else "not read out"
    return {
        "call": call.call,
        "summary": summary,
        "note": call.note,
        "nothing": call.why_nothing,
        "is_open": call.number == 0 or bool(differing),
        "scale": f"{call.scale:.3g}",
        "difference": f"{call.difference:.3g}" if call.difference else "",
        "heads": heads,
    }
