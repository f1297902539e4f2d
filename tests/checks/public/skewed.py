"""Relative positions in the manner of music models: queries times embeddings of distances, skewed."""

import math

import torch
from torch import nn
from torch.nn import functional as F


class RelativeGlobalAttention(nn.Module):
    def __init__(self, d_model, num_heads, max_len=256):
        super().__init__()
        self.num_heads, self.max_len = num_heads, max_len
        self.key, self.value, self.query = (nn.Linear(d_model, d_model) for _ in range(3))
        self.proj = nn.Linear(d_model, d_model)
        self.Er = nn.Parameter(torch.randn(max_len, d_model // num_heads))
        self.register_buffer("mask", torch.tril(torch.ones(max_len, max_len))[None, None])

    def skew(self, q_er):
        n, h, rows, columns = q_er.shape
        return F.pad(q_er, (1, 0)).reshape(n, h, columns + 1, rows)[:, :, 1:]

    def forward(self, x):
        batch_size, seq_len, _ = x.shape
        k_t = self.key(x).reshape(batch_size, seq_len, self.num_heads, -1).permute(0, 2, 3, 1)
        v = self.value(x).reshape(batch_size, seq_len, self.num_heads, -1).transpose(1, 2)
        q = self.query(x).reshape(batch_size, seq_len, self.num_heads, -1).transpose(1, 2)
        s_rel = self.skew(torch.matmul(q, self.Er[self.max_len - seq_len :].transpose(0, 1)))
        attn = (torch.matmul(q, k_t) + s_rel) / math.sqrt(q.size(-1))
        attn = attn.masked_fill(self.mask[:, :, :seq_len, :seq_len] == 0, float("-inf"))
        out = torch.matmul(F.softmax(attn, dim=-1), v).transpose(1, 2)
        return self.proj(out.reshape(batch_size, seq_len, -1))


def make():
    return RelativeGlobalAttention(32, 4)
