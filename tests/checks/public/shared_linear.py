"""One small matrix for all heads; values come first, and the mask has to be given."""

import torch
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, embed_size, heads):
        super().__init__()
        self.embed_size, self.heads, self.head_dim = embed_size, heads, embed_size // heads
        self.values = nn.Linear(self.head_dim, self.head_dim, bias=False)
        self.keys = nn.Linear(self.head_dim, self.head_dim, bias=False)
        self.queries = nn.Linear(self.head_dim, self.head_dim, bias=False)
        self.fc_out = nn.Linear(heads * self.head_dim, embed_size)

    def forward(self, values, keys, query, mask):
        n, length = query.shape[:2]
        values, keys, queries = (
            f(t.reshape(n, t.shape[1], self.heads, self.head_dim))
            for f, t in ((self.values, values), (self.keys, keys), (self.queries, query))
        )
        energy = torch.einsum("nqhd,nkhd->nhqk", queries, keys)
        if mask is not None:
            energy = energy.masked_fill(mask == 0, float("-1e20"))
        attention = torch.softmax(energy / self.head_dim**0.5, dim=3)
        out = torch.einsum("nhql,nlhd->nqhd", attention, values)
        return self.fc_out(out.reshape(n, length, self.heads * self.head_dim))


def make():
    return SelfAttention(32, 4)
