"""Grouped heads, 32 over 8, against repeating keys and values by hand and calling torch's
operator.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from benchmarks.turns import TOY, Turns, ratios
from multihead import attention
from multihead.masks import causal

HEADS, GROUPS, WIDTH = 32, 8, 64
SIZES = [
    (1, 1, 512),
    (1, 1, 4096),
    (8, 1, 2048),
    (1, 128, 128),
    (1, 512, 512),
    (1, 2048, 2048),
    (4, 512, 512),
]


@torch.no_grad()
def tables(toy: bool = False) -> Iterator[tuple[str, list[dict[str, str]], str]]:
    torch.manual_seed(0)
    rows = []
    for batch, length, keys in [(1, 1, 32), (1, 16, 16)] if toy else SIZES:
        q = torch.randn(batch, HEADS, length, WIDTH)
        k, v = (torch.randn(batch, GROUPS, keys, WIDTH) for _ in range(2))
        is_causal = length > 1

        def by_hand(q=q, k=k, v=v, is_causal=is_causal):
            k, v = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

        mask = causal(keys - length)

        def ours(q=q, k=k, v=v, mask=mask):
            return attention(q, k, v, mask)

        assert torch.allclose(by_hand(), ours(), atol=1e-5), "nothing is timed"
        seconds, ratio = ratios({"by hand": by_hand, "ours": ours}, TOY if toy else Turns())
        rows.append(
            {
                "batch": str(batch),
                "rows": f"{length:,}",
                "keys": f"{keys:,}",
                "repeated by hand": f"{1e3 * seconds['by hand']:.2f} ms",
                "ours": f"{1e3 * seconds['ours']:.2f} ms",
                "ratio": f"{ratio['ours']:.2f}",
            }
        )
    yield (
        f"Grouped heads, {HEADS} over {GROUPS}, {WIDTH} wide, causal, float32",
        rows,
        "Goal: never above 1.",
    )
