"""The difference of two softmaxes, with a factor that is learned and a norm of each head."""

import math

import torch
from torch import nn


class DifferentialAttention(nn.Module):
    def __init__(self, embed_dim, num_heads, lambda_init=0.8):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads // 2
        self.lambda_init = lambda_init
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(embed_dim, embed_dim, bias=False) for _ in range(4)
        )
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(0.1 * torch.randn(self.head_dim)) for _ in range(4)
        )
        self.subln = nn.RMSNorm(2 * self.head_dim, eps=1e-5)

    def forward(self, x):
        bsz, length, _ = x.size()
        q = self.q_proj(x).view(bsz, length, 2 * self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(bsz, length, 2 * self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(bsz, length, self.num_heads, 2 * self.head_dim).transpose(1, 2)
        weights = (q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)).softmax(dim=-1)
        first = torch.exp(torch.sum(self.lambda_q1 * self.lambda_k1, dim=-1))
        second = torch.exp(torch.sum(self.lambda_q2 * self.lambda_k2, dim=-1))
        weights = weights.view(bsz, self.num_heads, 2, length, length)
        weights = weights[:, :, 0] - (first - second + self.lambda_init) * weights[:, :, 1]
        attn = self.subln(weights @ v) * (1 - self.lambda_init)
        return self.out_proj(attn.transpose(1, 2).reshape(bsz, length, -1))


def make():
    return DifferentialAttention(32, 2)
