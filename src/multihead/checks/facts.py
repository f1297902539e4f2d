"""What is known of the thing under check, and the form of what is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .calling import Subject
from .discover import influence, mentions


class NotApplicable(Exception):
    """A property that can't be asked of this thing, and why."""


@dataclass
class Finding:
    """One thing that is wrong: its name, what it is, the smallest input that shows it, where to
    look.
    """

    bug: str
    words: str
    shown: str
    look: str
    by: list[str] = field(default_factory=list)  # "the definition", or the property that failed
    known: str = ""  # why a library's module may do so: then it isn't counted

    @property
    def certain(self) -> bool:
        return "the definition" in self.by


@dataclass
class Facts:
    subject: Subject
    declared: bool | None = None  # what the user says: causal or not
    target: Any = None

    @cached_property
    def zero(self) -> float:
        """Influence below this is none."""
        return 1e-7 if self.subject.dtype == torch.float64 else 1e-5

    @cached_property
    def own(self) -> Tensor:
        """Influence where it's called with inputs alone."""
        return influence(self.subject, self.subject.length)

    @cached_property
    def by_itself(self) -> bool:
        """Whether, called with inputs alone, it hides the future: later tokens do nothing, or far
        less than earlier ones.
        """
        own = self.own.nan_to_num(0.0)
        later = torch.ones_like(own).triu(1).bool()
        past, future = own[later.T], own[later]
        if not past.gt(self.zero).any():
            return False
        hidden, missing = future.le(self.zero).double().mean(), past.le(self.zero).double().mean()
        # An off-by-one still hides most of the future; a mask after the softmax lets a little of it
        # through.
        return bool(hidden >= 0.5 and hidden > missing) or bool(future.mean() < 0.1 * past.mean())

    @cached_property
    def window(self) -> Tensor | None:
        """bool [L, S], which keys rows read, where the code speaks of a window and some earlier
        tokens are out of reach.
        """
        read = self.own.nan_to_num(0.0) > self.zero
        read |= torch.eye(len(read), dtype=torch.bool)
        if read.tril().equal(torch.ones_like(read).tril()) or not self.mentions(WINDOWS):
            return None
        return read

    @cached_property
    def future_hidden(self) -> dict[str, Any] | None:
        """The options of a call that makes it causal; None where there's no way."""
        if self.by_itself or (
            self.declared and not self.subject.causal_flag and not self.subject.mask
        ):
            return {}
        if self.subject.causal_flag is not None:
            return {"more": {self.subject.causal_flag: True}}
        return None if self.subject.mask is None else {"may": "causal"}

    def options(self, length: int, keys: int | None = None) -> dict[str, Any]:
        """The same for so many tokens; of the last of `keys` where there are more."""
        found = dict(self.future_hidden or {})
        if "may" in found:
            found["may"] = torch.ones(length, keys or length, dtype=torch.bool).tril(
                (keys or length) - length
            )
        return found

    def mentions(self, pattern: str) -> list[str]:
        return mentions(self.target, pattern)

    @cached_property
    def positions(self) -> list[str]:
        """Names in the code that speak of positions."""
        given = [
            n
            for n, role in self.subject.roles.items()
            if role in ("tables", "cos", "sin", "turns", "positions")
        ]
        return given + self.mentions(
            r"rot(ary|ate)|rope|alibi|(^|_)pos(_|$|ition)|slopes|inv_freq|freqs|relative|^cos$|"
            r"^sin$|cos_sin|rel_"
        )


WINDOWS = r"window|local|sliding|band|spars|chunk|block|neigh|stride|dilat"
Property = Callable[[Facts], list[Finding]]


def gap(found: Tensor, want: Tensor) -> float:
    """The largest difference beside the largest number; NaN in both is none, in one is infinite."""
    if found.shape != want.shape:
        return torch.inf
    both = found.isnan() & want.isnan()
    difference = torch.where(both, 0.0, (found - want).abs()).nan_to_num(torch.inf)
    finite = want[want.isfinite()]
    return difference.max().item() / max(
        finite.abs().max().item() if finite.numel() else 0.0, 1e-30
    )


def smallest(facts: Facts, wrong: Callable[[int, int], float | None], *, least: int = 1) -> str:
    """The smallest [B, L] at which `wrong` gives a number, in words."""
    subject = facts.subject
    sizes = [(b, n) for n in range(least, subject.length + 1) for b in range(1, subject.batch + 1)]
    for batch, length in sorted(sizes, key=lambda s: s[0] * s[1]):
        try:
            value = wrong(batch, length)
        except Exception:
            continue
        if value is not None:
            return shape_words(subject, batch, length) + (
                "" if value != value or value == torch.inf else f", by {value:.2g}"
            )
    return shape_words(subject, subject.batch, subject.length)


def shape_words(subject: Subject, batch: int, length: int) -> str:
    heads, width = subject.heads or 1, subject.width // (subject.heads or 1)
    shape = {
        "[B, L, D]": f"[{batch}, {length}, {subject.width}]",
        "[L, B, D]": f"[{length}, {batch}, {subject.width}]",
        "[L, D]": f"[{length}, {subject.width}]",
        "[L, E]": f"[{length}, {width}]",
        "[B, L, E]": f"[{batch}, {length}, {width}]",
        "[B, H, L, E]": f"[{batch}, {heads}, {length}, {width}]",
        "[B, L, H, E]": f"[{batch}, {length}, {heads}, {width}]",
    }[subject.layout]
    return f"{'x' if subject.form in ('self', 'memory') else 'q = k = v'} {shape}"


def describe(options: Mapping[str, Any], facts: Facts) -> str:
    if "more" in options:
        return " with " + ", ".join(f"{k}={v}" for k, v in options["more"].items())
    if "may" in options and facts.subject.mask is not None:
        return f" with a causal mask as {facts.subject.mask.words}"
    return ""
