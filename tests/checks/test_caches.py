"""Caches of every kind: passed in, returned, internal; and their bugs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import multihead
from checks.samples import Separate, facts_of
from multihead.checks import NotApplicable
from multihead.checks.caches import find_wrong_caches


class Cached(nn.Module):
    """Keys and values in a cache of one of three kinds, with a bug on request."""

    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.num_heads, self.bug = 4, bug
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)

    def attend(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Any]:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 6)).permute(2, 0, 3, 1, 4)
        if past is not None:
            oldest = 1 if self.bug == "forgets" else 0
            k, v = (torch.cat([p[:, :, oldest:], x], 2) for p, x in zip(past, (k, v)))
        first = 0 if self.bug == "alignment" else k.shape[2] - q.shape[2]
        mask = torch.ones(q.shape[2], k.shape[2]).bool().tril(first)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2)), (k, v)


class Returned(Cached):
    def forward(self, x: Tensor, past_key_value: Any = None, use_cache: bool = False) -> Any:
        out, cache = self.attend(x, past_key_value)
        return (out, cache) if use_cache else out


class PassedIn(Cached):
    def forward(self, x: Tensor, cache: dict[str, Any] | None = None) -> Tensor:
        out, kept = self.attend(x, None if cache is None else cache.get("kv"))
        if cache is not None:
            cache["kv"] = kept
        return out


class Internal(Cached):
    def forward(self, x: Tensor, use_cache: bool = False) -> Tensor:
        out, kept = self.attend(x, getattr(self, "kept", None) if use_cache else None)
        if use_cache:
            self.kept = kept
        return out


@pytest.mark.parametrize("kind", [Returned, PassedIn, Internal])
@torch.no_grad()
def test_kinds_of_caches(kind: type[Cached]) -> None:
    assert not find_wrong_caches(facts_of(kind()))
    (forgets,) = find_wrong_caches(facts_of(kind("forgets")))
    assert forgets.bug == "cache differs from the full pass" and "from position" in forgets.message
    assert "reads key" in forgets.message and "instead of" in forgets.message
    (aligned,) = find_wrong_caches(facts_of(kind("alignment")))
    assert aligned.bug == "top-left instead of offset alignment", aligned


@torch.no_grad()
def test_this_librarys_cache() -> None:
    assert not find_wrong_caches(facts_of(multihead.MultiHeadAttention(24, 4)))


@torch.no_grad()
def test_what_has_no_cache_is_not_tested() -> None:
    with pytest.raises(NotApplicable, match="no cache was recognised"):
        find_wrong_caches(facts_of(Separate(causal=True)))
