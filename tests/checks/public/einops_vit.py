"""A vision transformer's attention with einops, its norm inside."""

import torch
from einops import rearrange
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads=4, dim_head=8, dropout=0.1):
        super().__init__()
        inner = dim_head * heads
        self.heads, self.scale = heads, dim_head**-0.5
        self.norm = nn.LayerNorm(dim)
        self.attend, self.dropout = nn.Softmax(dim=-1), nn.Dropout(dropout)
        self.to_qkv = nn.Linear(dim, inner * 3, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner, dim), nn.Dropout(dropout))

    def forward(self, x):
        qkv = self.to_qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=self.heads) for t in qkv)
        dots = torch.matmul(q, k.transpose(-1, -2)) * self.scale
        out = torch.matmul(self.dropout(self.attend(dots)), v)
        return self.to_out(rearrange(out, "b h n d -> b n (h d)"))


def make():
    return Attention(24)
