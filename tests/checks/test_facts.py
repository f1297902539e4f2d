"""What is measured once: causality, windows, positions; and differences and shapes in messages."""

from __future__ import annotations

import pytest
import torch

from checks.samples import Separate, facts_of
from checks.test_variants import Alibi, SlidingWindow
from multihead.checks.facts import find_smallest, format_shape, relative_difference


@torch.no_grad()
def test_causality_is_measured() -> None:
    assert facts_of(Separate(causal=True)).causal_by == "itself"
    facts = facts_of(Separate())
    assert not facts.is_causal and facts.causal_by == "mask"
    spec = facts.causal_spec(2, 5)
    assert spec.allowed is not None and spec.allowed.int().tolist() == [[1, 1, 1, 1, 0], [1] * 5]
    assert "with a causal mask as mask[B, 1, L, S]" in facts.describe(spec)
    flag = facts_of(torch.nn.functional.scaled_dot_product_attention)
    assert flag.causal_by == "flag" and flag.describe(flag.causal_spec(5)) == " with is_causal=True"


@torch.no_grad()
def test_windows_and_positions() -> None:
    window = facts_of(SlidingWindow()).window
    assert window is not None and window.int()[4].tolist() == [0, 0, 1, 1, 1]
    assert facts_of(Separate()).window is None and not facts_of(Separate()).positions
    assert "slopes" in facts_of(Alibi()).positions


def test_relative_difference() -> None:
    one, nan = torch.ones(3), torch.tensor([1.0, 1.0, torch.nan])
    assert relative_difference(one * 1.5, one) == 0.5
    assert relative_difference(nan, nan) == 0.0 and relative_difference(nan, one) == torch.inf
    assert relative_difference(one[:2], one) == torch.inf


@pytest.mark.parametrize(
    ("layout", "words"), [("[B, L, D]", "x [1, 2, 24]"), ("[B, L, H, E]", "x [1, 2, 4, 6]")]
)
@torch.no_grad()
def test_the_smallest_example(layout: str, words: str) -> None:
    facts = facts_of(Separate())
    assert find_smallest(facts, lambda b, n: 0.5 if n >= 2 else None) == "x [1, 2, 24], by 0.5"
    assert find_smallest(facts, lambda b, n: None) == "x [3, 5, 24]"
    facts.callee.layout = layout
    assert format_shape(facts.callee, 1, 2) == words
