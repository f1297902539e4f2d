"""Rotary positions of a quarter of each head; queries, keys and values of a head side by side."""

import torch
from torch import nn


class RotaryEmbedding(nn.Module):
    def __init__(self, dim, base=10000):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / base ** (torch.arange(0, dim, 2) / dim))

    def forward(self, length):
        t = torch.arange(length, device=self.inv_freq.device).to(self.inv_freq)
        freqs = torch.einsum("i,j->ij", t, self.inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos()[None, None], emb.sin()[None, None]


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class NeoXAttention(nn.Module):
    def __init__(self, hidden_size, num_attention_heads, rotary_pct=0.25):
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.head_size = hidden_size // num_attention_heads
        self.rotary_ndims = int(self.head_size * rotary_pct)
        self.rotary_emb = RotaryEmbedding(self.rotary_ndims)
        self.norm_factor = self.head_size**-0.5
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def rotate(self, x, cos, sin):
        rot, rest = x[..., : self.rotary_ndims], x[..., self.rotary_ndims :]
        return torch.cat((rot * cos + rotate_half(rot) * sin, rest), dim=-1)

    def forward(self, hidden_states):
        n, length, dim = hidden_states.shape
        qkv = self.query_key_value(hidden_states)
        qkv = qkv.view(n, length, self.num_attention_heads, 3 * self.head_size)
        q, k, v = qkv.permute(0, 2, 1, 3).split(self.head_size, dim=-1)
        cos, sin = self.rotary_emb(length)
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        causal = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        scores = torch.matmul(q, k.transpose(-1, -2)) * self.norm_factor
        scores = scores.masked_fill(~causal, torch.finfo(scores.dtype).min)
        out = torch.matmul(scores.softmax(-1), v)
        return self.dense(out.permute(0, 2, 1, 3).reshape(n, length, dim))


def make():
    return NeoXAttention(64, 4)
