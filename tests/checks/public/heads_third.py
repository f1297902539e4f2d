"""Operators of the layout [B, M, H, K], with a bias as an argument."""

from torch import nn


def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None):
    scale = 1 / query.shape[-1] ** 0.5 if scale is None else scale
    query, key, value = (t.transpose(1, 2) for t in (query * scale, key, value))
    attn = query @ key.transpose(-2, -1)
    if attn_bias is not None:
        attn = attn + attn_bias
    attn = nn.functional.dropout(attn.softmax(-1), p, training=p > 0)
    return (attn @ value).transpose(1, 2)


class MemEffAttention(nn.Module):
    def __init__(self, dim, num_heads, attn_drop=0.1):
        super().__init__()
        self.num_heads, self.attn_drop = num_heads, attn_drop
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)

    def forward(self, x, attn_bias=None):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).unbind(2)
        p = self.attn_drop if self.training else 0.0
        x = memory_efficient_attention(q, k, v, attn_bias=attn_bias, p=p)
        return self.proj(x.reshape(B, N, C))


def make():
    return MemEffAttention(32, 4)
