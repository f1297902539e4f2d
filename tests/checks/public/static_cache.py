"""A cache of fixed length inside, filled at the positions that are passed, and one causal mask."""

import torch
from torch import nn
from torch.nn import functional as F


class KVCache(nn.Module):
    def __init__(self, max_batch_size, max_seq_length, n_heads, head_dim):
        super().__init__()
        shape = (max_batch_size, n_heads, max_seq_length, head_dim)
        self.register_buffer("k_cache", torch.zeros(shape))
        self.register_buffer("v_cache", torch.zeros(shape))

    def update(self, input_pos, k_val, v_val):
        batch = k_val.shape[0]
        self.k_cache[:batch, :, input_pos] = k_val
        self.v_cache[:batch, :, input_pos] = v_val
        return self.k_cache[:batch], self.v_cache[:batch]


class Attention(nn.Module):
    def __init__(self, dim, n_head, n_local_heads, max_seq_length=32):
        super().__init__()
        self.n_head, self.n_local_heads, self.head_dim = n_head, n_local_heads, dim // n_head
        self.wqkv = nn.Linear(dim, (n_head + 2 * n_local_heads) * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.kv_cache = KVCache(8, max_seq_length, n_local_heads, self.head_dim)
        mask = torch.tril(torch.ones(max_seq_length, max_seq_length, dtype=torch.bool))
        self.register_buffer("causal_mask", mask)

    def forward(self, x, input_pos):
        bsz, seqlen, dim = x.shape
        kv_size = self.n_local_heads * self.head_dim
        q, k, v = self.wqkv(x).split([dim, kv_size, kv_size], dim=-1)
        q = q.view(bsz, seqlen, self.n_head, self.head_dim).transpose(1, 2)
        k = k.view(bsz, seqlen, self.n_local_heads, self.head_dim).transpose(1, 2)
        v = v.view(bsz, seqlen, self.n_local_heads, self.head_dim).transpose(1, 2)
        k, v = self.kv_cache.update(input_pos, k, v)
        k = k.repeat_interleave(self.n_head // self.n_local_heads, dim=1)
        v = v.repeat_interleave(self.n_head // self.n_local_heads, dim=1)
        mask = self.causal_mask[None, None, input_pos]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0)
        return self.wo(y.transpose(1, 2).contiguous().view(bsz, seqlen, dim))


def make():
    return Attention(32, 4, 2)
