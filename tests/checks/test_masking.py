"""Masks that leak or are inverted, padding that counts, and queries without a key."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import multihead
from checks.samples import Separate, facts_of
from multihead.checks import NotApplicable
from multihead.checks.masking import find_bad_empty_rows, find_leaking_masks, find_leaking_padding


class Padded(Separate):
    """`key_padding_mask` [B, S], True is hidden, by `fill`."""

    def __init__(self, fill: float = -torch.inf, inverted: bool = False) -> None:
        super().__init__()
        self.fill, self.inverted = fill, inverted

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        q, k, v = (f(x).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.mT / 6**0.5
        if key_padding_mask is not None:
            hidden = key_padding_mask ^ self.inverted
            scores = scores.masked_fill(hidden[:, None, None], self.fill)
        weights = scores.softmax(-1)
        weights = torch.nan_to_num(weights) if self.fill == -torch.inf else weights
        return self.o((weights @ v).transpose(1, 2).flatten(2))


def names(findings: list) -> list[str]:  # type: ignore[type-arg]
    return [finding.bug for finding in findings]


@torch.no_grad()
def test_a_correct_mask() -> None:
    facts = facts_of(Padded())
    for find in (find_leaking_masks, find_leaking_padding, find_bad_empty_rows):
        assert not find(facts)


@torch.no_grad()
def test_wrong_masks() -> None:
    assert names(find_leaking_masks(facts_of(Padded(inverted=True)))) == ["inverted mask"]
    weak = facts_of(Padded(fill=-3.0))
    (finding,) = find_leaking_masks(weak)
    assert (
        finding.bug == "padding changes real tokens" and "key_padding_mask[B, S]" in finding.message
    )
    assert names(find_leaking_padding(weak)) == ["padding changes real tokens"]
    with pytest.raises(NotApplicable, match="doesn't hide keys"):
        find_bad_empty_rows(weak)
    assert names(find_bad_empty_rows(facts_of(Padded(fill=-1e9)))) == ["fully masked rows leak"]


@torch.no_grad()
def test_nan_without_a_key_and_no_mask_at_all() -> None:
    class Bare(Padded):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x)

    facts = facts_of(torch.nn.MultiheadAttention(16, 2))
    (finding,) = find_bad_empty_rows(facts)
    assert finding.bug == "fully masked rows give NaN" and "only key hidden by" in finding.example
    for find in (find_leaking_masks, find_leaking_padding, find_bad_empty_rows):
        with pytest.raises(NotApplicable, match="takes no"):
            find(facts_of(Bare()))


class Useless(Separate):
    """A mask of keys [B, S] that is ignored, or put into the weights as -inf."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.used = used

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        q, k, v = (f(x).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        weights = (q @ k.mT / 6**0.5).softmax(-1)
        if attn_mask is not None and self.used:
            weights = weights.masked_fill(~attn_mask[:, None, None, :].bool(), -torch.inf)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("used", "name", "words"),
    [
        (False, "mask ignored", "changes nothing"),
        (True, "mask doesn't hide keys", "isn't finite, although every query has a key"),
    ],
)
def test_a_mask_that_hides_nothing_in_any_form(used: bool, name: str, words: str) -> None:
    report = multihead.check(Useless(used))
    assert report.bugs == {name} and words in report.findings[0].message, str(report)


@torch.no_grad()
def test_the_padding_of_another_batch_element() -> None:
    """Found although each form of the mask hides what it should in a batch of equal lengths."""

    class First(Padded):
        def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
            mask = None if key_padding_mask is None else key_padding_mask[:1]
            return super().forward(x, mask)

    assert names(find_leaking_padding(facts_of(First()))) == ["padding changes real tokens"]


def test_an_unused_mask_of_causal_attention_is_ignored() -> None:
    class Unused(Separate):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(x)

    assert multihead.check(Unused(causal=True)).bugs == {"mask ignored"}
