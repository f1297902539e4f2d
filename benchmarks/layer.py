"""The layer at inference against `nn.MultiheadAttention` with the same weights: d = 768, 12
heads.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from benchmarks.turns import TOY, Turns, ratios
from multihead.layers import from_torch

WIDTH, HEADS = 768, 12
SIZES = [(batch, length) for length in (128, 512, 2048) for batch in (1, 8)]


@torch.no_grad()
def tables(toy: bool = False) -> Iterator[tuple[str, list[dict[str, str]], str]]:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    ours = from_torch(theirs)
    rows, turns = [], TOY if toy else Turns()
    for batch, length in [(2, 16)] if toy else SIZES:
        x = torch.randn(batch, length, WIDTH)
        out, weights = theirs(x, x, x, average_attn_weights=False)
        got, got_weights = ours(x, return_weights=True)
        assert torch.allclose(got, out, atol=1e-5) and torch.allclose(
            got_weights, weights, atol=1e-5
        ), "nothing is timed"
        assert torch.allclose(ours(x), out, atol=1e-5), "nothing is timed"
        seconds, ratio = ratios(
            {
                "theirs": lambda x=x: theirs(x, x, x, need_weights=False),
                "ours": lambda x=x: ours(x),
            },
            turns,
        )
        with_weights, weights_ratio = ratios(
            {
                "theirs": lambda x=x: theirs(x, x, x),
                "ours": lambda x=x: ours(x, return_weights=True),
            },
            turns,
        )
        rows.append(
            {
                "batch": str(batch),
                "tokens": f"{length:,}",
                "nn.MultiheadAttention": f"{1e3 * seconds['theirs']:.1f} ms",
                "ours": f"{1e3 * seconds['ours']:.1f} ms",
                "ratio": f"{ratio['ours']:.2f}",
                "theirs, with weights": f"{1e3 * with_weights['theirs']:.1f} ms",
                "ours, with weights": f"{1e3 * with_weights['ours']:.1f} ms",
                "ratio ": f"{weights_ratio['ours']:.2f}",
            }
        )
    yield (
        f"The layer at inference, {WIDTH} wide, {HEADS} heads, float32",
        rows,
        (
            "Goal: never above 1. Theirs in evaluation (its fast path), without weights by"
            " `need_weights=False`; its weights are the average over the heads, ours those of each"
            " head."
        ),
    )
