"""What weights are judged with: queries and keys by head, and what code declares."""

from __future__ import annotations

import torch
from torch import nn

from checks.samples import facts_of
from checks.test_judge import Odd
from multihead.checks.evidence import Evidence, find_declared
from multihead.checks.judge import read_evidence


class Declared(Odd):
    """A token reads all others, not itself."""


def evidence_of(target: nn.Module) -> Evidence:
    with torch.no_grad():
        return read_evidence(facts_of(target))


def test_products_are_those_of_each_head_with_the_keys_of_its_group() -> None:
    for groups in (4, 2):
        evidence = evidence_of(Odd(groups=groups))
        (queries, keys), products = evidence.heads, evidence.products
        assert queries.shape == (3, 4, 5, 8) and keys.shape == (3, groups, 5, 8)
        assert products is not None
        torch.testing.assert_close(products[:, 3], queries[:, 3] @ keys[:, -1].mT)
        torch.testing.assert_close((products / 8**0.5).softmax(-1), evidence.weights)


def test_what_code_declares() -> None:
    facts = facts_of(Declared())
    assert find_declared(facts, "^norm$") == ["norm"]
    assert not find_declared(facts, "^itself$")
    assert find_declared(facts, "^itself$", in_docstrings=True) == ["itself"]
    library = facts_of(nn.MultiheadAttention(8, 2))
    assert "add_zero_attn" not in find_declared(library, "add_zero")
