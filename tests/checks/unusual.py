"""Attention whose projections are kept in unusual ways; each remembers its weights in `used`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WIDTH, HEADS, HEAD = 32, 4, 8


class Usual(nn.Module):
    """Attention beside a residual, after a norm; subclasses replace some of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.norm = nn.LayerNorm(WIDTH)
        self.make()

    def make(self) -> None:
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(WIDTH, WIDTH) for _ in range(4)
        )

    def project(self, y: Tensor) -> Any:
        return (split(f(y)) for f in (self.q_proj, self.k_proj, self.v_proj))

    def weigh(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)

    def output(self, z: Tensor, y: Tensor) -> Tensor:
        return self.o_proj(z.transpose(1, 2).flatten(2))

    def finish(self, x: Tensor, y: Tensor, out: Tensor) -> Tensor:
        return x + out

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = self.project(y)
        self.used = self.weigh(q, k)
        return self.finish(x, y, self.output(self.used @ v, y))


def split(t: Tensor) -> Tensor:
    return t.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class HeadLists(Usual):
    """A list of Linear modules for the heads of each projection."""

    def make(self) -> None:
        super().make()
        del self.q_proj, self.k_proj, self.v_proj
        for name in "qkv":
            heads = nn.ModuleList(nn.Linear(WIDTH, HEAD) for _ in range(HEADS))
            setattr(self, f"{name}_heads", heads)

    def project(self, y: Tensor) -> Any:
        lists = (self.q_heads, self.k_heads, self.v_heads)
        return (torch.stack([f(y) for f in heads], 1) for heads in lists)


class LowRank(Usual):
    """W_Q, W_K and W_V are products of two, here of modules."""

    def make(self) -> None:
        super().make()
        for name in "qkv":
            factors = nn.Sequential(nn.Linear(WIDTH, 6, bias=False), nn.Linear(6, WIDTH))
            setattr(self, f"{name}_proj", factors)


class LowRankParameters(Usual):
    def make(self) -> None:
        super().make()
        del self.q_proj, self.k_proj, self.v_proj
        for name in "qkv":
            setattr(self, f"{name}_a", nn.Parameter(torch.randn(WIDTH, 3)))
            setattr(self, f"{name}_b", nn.Parameter(torch.randn(3, WIDTH)))

    def project(self, y: Tensor) -> Any:
        factors = ((self.q_a, self.q_b), (self.k_a, self.k_b), (self.v_a, self.v_b))
        return (split(y @ a @ b) for a, b in factors)


class SharedByHeads(Usual):
    """One small matrix for all heads, here with the axis of heads after that of tokens."""

    def make(self) -> None:
        self.queries, self.keys, self.values = (nn.Linear(HEAD, HEAD) for _ in range(3))
        self.o_proj = nn.Linear(WIDTH, WIDTH)

    def project(self, y: Tensor) -> Any:
        y = y.unflatten(-1, (HEADS, HEAD))
        return (f(y).transpose(1, 2) for f in (self.queries, self.keys, self.values))


class SharedHeadsFirst(SharedByHeads):
    def project(self, y: Tensor) -> Any:
        return (f(split(y)) for f in (self.queries, self.keys, self.values))


class SharedInALoop(SharedByHeads):
    def project(self, y: Tensor) -> Any:
        heads = y.split(HEAD, -1)
        return (
            torch.stack([f(h) for h in heads], 1) for f in (self.queries, self.keys, self.values)
        )


class Numbered(Usual):
    """Names that show no projection; values first, W_O third."""

    def make(self) -> None:
        self.w1, self.w2, self.w3, self.w4 = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def project(self, y: Tensor) -> Any:
        return (split(f(y)) for f in (self.w4, self.w2, self.w1))

    def output(self, z: Tensor, y: Tensor) -> Tensor:
        return self.w3(z.transpose(1, 2).flatten(2))


class Listed(Numbered):
    def make(self) -> None:
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    w1 = property(lambda self: self.blocks[0])
    w2 = property(lambda self: self.blocks[1])
    w3 = property(lambda self: self.blocks[2])
    w4 = property(lambda self: self.blocks[3])


class Stacked(Numbered):
    """One parameter `[4, D, D]`."""

    def make(self) -> None:
        self.stack = nn.Parameter(torch.randn(4, WIDTH, WIDTH))

    w1 = property(lambda self: lambda x: x @ self.stack[0])
    w2 = property(lambda self: lambda x: x @ self.stack[1])
    w3 = property(lambda self: lambda x: x @ self.stack[2])
    w4 = property(lambda self: lambda x: x @ self.stack[3])


class Einsum(Usual):
    """Parameters `[H, D, E]` and `[H, E, D]`."""

    def make(self) -> None:
        for name in "qkv":
            setattr(self, f"w_{name}", nn.Parameter(torch.randn(HEADS, WIDTH, HEAD)))
        self.w_o = nn.Parameter(torch.randn(HEADS, HEAD, WIDTH))

    def project(self, y: Tensor) -> Any:
        weights = (self.w_q, self.w_k, self.w_v)
        return (torch.einsum("bld,hde->bhle", y, w) for w in weights)

    def output(self, z: Tensor, y: Tensor) -> Tensor:
        return torch.einsum("bhle,hed->bld", z, self.w_o)


class Latent(Usual):
    """Latent attention, its matrices called as in the paper."""

    def make(self) -> None:
        self.w_dkv, self.w_q = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, WIDTH)
        self.w_uk, self.w_uv = (nn.Linear(12, WIDTH, bias=False) for _ in range(2))
        self.w_o, self.kv_norm = nn.Linear(WIDTH, WIDTH), nn.RMSNorm(12)

    def project(self, y: Tensor) -> Any:
        latent = self.kv_norm(self.w_dkv(y))
        return split(self.w_q(y)), split(self.w_uk(latent)), split(self.w_uv(latent))

    def output(self, z: Tensor, y: Tensor) -> Tensor:
        return self.w_o(z.transpose(1, 2).flatten(2))


class FusedLatent(Usual):
    """Latent attention as DeepSeek's code has it, with a part of the key that all heads share."""

    def make(self) -> None:
        self.kv_a, self.kv_b = nn.Linear(WIDTH, 12 + 4), nn.Linear(12, 2 * WIDTH)
        self.q_proj, self.o_proj = nn.Linear(WIDTH, HEADS * (HEAD + 4)), nn.Linear(WIDTH, WIDTH)
        self.kv_norm = nn.RMSNorm(12)

    def project(self, y: Tensor) -> Any:
        latent, shared = self.kv_a(y).split([12, 4], -1)
        k, v = split(self.kv_b(self.kv_norm(latent))).chunk(2, -1)
        k = torch.cat([k, shared[:, None].expand(-1, HEADS, -1, -1)], -1)
        return split(self.q_proj(y)), k, v


class Narrow(Usual):
    """Inputs of four features: five tokens are never independent."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.norm = nn.LayerNorm(4)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(4, 4) for _ in range(4))

    def project(self, y: Tensor) -> Any:
        return (
            f(y).unflatten(-1, (2, 2)).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
