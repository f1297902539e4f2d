"""Embeddings of distances, added to keys and to values (Shaw et al., 2018)."""

import torch
from torch import nn


class RelativeAttention(nn.Module):
    def __init__(self, dim, heads, max_distance=200):
        super().__init__()
        self.heads, self.max_distance = heads, max_distance
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim) for _ in range(4))
        self.rel_k = nn.Embedding(2 * max_distance + 1, dim // heads)
        self.rel_v = nn.Embedding(2 * max_distance + 1, dim // heads)

    def forward(self, x):
        q, k, v = (
            f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        at = torch.arange(x.shape[1], device=x.device)
        distance = (at - at[:, None]).clamp(-self.max_distance, self.max_distance)
        distance = distance + self.max_distance
        scores = q @ k.mT + torch.einsum("bhid,ijd->bhij", q, self.rel_k(distance))
        weights = (scores / q.shape[-1] ** 0.5).softmax(-1)
        out = weights @ v + torch.einsum("bhij,ijd->bhid", weights, self.rel_v(distance))
        return self.o_proj(out.transpose(1, 2).flatten(2))


def make():
    return RelativeAttention(32, 4)
