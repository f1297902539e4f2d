"""Decoding with a cache: a long prompt in one pass, then one token at a time; and with a window
cache, whose memory never grows.

python examples/decoding.py
"""

from __future__ import annotations

import torch

from multihead import Cache, MultiHeadAttention, WindowCache
from multihead.layers import Rotary
from multihead.masks import causal, window

torch.manual_seed(0)
layer = MultiHeadAttention(256, 8, num_kv_heads=2, positions=Rotary(32)).eval()
text = torch.randn(1, 1000, 256)

with torch.no_grad():
    whole = layer(text, mask=causal())

    cache = Cache()  # it provides the positions: causal() stays causal()
    steps = [layer(text[:, :900], mask=causal(), cache=cache)]
    steps += [layer(text[:, i : i + 1], mask=causal(), cache=cache) for i in range(900, 1000)]
    print(
        f"{cache}, largest difference from one pass:"
        f" {(torch.cat(steps, 1) - whole).abs().max():.1e}"
    )

    near = layer(text, mask=causal() & window(left=127))
    cache = WindowCache(left=127)
    steps = [layer(text[:, i : i + 1], mask=causal(), cache=cache) for i in range(1000)]
    print(
        f"{cache}, largest difference from one pass: {(torch.cat(steps, 1) - near).abs().max():.1e}"
    )
