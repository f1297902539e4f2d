"""Attention of a diffusion model: with its inputs or a context, heads in the batch, a mask of keys."""

import torch
from einops import rearrange, repeat
from torch import einsum, nn


class CrossAttention(nn.Module):
    def __init__(self, query_dim, context_dim=None, heads=4, dim_head=8):
        super().__init__()
        inner_dim = dim_head * heads
        context_dim = query_dim if context_dim is None else context_dim
        self.scale, self.heads = dim_head**-0.5, heads
        self.to_q = nn.Linear(query_dim, inner_dim, bias=False)
        self.to_k = nn.Linear(context_dim, inner_dim, bias=False)
        self.to_v = nn.Linear(context_dim, inner_dim, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner_dim, query_dim), nn.Dropout(0.0))

    def forward(self, x, context=None, mask=None):
        h = self.heads
        context = x if context is None else context
        q, k, v = (
            rearrange(t, "b n (h d) -> (b h) n d", h=h)
            for t in (self.to_q(x), self.to_k(context), self.to_v(context))
        )
        sim = einsum("b i d, b j d -> b i j", q, k) * self.scale
        if mask is not None:
            mask = repeat(rearrange(mask, "b ... -> b (...)"), "b j -> (b h) () j", h=h)
            sim.masked_fill_(~mask, -torch.finfo(sim.dtype).max)
        out = einsum("b i j, b j d -> b i d", sim.softmax(dim=-1), v)
        return self.to_out(rearrange(out, "(b h) n d -> b n (h d)", h=h))


def make():
    return CrossAttention(32, 20)
