import torch
from torch import nn
from torch.nn import functional as F


class TimeFirstAttention(nn.Module):
    """[time, batch, channels], heads folded into the batch, as speech and translation toolkits have it."""

    batch_first = False

    def __init__(self, embed_dim=28, num_heads=4, dropout=0.1):
        super().__init__()
        self.embed_dim, self.num_heads, self.dropout = embed_dim, num_heads, dropout
        self.head_dim = embed_dim // num_heads
        self.in_proj = nn.Linear(embed_dim, 3 * embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x, need_weights=True, attention_mask=None):
        T, B, C = x.shape
        q, k, v = self.in_proj(x).chunk(3, dim=-1)
        q = q * self.head_dim**-0.5
        q, k, v = (t.contiguous().view(T, B * self.num_heads, self.head_dim).transpose(0, 1) for t in (q, k, v))
        w = torch.bmm(q, k.transpose(1, 2))
        if attention_mask is not None:
            hidden = ~attention_mask.bool()[:, None, None, :]
            w = w.view(B, self.num_heads, T, T).masked_fill(hidden, float("-inf"))
            w = w.softmax(-1).masked_fill(hidden, 0.0).view(-1, T, T)
        else:
            w = F.softmax(w, dim=-1)
        w = F.dropout(w, p=self.dropout, training=self.training)
        y = torch.bmm(w, v).transpose(0, 1).contiguous().view(T, B, C)
        y = self.out_proj(y)
        return (y, w.view(B, self.num_heads, T, T).mean(1)) if need_weights else (y, None)


make = TimeFirstAttention
