"""A softmax with one more in its sum, so that a head may read next to nothing."""

import torch
from torch import nn


def softmax_one(x):
    largest = x.amax(-1, keepdim=True).clamp(min=0)
    e = (x - largest).exp()
    return e / ((-largest).exp() + e.sum(-1, keepdim=True))


class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for f in (self.wq, self.wk, self.wv)
        )
        scores = torch.einsum("bhld,bhsd->bhls", q, k) / q.shape[-1] ** 0.5
        return self.wo((softmax_one(scores) @ v).transpose(1, 2).flatten(2))


def make():
    return Attention(32, 4)
