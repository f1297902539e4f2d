"""A detector's cross attention: embeddings of positions are added to queries and keys, not values."""

import torch
from torch import nn


class CrossAttentionLayer(nn.Module):
    def __init__(self, d_model, nhead, dropout=0.1):
        super().__init__()
        self.nhead = nhead
        self.q_proj, self.k_proj = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.v_proj, self.out_proj = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def with_pos_embed(self, tensor, pos):
        return tensor if pos is None else tensor + pos

    def forward(self, tgt, memory, memory_key_padding_mask=None, pos=None, query_pos=None):
        q = self.q_proj(self.with_pos_embed(tgt, query_pos))
        k = self.k_proj(self.with_pos_embed(memory, pos))
        q, k, v = (
            t.unflatten(-1, (self.nhead, -1)).permute(0, 2, 1, 3)
            for t in (q, k, self.v_proj(memory))
        )
        attn = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        if memory_key_padding_mask is not None:
            attn = attn.masked_fill(memory_key_padding_mask[:, None, None], float("-inf"))
        out = torch.matmul(self.dropout(attn.softmax(-1)), v)
        return self.out_proj(out.permute(0, 2, 1, 3).flatten(2))


def make():
    return CrossAttentionLayer(32, 4)
