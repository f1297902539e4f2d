"""Keys and values of earlier calls as a tuple, or as one stacked tensor in the result."""

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, nx, n_head):
        super().__init__()
        self.n_head, self.split_size, self.scale = n_head, nx, True
        self.c_attn, self.c_proj = nn.Linear(nx, 3 * nx), nn.Linear(nx, nx)
        self.register_buffer("bias", torch.tril(torch.ones(256, 256))[None, None])

    def _attn(self, q, k, v):
        w = torch.matmul(q, k)
        if self.scale:
            w = w / v.size(-1) ** 0.5
        nd, ns = w.size(-2), w.size(-1)
        b = self.bias[:, :, ns - nd : ns, :ns]
        w = w * b - 1e10 * (1 - b)
        return torch.matmul(nn.functional.softmax(w, dim=-1), v)

    def split_heads(self, x, k=False):
        x = x.view(*x.size()[:-1], self.n_head, x.size(-1) // self.n_head)
        return x.permute(0, 2, 3, 1) if k else x.permute(0, 2, 1, 3)

    def forward(self, x, layer_past=None):
        query, key, value = self.c_attn(x).split(self.split_size, dim=2)
        query, key, value = (
            self.split_heads(query),
            self.split_heads(key, k=True),
            self.split_heads(value),
        )
        if layer_past is not None:
            past_key, past_value = layer_past[0].transpose(-2, -1), layer_past[1]
            key = torch.cat((past_key, key), dim=-1)
            value = torch.cat((past_value, value), dim=-2)
        present = torch.stack((key.transpose(-2, -1), value))
        a = self._attn(query, key, value).permute(0, 2, 1, 3).contiguous()
        return self.c_proj(a.view(*a.size()[:-2], -1)), present


def make():
    return Attention(32, 4)
