"""A cache with an `update` method, for one layer among several, and a result with names."""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F


class Output(NamedTuple):
    weights: torch.Tensor | None
    hidden_states: torch.Tensor


class CachedAttention(nn.Module):
    def __init__(self, dim, num_heads, num_kv_heads, layer_idx=0):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.layer_idx = num_heads, num_kv_heads, layer_idx
        self.wq, self.wo = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.wk, self.wv = (nn.Linear(dim, dim // num_heads * num_kv_heads) for _ in range(2))

    def forward(self, x, past_key_values=None):
        bsz, seqlen, dim = x.shape
        q = self.wq(x).view(bsz, seqlen, self.num_heads, -1).transpose(1, 2)
        k = self.wk(x).view(bsz, seqlen, self.num_kv_heads, -1).transpose(1, 2)
        v = self.wv(x).view(bsz, seqlen, self.num_kv_heads, -1).transpose(1, 2)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        allowed = torch.ones(seqlen, k.shape[2], dtype=torch.bool, device=x.device)
        allowed = allowed.tril(k.shape[2] - seqlen)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)
        return Output(None, self.wo(out.transpose(1, 2).reshape(bsz, seqlen, dim)))


def make():
    return CachedAttention(32, 4, 2)
