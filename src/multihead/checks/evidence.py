"""`Evidence`: weights that were read out, with queries and keys; and `Judged`, what they show."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from .definition import normalize
from .facts import Facts, format_shape
from .finding import READ_OUT, Finding
from .projections import find_norms
from .readout import Readout, WeightReader
from .signature import library_of

TOLERANCE = 1e-4


@dataclass
class Judged:
    """Properties that the weights show.

    Attributes:
        findings: what is wrong with them.
        passed: what is right, as lines of the report.
        unjudged: what can't be judged from them.
        explained: names of findings of properties that follow from a pattern that the weights have
            by choice, and that pattern.
    """

    findings: list[Finding] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)
    explained: dict[str, str] = field(default_factory=dict)

    def find(self, bug: str, message: str, example: str, look: str) -> None:
        """Add a finding that shows in the weights."""
        self.findings.append(Finding(bug, message, example, look, [READ_OUT]))


@dataclass(frozen=True)
class Evidence:
    """The weights of several inputs.

    Attributes:
        facts: of the callable.
        reader: that read the weights.
        inputs: `[1, L, D]` each.
        readouts: of each input.
        weights: `[N, H, L, S]`, where heads are mixed as they were before.
    """

    facts: Facts
    reader: WeightReader
    inputs: Sequence[Tensor]
    readouts: Sequence[Readout]
    weights: Tensor

    @property
    def example(self) -> str:
        return format_shape(self.facts.callee, 1, self.facts.length)

    @property
    def module(self) -> nn.Module | None:
        return self.facts.callee.module

    @property
    def head_dim(self) -> int:
        return self.reader.head_dims[0]

    @cached_property
    def heads(self) -> tuple[Tensor, Tensor]:
        """Queries `[N, Hq, L, E]` and keys `[N, G, S, E]`, after their norms."""
        return self.split([r.queries for r in self.readouts], [r.keys for r in self.readouts])

    def split(self, queries: Sequence[Tensor], keys: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The same of what W_Q and W_K return, `[L, heads * E]` each."""
        q, k = (
            torch.stack(
                [
                    normalize(t.unflatten(-1, (-1, self.head_dim)).transpose(0, 1)[None], norm)[0]
                    for t in tensors
                ]
            )
            for norm, tensors in zip(find_norms(self.module), (queries, keys), strict=True)
        )
        return q, k

    @cached_property
    def products(self) -> Tensor | None:
        """q k' of each head with the key head of its group, `[N, H, L, S]`; None where W_Q makes
        another number of heads than W_O takes.
        """
        queries, keys = self.heads
        num_heads, groups = queries.shape[1], keys.shape[1]
        if num_heads != self.weights.shape[1] or num_heads % groups:
            return None
        return queries @ keys.repeat_interleave(num_heads // groups, 1).mT

    def declared(self, pattern: str, *, in_docstrings: bool = False) -> list[str]:
        """Names in use that contain the pattern, as `find_declared` finds them."""
        return find_declared(self.facts, pattern, in_docstrings=in_docstrings)


def find_declared(facts: Facts, pattern: str, *, in_docstrings: bool = False) -> list[str]:
    """Names of attributes that are in use; in a user's code those of its code too, and the words of
    its docstrings if `in_docstrings`.
    """
    module = facts.callee.module
    if facts.callee.library is None or module is None:
        names = facts.find_names(pattern)
        return names or (_find_in_docstrings(facts.target, pattern) if in_docstrings else [])
    owners = [owner for owner in module.modules() if library_of(owner) == facts.callee.library]
    return sorted(
        {
            name
            for owner in owners
            for name in (*vars(owner), *owner._parameters, *owner._modules)
            if re.search(pattern, name, re.IGNORECASE)
            and getattr(owner, name, None) is not None
            and getattr(owner, name) is not False
        }
    )


def _find_in_docstrings(target: Any, pattern: str) -> list[str]:
    owner = type(target) if isinstance(target, nn.Module) else target
    own = vars(owner).get("__doc__") if isinstance(owner, type) else inspect.getdoc(owner)
    texts = [own, inspect.getdoc(getattr(owner, "forward", None))]
    words = (word for text in texts for word in re.findall(r"\w+", text or ""))
    return [word for word in words if re.search(pattern, word, re.IGNORECASE)][:1]
