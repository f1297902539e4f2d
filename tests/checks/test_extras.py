"""Norms, gates, sinks and ALiBi beside projections are recomputed, and a bug beside them is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multihead
from checks.samples import facts_of
from multihead.checks.extras import extend
from multihead.checks.projections import assignments, find_matrices


class WithExtras(nn.Module):
    """A causal layer with a norm, a gate for each head, a sink and ALiBi, or without some of them."""

    def __init__(self, without: str = "", **changes: Any) -> None:
        super().__init__()
        self.num_heads, self.changes = 4, changes
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)
        if without != "norm":
            self.norm = nn.LayerNorm(32)
        if without != "gate":
            self.to_gate = nn.Linear(32, 4)
        if without != "sinks":
            self.sinks = nn.Parameter(torch.randn(4))
        slopes = torch.tensor([0.25, 0.0625, 2.0**-6, 2.0**-8])
        self.register_buffer("slopes", None if without == "slopes" else slopes)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        x = self.norm(x) if hasattr(self, "norm") else x
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT * self.changes.get("scale", 8**-0.5)
        at = torch.arange(length)
        if self.slopes is not None:
            scores = scores + self.slopes[:, None, None] * (at - at[:, None])
        scores = scores.masked_fill(at > at[:, None], -torch.inf)
        if hasattr(self, "sinks"):
            sinks = self.sinks[:, None, None].expand(len(x), 4, length, 1)
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        out = (weights @ v).transpose(1, 2)
        if hasattr(self, "to_gate"):
            out = out * self.to_gate(x).sigmoid()[..., None]
        return self.proj(out.flatten(2))


@pytest.mark.parametrize("without", ["", "norm", "gate", "sinks", "slopes"])
def test_each_is_recomputed(without: str) -> None:
    report = multihead.check(WithExtras(without))
    (line,) = (text for text in report.passed if text.startswith("recomputed"))
    words = {"norm": "a norm", "gate": "a sigmoid gate", "sinks": "a sink", "slopes": "ALiBi"}
    assert report.ok, str(report)
    assert {part for part, word in words.items() if word in line} == words.keys() - {without}


def test_a_bug_beside_them_is_named() -> None:
    report = multihead.check(WithExtras(scale=32**-0.5))
    assert report.bugs == {"missing or wrong scale"} and report.findings[0].certain, str(report)


@torch.no_grad()
def test_without_parts_there_is_nothing_to_try() -> None:
    callee = facts_of(nn.MultiheadAttention(16, 2)).callee
    assert not list(extend(callee, list(assignments(callee, [2])), find_matrices(callee)))
