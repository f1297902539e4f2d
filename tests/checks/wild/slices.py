import torch
from torch import nn


class SlicedAttention(nn.Module):
    """All heads' projections in one matrix, one head after another."""

    def __init__(self, dim=24, n_heads=3):
        super().__init__()
        self.n_heads = n_heads
        self.d = dim // n_heads
        self.fc_q = nn.Linear(dim, dim)
        self.fc_k = nn.Linear(dim, dim)
        self.fc_v = nn.Linear(dim, dim)
        self.fc_out = nn.Linear(dim, dim)

    def forward(self, x):
        Q, K, V = self.fc_q(x), self.fc_k(x), self.fc_v(x)
        outputs = []
        for h in range(self.n_heads):
            part = slice(h * self.d, (h + 1) * self.d)
            q, k, v = Q[..., part], K[..., part], V[..., part]
            scores = torch.bmm(q, k.transpose(1, 2)) / self.d**0.5
            outputs.append(torch.bmm(torch.softmax(scores, dim=2), v))
        return self.fc_out(torch.cat(outputs, dim=2))


make = SlicedAttention
