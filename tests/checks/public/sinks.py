"""A learned score a head that takes a part of the weights: rows sum to less than one."""

import torch
from torch import nn


class SinkAttention(nn.Module):
    def __init__(self, hidden_size, num_heads, num_kv_heads):
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = hidden_size // num_heads
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size)
        self.sinks = nn.Parameter(torch.randn(num_heads))

    def forward(self, hidden_states):
        n, length, _ = hidden_states.shape
        q = self.q_proj(hidden_states).view(n, length, self.num_heads, -1).transpose(1, 2)
        k = self.k_proj(hidden_states).view(n, length, self.num_kv_heads, -1).transpose(1, 2)
        v = self.v_proj(hidden_states).view(n, length, self.num_kv_heads, -1).transpose(1, 2)
        k, v = (t.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for t in (k, v))
        scores = q @ k.mT * self.head_dim**-0.5
        hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
        sinks = self.sinks.view(1, -1, 1, 1).expand(n, -1, length, 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return self.o_proj((weights @ v).transpose(1, 2).reshape(n, length, -1))


def make():
    return SinkAttention(32, 4, 2)
