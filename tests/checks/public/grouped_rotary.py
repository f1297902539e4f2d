"""Grouped queries with rotary positions of neighbouring features, a norm of queries and keys."""

import torch
from torch import nn


class RotaryPositionalEmbeddings(nn.Module):
    def __init__(self, dim, max_seq_len=64, base=10_000):
        super().__init__()
        theta = 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)
        angles = torch.einsum("i,j->ij", torch.arange(max_seq_len).float(), theta)
        self.register_buffer("cache", torch.stack([angles.cos(), angles.sin()], dim=-1))

    def forward(self, x):
        seq_len = x.size(1)
        xshaped = x.reshape(*x.shape[:-1], -1, 2)
        rope = self.cache[:seq_len].view(1, seq_len, 1, -1, 2)
        x_out = torch.stack(
            [
                xshaped[..., 0] * rope[..., 0] - xshaped[..., 1] * rope[..., 1],
                xshaped[..., 1] * rope[..., 0] + xshaped[..., 0] * rope[..., 1],
            ],
            dim=-1,
        )
        return x_out.flatten(3)


class GroupedAttention(nn.Module):
    def __init__(self, embed_dim, num_heads, num_kv_heads):
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = embed_dim // num_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.k_proj = nn.Linear(embed_dim, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(embed_dim, num_kv_heads * self.head_dim, bias=False)
        self.output_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(self.head_dim), nn.RMSNorm(self.head_dim)
        self.pos_embeddings = RotaryPositionalEmbeddings(self.head_dim)

    def forward(self, x):
        b, s, _ = x.shape
        q_per_kv = self.num_heads // self.num_kv_heads
        q = self.q_norm(self.q_proj(x).view(b, s, self.num_heads, self.head_dim))
        k = self.k_norm(self.k_proj(x).view(b, s, self.num_kv_heads, self.head_dim))
        v = self.v_proj(x).view(b, s, self.num_kv_heads, self.head_dim)
        q, k = self.pos_embeddings(q), self.pos_embeddings(k)
        k, v = (
            t[:, :, :, None].expand(-1, -1, -1, q_per_kv, -1).reshape(b, s, self.num_heads, -1)
            for t in (k, v)
        )
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output_proj(out.transpose(1, 2).reshape(b, s, -1))


def make():
    return GroupedAttention(32, 4, 2)
