"""Sinusoids of distances, and biases for content and position, as in long contexts' first models."""

import torch
from torch import nn


class RelPartialAttention(nn.Module):
    def __init__(self, n_head, d_model):
        super().__init__()
        self.n_head, self.d_head = n_head, d_model // n_head
        self.qkv_net = nn.Linear(d_model, 3 * d_model, bias=False)
        self.r_net = nn.Linear(d_model, d_model, bias=False)
        self.o_net = nn.Linear(d_model, d_model, bias=False)
        self.r_w_bias = nn.Parameter(torch.zeros(n_head, self.d_head))
        self.r_r_bias = nn.Parameter(torch.zeros(n_head, self.d_head))
        self.register_buffer("inv_freq", 10000.0 ** (-torch.arange(0, d_model, 2) / d_model))

    def forward(self, w):
        n, length, dim = w.shape
        q, k, v = self.qkv_net(w).view(n, length, 3, self.n_head, self.d_head).unbind(2)
        at = torch.arange(length, device=w.device)
        distance = (at[:, None] - at[None, :]).to(w.dtype)
        angles = distance[..., None] * self.inv_freq
        r = self.r_net(torch.cat([angles.sin(), angles.cos()], -1))
        r = r.view(length, length, self.n_head, self.d_head)
        content = torch.einsum("bind,bjnd->bnij", q + self.r_w_bias, k)
        position = torch.einsum("bind,ijnd->bnij", q + self.r_r_bias, r)
        scores = (content + position) / self.d_head**0.5
        scores = scores.masked_fill(at[None, :] > at[:, None], float("-inf"))
        out = torch.einsum("bnij,bjnd->bind", scores.softmax(-1), v)
        return self.o_net(out.reshape(n, length, dim))


def make():
    return RelPartialAttention(4, 32)
