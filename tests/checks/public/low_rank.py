"""Queries and keys by way of fewer features."""

from torch import nn


class LowRankAttention(nn.Module):
    def __init__(self, dim, heads, rank):
        super().__init__()
        self.heads = heads
        self.q_down, self.q_up = nn.Linear(dim, rank, bias=False), nn.Linear(rank, dim, bias=False)
        self.k_down, self.k_up = nn.Linear(dim, rank, bias=False), nn.Linear(rank, dim, bias=False)
        self.v_proj, self.o_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.q_up(self.q_down(x)), self.k_up(self.k_down(x)), self.v_proj(x)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))


def make():
    return LowRankAttention(32, 4, 12)
