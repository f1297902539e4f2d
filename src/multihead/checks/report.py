"""`Report`: the result of a check, and its text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ..terminal import Paragraph, Part, to_text
from .finding import Finding

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class CallWeights:
    """The weights of one call, float64 `[B, H, L, S]`: as read out, and those of the definition.

    Attributes:
        call: how it was called, as a part of a sentence: "with its inputs alone".
        weights: A as read out of the code; None if it couldn't be.
        expected: A of the definition with the same projections, mask and scale; None if there is
            no such definition.
        why_no_weights, why_no_expected: the reason, where one of them is None.
        note: what else both contain, a gate.
        contributions: `A_hij v_j W_O^(h)`, `[B, H, L, S, D]`: what each head adds to the output of
            query i from key j; None without weights.
        rest: the output without all contributions, `[B, L, D]`: a residual, biases.
    """

    call: str
    weights: Tensor | None = None
    expected: Tensor | None = None
    why_no_weights: str = ""
    why_no_expected: str = ""
    note: str = ""
    contributions: Tensor | None = None
    rest: Tensor | None = None

    @property
    def contribution_norms(self) -> Tensor | None:
        """The size of each contribution, `[B, H, L, S]`."""
        return None if self.contributions is None else self.contributions.norm(dim=-1)


@dataclass
class Report:
    """The result of `multihead.check`: true if it is right; printed, it explains everything.

    Attributes:
        name: of what was checked.
        called: how it was called.
        passed: names of the properties that hold, and how the output was recomputed.
        findings: what is wrong.
        known: differences that a library's module has on purpose, with the reason.
        skipped: names of properties that can't be tested, with the reason.
        unjudged: what couldn't be judged, and why: without findings the verdict is then "partly
            judged".
        notes: what else there is to know.
        read_calls: what reads out the weights of the calls, when they are needed.

    >>> import multihead, torch
    >>> report = multihead.check(torch.nn.MultiheadAttention(8, 2))
    >>> report.verdict, "KV cache" in report.skipped
    ('right', True)
    """

    name: str
    called: str
    passed: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    known: list[Finding] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    unjudged: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    read_calls: Callable[[], list[CallWeights]] | None = field(
        default=None, repr=False, compare=False
    )

    @cached_property
    def calls(self) -> list[CallWeights]:
        """The weights of the calls, the one with the inputs alone first; read out when first asked
        for.
        """
        return self.read_calls() if self.read_calls is not None else []

    @property
    def weights(self) -> Tensor | None:
        """A as read out, float64 `[B, H, L, S]`, called with the inputs alone; None if it couldn't
        be: `calls` has the reason, and the weights of masked calls.
        """
        return self.calls[0].weights if self.calls else None

    @property
    def expected_weights(self) -> Tensor | None:
        """A of the definition for the same call, float64 `[B, H, L, S]`; None without one."""
        return self.calls[0].expected if self.calls else None

    @property
    def contributions(self) -> Tensor | None:
        """`A_hij v_j W_O^(h)` as read out, `[B, H, L, S, D]`, for the same call; None without."""
        return self.calls[0].contributions if self.calls else None

    @property
    def verdict(self) -> str:
        """ "wrong" if there are findings, "partly judged" if something couldn't be judged, and
        "right" otherwise.
        """
        if self.findings:
            return "wrong"
        return "partly judged" if self.unjudged else "right"

    @property
    def ok(self) -> bool | None:
        """True if it is right, False if it is wrong, None if it is partly judged."""
        return {"right": True, "wrong": False}.get(self.verdict)

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 0 if right, 1 if wrong, 3 if partly judged."""
        return {"right": 0, "wrong": 1}.get(self.verdict, 3)

    @property
    def summary(self) -> str:
        """Meaning of the verdict, as a part of a sentence."""
        names = ", ".join(dict.fromkeys(finding.bug for finding in self.findings))
        return {
            "right": "all held",
            "wrong": f"{len(self.findings)} found: {names}",
            "partly judged": "no bug was found, but not everything could be judged",
        }[self.verdict]

    def __bool__(self) -> bool:
        return self.ok is True

    @property
    def bugs(self) -> set[str]:
        """Names of the bugs that were found."""
        return {finding.bug for finding in self.findings}

    def parts(self) -> list[Part]:
        """The text: the verdict on the first line, the findings, then what was judged."""
        parts: list[Part] = [
            Paragraph(self.summary, f"{self.name}: {self.verdict}", style=self.verdict),
            Paragraph(self.called, "called as"),
            "",
        ]
        for number, finding in enumerate(self.findings, 1):
            parts += _finding(number, finding)
        lists = {
            "passed": [", ".join(self.passed)] if self.passed else [],
            "not judged": self.unjudged,
            "known difference": [f"{f.bug}: {f.message} {f.known}" for f in self.known],
            "not applicable": [f"{name}: {reason}" for name, reason in self.skipped.items()],
            "notes": self.notes,
        }
        width = max(map(len, lists))
        for title, texts in lists.items():
            labels = [title, *[""] * len(texts)]
            parts += [Paragraph(t, f"{label:{width}}") for label, t in zip(labels, texts)]
        return parts

    def __str__(self) -> str:
        return to_text(self.parts())


def _finding(number: int, finding: Finding) -> list[Part]:
    facts = {
        "certainty": finding.certainty,
        "smallest input": finding.example,
        "where to look": finding.look,
        "found by": ", ".join(finding.found_by),
    }
    width = max(map(len, facts))
    return [
        Paragraph("", f"{number}. {finding.bug}", style="wrong"),
        Paragraph(finding.message, indent=3),
        *(Paragraph(text, f"{label:{width}}", indent=3) for label, text in facts.items()),
        "",
    ]
