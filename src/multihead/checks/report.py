"""What a check found, in words."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field

from .facts import Finding


@dataclass
class Report:
    """The result of `multihead.check`. It is true where all held; printed, it says what is wrong
    and where to look.
    """

    name: str
    called: str  # how it was called, in words
    held: list[str] = field(default_factory=list)  # what was asked, and holds
    findings: list[Finding] = field(default_factory=list)
    known: list[Finding] = field(
        default_factory=list
    )  # differences that a library's module has, and why
    skipped: dict[str, str] = field(
        default_factory=dict
    )  # properties that weren't applicable, and why
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.findings

    def __bool__(self) -> bool:
        return self.ok

    @property
    def bugs(self) -> set[str]:
        """The names of what is wrong."""
        return {f.bug for f in self.findings}

    def __str__(self) -> str:
        lines = [
            f"{self.name}: "
            + (
                "all held"
                if self.ok
                else f"{len(self.findings)} found: "
                + ", ".join(dict.fromkeys(f.bug for f in self.findings))
            ),
            f"called as {self.called}",
            "",
        ]
        for n, f in enumerate(self.findings, 1):
            sure = (
                "certain: the definition with this change gives the same output"
                if f.certain
                else "judged from outside"
            )
            lines += [
                f"{n}. {f.bug} ({sure})",
                *_wrap(f.words),
                *_wrap(f"Smallest input that shows it: {f.shown}."),
                *_wrap(f"Where to look: {f.look}"),
                *_wrap(f"Found by: {', '.join(f.by)}."),
                "",
            ]
        for f in self.known:
            lines += [f"known difference: {f.bug}", *_wrap(f.words), *_wrap(f.known), ""]
        if self.held:
            lines += ["held:", *_wrap(", ".join(self.held)), ""]
        if self.skipped:
            lines += [
                "not applicable:",
                *(line for name, why in self.skipped.items() for line in _wrap(f"{name}: {why}")),
                "",
            ]
        if self.notes:
            lines += ["not judged:", *(line for note in self.notes for line in _wrap(note)), ""]
        return "\n".join(lines).rstrip()


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(
        text, 110, initial_indent="   ", subsequent_indent="   ", break_long_words=False
    )
