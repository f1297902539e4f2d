"""Latents that read media and themselves: keys and values are of both, each with its norm."""

import torch
from einops import rearrange
from torch import einsum, nn


class PerceiverAttention(nn.Module):
    def __init__(self, dim, dim_head=8, heads=4):
        super().__init__()
        self.scale, self.heads = dim_head**-0.5, heads
        self.norm_media, self.norm_latents = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.to_q = nn.Linear(dim, dim_head * heads, bias=False)
        self.to_kv = nn.Linear(dim, dim_head * heads * 2, bias=False)
        self.to_out = nn.Linear(dim_head * heads, dim, bias=False)

    def forward(self, latents, media):
        media, latents = self.norm_media(media), self.norm_latents(latents)
        q = rearrange(self.to_q(latents), "b n (h d) -> b h n d", h=self.heads) * self.scale
        k, v = self.to_kv(torch.cat((media, latents), dim=-2)).chunk(2, dim=-1)
        k = rearrange(k, "b n (h d) -> b h n d", h=self.heads)
        v = rearrange(v, "b n (h d) -> b h n d", h=self.heads)
        sim = einsum("... i d, ... j d -> ... i j", q, k)
        attn = (sim - sim.amax(dim=-1, keepdim=True).detach()).softmax(dim=-1)
        out = einsum("... i j, ... j d -> ... i d", attn, v)
        return self.to_out(rearrange(out, "b h n d -> b n (h d)"))


def make():
    return PerceiverAttention(32)
