"""The residual and the norm inside, as in an early translator; the weights are returned too."""

import torch
from torch import nn
from torch.nn import functional as F


class MultiHeadAttention(nn.Module):
    def __init__(self, n_head, d_model, dropout=0.1):
        super().__init__()
        self.n_head = n_head
        self.w_qs, self.w_ks, self.w_vs = (nn.Linear(d_model, d_model, bias=False) for _ in "qkv")
        self.fc, self.dropout = nn.Linear(d_model, d_model, bias=False), nn.Dropout(dropout)
        self.layer_norm = nn.LayerNorm(d_model, eps=1e-6)

    def forward(self, q, k, v, mask=None):
        sz_b, len_q, residual = q.size(0), q.size(1), q
        q, k, v = (
            f(t).view(sz_b, t.size(1), self.n_head, -1).transpose(1, 2)
            for f, t in ((self.w_qs, q), (self.w_ks, k), (self.w_vs, v))
        )
        attn = torch.matmul(q / q.size(-1) ** 0.5, k.transpose(2, 3))
        if mask is not None:
            attn = attn.masked_fill(mask.unsqueeze(1) == 0, -1e9)
        attn = self.dropout(F.softmax(attn, dim=-1))
        out = torch.matmul(attn, v).transpose(1, 2).contiguous().view(sz_b, len_q, -1)
        return self.layer_norm(self.dropout(self.fc(out)) + residual), attn


def make():
    return MultiHeadAttention(4, 32)
