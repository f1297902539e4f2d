"""Attention of other kinds than the plain one, right as it is: no false alarms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import multihead


class Base(nn.Module):
    def __init__(self, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.num_heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(dim, dim) for _ in range(4)
        )

    def qkv(self, x: Tensor) -> list[Tensor]:
        return [
            f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        ]

    def merged(self, out: Tensor) -> Tensor:
        return self.out_proj(out.transpose(1, 2).flatten(2))


class LearnedPositions(Base):
    def __init__(self) -> None:
        super().__init__()
        self.pos_emb = nn.Parameter(torch.zeros(1, 64, 32))

    def forward(self, x: Tensor) -> Tensor:
        return self.merged(
            F.scaled_dot_product_attention(*self.qkv(x + self.pos_emb[:, : x.shape[1]]))
        )


class Window(Base):
    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        window = (at[:, None] - at).abs() <= 1
        return self.merged(F.scaled_dot_product_attention(*self.qkv(x), attn_mask=window))


class SlidingWindow(Base):
    def forward(self, x: Tensor) -> Tensor:
        ahead = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        sliding = (ahead >= 0) & (ahead < 3)
        return self.merged(F.scaled_dot_product_attention(*self.qkv(x), attn_mask=sliding))


class Residual(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.merged(
            F.scaled_dot_product_attention(*self.qkv(self.norm(x)), is_causal=True)
        )


class MaskDemanded(Base):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        scores = (q @ k.mT) / q.shape[-1] ** 0.5 + mask
        return self.merged(torch.nan_to_num(scores.softmax(-1)) @ v)


class Lengths(Base):
    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: Tensor | None = None
    ) -> Tensor:
        q, k, v = self.qkv(queries)[0], self.qkv(keys)[1], self.qkv(values)[2]
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if valid_lens is None:
            return self.merged(scores.softmax(-1) @ v)
        hidden = (torch.arange(k.shape[2]) >= valid_lens[:, None])[:, None, None]
        return self.merged(
            scores.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0.0) @ v
        )


class Alibi(Base):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        at = torch.arange(x.shape[1])
        slopes = 2.0 ** -torch.arange(1, 5, dtype=x.dtype)
        scores = q @ k.mT / q.shape[-1] ** 0.5 - slopes[:, None, None] * (at[:, None] - at).abs()
        return self.merged(scores.masked_fill(at > at[:, None], -torch.inf).softmax(-1) @ v)


class CacheInside(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache_k", None)
        self.register_buffer("cache_v", None)

    def forward(self, x: Tensor, use_cache: bool = False) -> Tensor:
        q, k, v = self.qkv(x)
        if use_cache:
            if self.cache_k is not None:
                k, v = torch.cat([self.cache_k, k], 2), torch.cat([self.cache_v, v], 2)
            self.cache_k, self.cache_v = k, v
        future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(
            k.shape[2] - q.shape[2] + 1
        )
        return self.merged(
            (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(future, -torch.inf).softmax(-1) @ v
        )


class Additive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.W_q, self.W_k, self.w_v = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        features = torch.tanh(self.W_q(queries)[:, :, None] + self.W_k(keys)[:, None])
        return self.w_v(features).squeeze(-1).softmax(-1) @ values


class Linear(Base):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        return self.merged(q @ (k.mT @ v) / (q @ k.sum(2)[..., None]))


class Cosine(Base):
    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.full((4, 1, 1), 2.3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.logit_scale.exp()
        return self.merged(scores.softmax(-1) @ v)


class HalfAngles(Base):
    def forward(self, hidden: Tensor, *, freqs_cos: Tensor, freqs_sin: Tensor) -> Tensor:
        def turned(t: Tensor) -> Tensor:
            a, b = t.chunk(2, -1)
            return torch.cat([a * freqs_cos - b * freqs_sin, b * freqs_cos + a * freqs_sin], -1)

        q, k, v = self.qkv(hidden)
        return self.merged(F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True))


class Low(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(24, 8), nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.down(x)).tanh()
        return (y @ y.mT).softmax(-1) @ y


RECOMPUTED = [Window, SlidingWindow, MaskDemanded, Lengths, CacheInside, HalfAngles]
READ_OUT = [LearnedPositions, Residual, Alibi, Cosine]
OTHERS = [Additive, Linear, Low]


@pytest.mark.parametrize("kind", RECOMPUTED + READ_OUT + OTHERS)
def test_no_false_alarm(kind: Any) -> None:
    report = multihead.check(kind())
    assert report.verdict == ("partly judged" if kind in OTHERS else "right"), str(report)
    assert any(line.startswith("recomputed") for line in report.passed) == (kind in RECOMPUTED), (
        str(report)
    )
    assert ("KV cache" in report.passed) == (kind is CacheInside)
    assert ("not judged " in str(report)) == (kind in OTHERS)
    assert any(line.startswith("weights were read out") for line in report.passed) == (
        kind in (*READ_OUT, Linear)
    )


def test_modules_in_other_dtypes() -> None:
    assert multihead.check(Window().half()).ok and multihead.check(Window().bfloat16()).ok
