"""Small modules that several tests check."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from multihead.checks.discover import find_callee
from multihead.checks.facts import Facts


class Separate(nn.Module):
    """The plainest layer, with what differs between the tests as arguments."""

    def __init__(self, dim: int = 24, heads: int = 4, **changes: Any) -> None:
        super().__init__()
        self.num_heads, self.changes = heads, changes
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            f(x).view(batch, length, self.num_heads, -1).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            scale=self.changes.get("scale"),
            is_causal=self.changes.get("causal", False),
        )
        y = y if self.changes.get("mixed") else y.transpose(1, 2)
        return self.o(y.reshape(batch, length, -1))


def facts_of(target: Any, *, causal: bool | None = None, num_heads: int | None = None) -> Facts:
    callee = find_callee(target, {}, num_heads)
    return Facts(callee, causal, callee.module if callee.module is not None else callee.function)
