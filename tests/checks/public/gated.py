"""A protein model's attention: with a bias of pairs and a gate on the heads' outputs."""

import torch
from torch import nn


class GatedAttention(nn.Module):
    def __init__(self, c_q, c_hidden, no_heads):
        super().__init__()
        self.c_hidden, self.no_heads = c_hidden, no_heads
        self.linear_q, self.linear_k, self.linear_v = (
            nn.Linear(c_q, c_hidden * no_heads, bias=False) for _ in range(3)
        )
        self.linear_g = nn.Linear(c_q, c_hidden * no_heads)
        self.linear_o = nn.Linear(c_hidden * no_heads, c_q)

    def forward(self, q_x, kv_x, mask_bias=None):
        q, k, v = self.linear_q(q_x), self.linear_k(kv_x), self.linear_v(kv_x)
        q, k, v = (t.view(*t.shape[:-1], self.no_heads, -1).transpose(-2, -3) for t in (q, k, v))
        a = torch.matmul(q / self.c_hidden**0.5, k.transpose(-1, -2))
        if mask_bias is not None:
            a = a + mask_bias
        o = torch.matmul(a.softmax(-1), v).transpose(-2, -3)
        g = self.linear_g(q_x).sigmoid()
        o = o * g.view(*g.shape[:-1], self.no_heads, -1)
        return self.linear_o(o.flatten(-2))


def make():
    return GatedAttention(32, 8, 4)
