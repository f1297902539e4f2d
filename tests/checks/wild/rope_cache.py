import torch
from torch import nn
from torch.nn import functional as F


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class RopeAttention(nn.Module):
    def __init__(self, hidden_size=32, num_heads=4, base=10000.0):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, hidden_size // num_heads
        self.q_proj = nn.Linear(hidden_size, hidden_size)
        self.k_proj = nn.Linear(hidden_size, hidden_size)
        self.v_proj = nn.Linear(hidden_size, hidden_size)
        self.o_proj = nn.Linear(hidden_size, hidden_size)
        inv_freq = 1.0 / base ** (torch.arange(0, self.head_dim, 2).double() / self.head_dim)
        self.register_buffer("inv_freq", inv_freq)

    def rope(self, x, start):
        t = torch.arange(start, start + x.shape[2], device=x.device).to(self.inv_freq)
        emb = torch.cat([torch.outer(t, self.inv_freq)] * 2, dim=-1)
        return x * emb.cos().to(x) + rotate_half(x) * emb.sin().to(x)

    def forward(self, x, past_key_value=None, use_cache=False):
        B, L, _ = x.shape
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (t.view(B, L, self.num_heads, self.head_dim).transpose(1, 2) for t in (q, k, v))
        start = 0 if past_key_value is None else past_key_value[0].shape[2]
        q, k = self.rope(q, start), self.rope(k, start)
        if past_key_value is not None:
            k = torch.cat([past_key_value[0], k], dim=2)
            v = torch.cat([past_key_value[1], v], dim=2)
        mask = torch.ones(L, start + L, dtype=torch.bool).tril(diagonal=start)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        y = self.o_proj(y.transpose(1, 2).reshape(B, L, -1))
        return (y, (k, v)) if use_cache else y


make = RopeAttention
