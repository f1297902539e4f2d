"""Embeddings of distances that weights read beside the values, and the table they are from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from checks.samples import facts_of
from checks.test_judge import Odd
from multihead.checks.evidence import Judged
from multihead.checks.judge import read_evidence
from multihead.checks.judge_rest import judge_rest
from multihead.checks.value_terms import find_table


class Placed(Odd):
    def __init__(self, change: str = "", entries: int = 13) -> None:
        super().__init__()
        self.change, self.rel_v = change, nn.Parameter(torch.randn(entries, 8))

    def attend(self, x: Tensor, hidden: Tensor | None, late: bool = False) -> Tensor:
        y = x if self.change == "no residual" else self.norm(x)
        q, k, v = (
            f(y).unflatten(-1, (-1, 8)).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        at = torch.arange(x.shape[1])
        table = self.rel_v.tanh() if self.change == "squashed" else self.rel_v
        a = (q @ k.mT / 8**0.5).softmax(-1)
        places = at[:, None] + at if self.change == "sum" else at[:, None] - at + 6
        y = a @ v + torch.einsum("bhij,ijd->bhid", a, table[places])
        y = y**3 if self.change == "cubed" else y
        out = self.o_proj(y.transpose(1, 2).flatten(2))
        return out if self.change == "no residual" else x + out


def rest_of(target: nn.Module) -> Judged:
    judged = Judged()
    with torch.no_grad():
        judge_rest(judged, read_evidence(facts_of(target)))
    return judged


def test_embeddings_of_distances_are_recomputed() -> None:
    for change, words in (
        ("", "W_O, added to the input (entry 6"),
        ("no residual", "W_O (entry 6"),
    ):
        result = rest_of(Placed(change))
        assert not result.unjudged and words in result.passed[0], result


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (Placed(entries=15), "of 15 entries: it isn't the one in the middle"),
        (Placed("squashed"), "no entries of a parameter"),
        (Placed("sum"), "a part of the output that doesn't depend on the values"),
    ],
)
def test_others_are_not_judged(target: nn.Module, words: str) -> None:
    result = rest_of(target)
    assert any(words in line for line in result.unjudged), result


def test_tables() -> None:
    table = nn.Embedding(7, 4).double()
    rows = table.weight.detach()
    assert find_table(table, [-2, 0, 2], rows[[1, 3, 5]]) == ("entry 3 of weight at distance 0", "")
    words = find_table(table, [-1, 0, 1], 0.5 * rows[[3, 2, 1]] + 2, 0.5)
    assert words is not None and "entry 2 of weight" in words[0] and "the middle" in words[1]
    assert find_table(table, [0, 1, 2], rows[[2, 3, 4]]) == ("entry 2 of weight at distance 0", "")
    assert find_table(table, [-1, 0, 1], rows[[0, 1, 5]]) is None
    assert find_table(None, [0], rows[:1]) is None
