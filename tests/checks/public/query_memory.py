"""Queries, and keys and values from one input, in one matrix; the result is a dict."""

import torch
from torch import nn


class QueryMemoryAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q_proj, self.kv_proj = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.out_proj = nn.Linear(dim, dim)

    def forward(self, q, kv, key_padding_mask=None):
        k, v = self.kv_proj(kv).chunk(2, -1)
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (self.q_proj(q), k, v)
        )
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / q.shape[-1] ** 0.5
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, None], -torch.inf)
        weights = scores.softmax(-1)
        out = torch.einsum("bhqk,bhkd->bqhd", weights, v).flatten(2)
        return {"attention": weights, "output": self.out_proj(out)}


def make():
    return QueryMemoryAttention(32, 4)
