"""ALiBi: a bias that grows with the distance, of another slope in each head."""

import torch
from torch import nn


def get_slopes(n_heads):
    start = 2 ** (-8 / n_heads)
    return torch.tensor([start ** (i + 1) for i in range(n_heads)])


class ALiBiAttention(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.Wqkv, self.out_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.register_buffer("slopes", get_slopes(n_heads))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.Wqkv(x).chunk(3, dim=2)
        q, k, v = (
            z.reshape(b, t, self.n_heads, c // self.n_heads).transpose(1, 2) for z in (q, k, v)
        )
        at = torch.arange(t, device=x.device)
        bias = self.slopes[:, None, None] * (at[None, :] - at[:, None])
        w = q @ k.transpose(-2, -1) / (c // self.n_heads) ** 0.5 + bias
        w = w.masked_fill(at[None, :] > at[:, None], float("-inf"))
        return self.out_proj((w.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c))


def make():
    return ALiBiAttention(32, 4)
