"""A learned key and value that every query may read, one head of keys for all queries."""

import torch
from einops import rearrange, repeat
from torch import einsum, nn


class NullAttention(nn.Module):
    def __init__(self, dim, heads=4, dim_head=8):
        super().__init__()
        self.heads, self.scale = heads, dim_head**-0.5
        self.null_kv = nn.Parameter(torch.randn(2, dim_head))
        self.to_q = nn.Linear(dim, dim_head * heads, bias=False)
        self.to_kv = nn.Linear(dim, dim_head * 2, bias=False)
        self.to_out = nn.Linear(dim_head * heads, dim, bias=False)

    def forward(self, x, mask=None):
        q, k, v = self.to_q(x), *self.to_kv(x).chunk(2, dim=-1)
        q = rearrange(q, "b n (h d) -> b h n d", h=self.heads) * self.scale
        nk, nv = (repeat(t, "d -> b 1 d", b=x.shape[0]) for t in self.null_kv.unbind(dim=-2))
        k, v = torch.cat((nk, k), dim=-2), torch.cat((nv, v), dim=-2)
        sim = einsum("b h i d, b j d -> b h i j", q, k)
        if mask is not None:
            mask = nn.functional.pad(mask, (1, 0), value=True)
            sim = sim.masked_fill(~rearrange(mask, "b j -> b 1 1 j"), -torch.finfo(sim.dtype).max)
        out = einsum("b h i j, b j d -> b h i d", sim.softmax(dim=-1), v)
        return self.to_out(rearrange(out, "b h n d -> b n (h d)"))


def make():
    return NullAttention(32)
