"""A bias for each head and distance, from a table."""

import torch
from torch import nn


class BiasedAttention(nn.Module):
    def __init__(self, dim, n_heads, max_distance=200):
        super().__init__()
        self.n_heads, self.max_distance = n_heads, max_distance
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.relative_attention_bias = nn.Embedding(2 * max_distance + 1, n_heads)

    def compute_bias(self, length, device):
        at = torch.arange(length, device=device)
        distance = (at[None] - at[:, None]).clamp(-self.max_distance, self.max_distance)
        return self.relative_attention_bias(distance + self.max_distance).permute(2, 0, 1)[None]

    def forward(self, hidden_states, mask=None):
        n, length, dim = hidden_states.shape

        def shape(states):
            return states.view(n, -1, self.n_heads, dim // self.n_heads).transpose(1, 2)

        q, k, v = (shape(f(hidden_states)) for f in (self.q, self.k, self.v))
        scores = torch.matmul(q, k.transpose(3, 2)) / (dim // self.n_heads) ** 0.5
        scores = scores + self.compute_bias(length, scores.device)
        if mask is not None:
            scores = scores + mask
        out = torch.matmul(scores.softmax(-1), v)
        return (self.o(out.transpose(1, 2).reshape(n, length, dim)), None)


def make():
    return BiasedAttention(32, 4)
