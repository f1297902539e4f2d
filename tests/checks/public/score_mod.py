"""Scores and masks changed by functions of the indices of batch, head, query and key."""

import torch
from torch import nn


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def soft_distance(score, b, h, q_idx, kv_idx):
    return score + (kv_idx - q_idx) * torch.exp2(-(h + 1.0))


def flex(query, key, value, score_mod, mask_mod):
    scores = query @ key.transpose(-2, -1) / query.size(-1) ** 0.5
    b, h, q_idx, kv_idx = (
        torch.arange(n, device=query.device).view([-1 if i == j else 1 for j in range(4)])
        for i, n in enumerate(scores.shape)
    )
    scores = score_mod(scores, b, h, q_idx, kv_idx)
    scores = torch.where(mask_mod(b, h, q_idx, kv_idx), scores, -float("inf"))
    return torch.softmax(scores, dim=-1) @ value


class FlexLayer(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        q, k, v = (
            f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(flex(q, k, v, soft_distance, causal).transpose(1, 2).flatten(2))


def make():
    return FlexLayer(32, 4)
