"""Overflow, float16, strides, and requested weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from checks.samples import Separate, facts_of
from multihead.checks import NotApplicable
from multihead.checks.precision import (
    find_half_overflow,
    find_overflow,
    find_stride_dependence,
    find_weights_problems,
)


class Manual(Separate):
    """Its softmax by hand, a view of the input, or weights of another axis, on request."""

    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.bug = bug

    def forward(self, x: Tensor, need_weights: bool = False) -> object:  # type: ignore[override]
        if self.bug == "view":
            x = x.view(-1, 24).view(x.shape)
        q, k, v = (f(x).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.mT / 6**0.5
        weights = scores.softmax(-1)
        if self.bug == "fill":
            scores = scores.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -1e9)
            weights = scores.softmax(-1)
        if self.bug == "exp":
            weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
        out = self.o((weights @ v).transpose(1, 2).flatten(2))
        if not need_weights:
            return out
        if self.bug == "other output":
            out = 1.01 * out
        return out, scores.softmax(-2) if self.bug == "axis" else weights


@torch.no_grad()
def test_a_correct_layer() -> None:
    facts = facts_of(Manual())
    for find in (find_overflow, find_half_overflow, find_stride_dependence, find_weights_problems):
        assert not find(facts)
    with pytest.raises(NotApplicable, match="returns no weights"):
        find_weights_problems(facts_of(Separate()))


class Masked(Separate):
    """Padding that is hidden by numbers, in float16 in another way than in float64."""

    def __init__(self, bug: str) -> None:
        super().__init__()
        self.bug = bug

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = (f(x).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        s, mask = q @ k.mT / 6**0.5, mask[:, None, None].bool()
        if self.bug == "fill":
            s = s.masked_fill(~mask, -1e9)
        elif self.bug == "NaN":  # -1e9 becomes -inf before it is multiplied
            s = s + (~mask).to(x.dtype) * torch.tensor(-1e9, dtype=torch.float64).to(x.dtype)
        elif self.bug == "steps":  # near -9000 float16 has steps of 8
            s = s.masked_fill(~mask, -torch.inf) - 9000 * (~mask).any(-1, keepdim=True)
        else:
            s = s.masked_fill(~mask, -torch.inf)
        return self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("bug", "name", "words"),
    [
        ("fill", "mask value doesn't fit float16", "beyond float16"),
        ("NaN", "half-precision softmax overflow", "is nan, and "),
        ("steps", "half-precision softmax overflow", "called with padding as mask[B, S]"),
        ("", "", ""),
    ],
)
@torch.no_grad()
def test_masks_in_float16(bug: str, name: str, words: str) -> None:
    findings = find_half_overflow(facts_of(Masked(bug)))
    assert [f.bug for f in findings] == [name] * bool(name)
    assert all(words in f.message for f in findings), findings


@pytest.mark.parametrize(
    ("bug", "find", "name", "words"),
    [
        ("exp", find_overflow, "softmax overflows", "exp() overflows"),
        ("exp", find_half_overflow, "half-precision softmax overflow", "is NaN or infinite"),
        ("fill", find_half_overflow, "mask value doesn't fit float16", "ends at -65504"),
        ("view", find_stride_dependence, "non-contiguous inputs fail", "a transposed view"),
        ("other output", find_weights_problems, "output depends on requested weights", "=True"),
        ("axis", find_weights_problems, "softmax over the wrong axis", "They do over axis 2"),
    ],
)
@torch.no_grad()
def test_a_wrong_layer(bug: str, find: object, name: str, words: str) -> None:
    (finding,) = find(facts_of(Manual(bug)))  # type: ignore[operator]
    assert finding.bug == name and words in finding.message, finding
    assert finding.is_policy == (bug == "fill")
