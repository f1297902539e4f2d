"""Attention in windows of an image: a bias for each pair of places, from a table of offsets."""

import torch
from torch import nn


class WindowAttention(nn.Module):
    def __init__(self, dim, window_size, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        size = 2 * window_size - 1
        self.relative_position_bias_table = nn.Parameter(torch.zeros(size * size, num_heads))
        at = torch.arange(window_size)
        coords = torch.stack(torch.meshgrid(at, at, indexing="ij")).flatten(1)
        offsets = coords[:, :, None] - coords[:, None, :] + window_size - 1
        self.register_buffer("relative_position_index", offsets[0] * size + offsets[1])
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)

    def forward(self, x):
        windows, n, c = x.shape
        qkv = self.qkv(x).reshape(windows, n, 3, self.num_heads, c // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)]
        attn = attn + bias.view(n, n, -1).permute(2, 0, 1).unsqueeze(0)
        return self.proj((attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(windows, n, c))


def make():
    return WindowAttention(32, 3, 4)
