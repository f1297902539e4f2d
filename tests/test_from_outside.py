"""A statistic, a model family and a backend are added from outside the package, with public names only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multihead
from multihead.masks import causal
from multihead.models import find_sites, register_family
from multihead.ops import AttentionCall, AttentionOutput

IDS = torch.tensor([[5, 3, 8, 3, 8, 1, 5, 3]])


class EvenPositions(multihead.Statistic):
    """Mass on keys at even positions: any class of keys is a statistic of one method."""

    name, formula, meaning = "even_positions", "sum of A_ij over even j", "reads even positions"
    range = (0.0, 1.0)

    def key_values(self, text: Any) -> Tensor:
        length = text.key_ids.shape[1]
        return (torch.arange(length) % 2 == 0).expand_as(text.key_ids)


class Voices(nn.Module):
    """Attention whose attributes have names that no library uses."""

    def __init__(self) -> None:
        super().__init__()
        self.voices = 4
        self.ask, self.offer, self.give, self.blend = (nn.Linear(32, 32) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.voices, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(self.split, (self.ask(x), self.offer(x), self.give(x)))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.blend(out.transpose(1, 2).flatten(2))


class Choir(nn.Module):
    """A small model with such attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Embedding(10, 32), Voices()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        return x + self.attention(x)


class FloatBackend:
    """The definition in torch, for calls that it supports."""

    calls = 0

    def unsupported_reason(self, call: AttentionCall, **asked: bool) -> str | None:
        return "it has no soft cap" if call.softcap else None

    def forward(self, call: AttentionCall, **asked: bool) -> AttentionOutput:
        self.calls += 1
        q, k, v = call[:3]
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = call.scale * q @ k.mT
        if (allowed := call.allowed()) is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        return AttentionOutput(scores.softmax(-1) @ v)


@pytest.fixture(scope="module")
def choir() -> Choir:
    torch.manual_seed(0)
    register_family(Voices, num_heads="voices", q="ask", k="offer", v="give", out="blend")
    model = Choir().eval()
    with torch.no_grad():  # larger weights, or attention is nearly uniform
        model.attention.ask.weight *= 4
        model.attention.offer.weight *= 4
    return model


def maps_of(model: Choir) -> list[multihead.reader.HeadMap]:
    (site,) = find_sites(model)
    labels = [site.head_label(h) for h in range(4)]
    return multihead.read_maps(model, {"input_ids": IDS}, labels)


def test_a_family(choir: Choir) -> None:
    (site,) = find_sites(choir)
    assert (site.num_heads, site.num_kv_heads, site.head_dim) == (4, 4, 8)
    with torch.no_grad():
        x, attention = choir.embed(IDS), choir.attention
        q, k = attention.split(attention.ask(x)), attention.split(attention.offer(x))
        weights = multihead.attention(q, k, k, causal(), return_weights=True)[1]
    for head_map in maps_of(choir):
        head = int(head_map.head.rpartition("H")[2])
        expected = weights[0, head].numpy()
        torch.testing.assert_close(torch.tensor(head_map.weights), torch.tensor(expected))
    assert sum(multihead.cost(choir, context_length=8).parameters.values()) == 4 * (32 * 32 + 32)


def test_a_statistic(choir: Choir) -> None:
    table = multihead.read(choir, {"input_ids": IDS}, statistics=[EvenPositions()], probe=False)
    maps = maps_of(choir)
    expected = [head_map.weights[:, ::2].sum(1).mean() for head_map in maps]
    assert table.value("even_positions") == pytest.approx(expected, rel=1e-5)
    contribution = table.value("contribution:even_positions")
    assert ((contribution > 0) & (contribution < 1)).all()


def test_a_backend() -> None:
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    backend = FloatBackend()
    out = multihead.attention(q, k, v, causal(), backend=backend)
    torch.testing.assert_close(out, multihead.attention(q, k, v, causal(), backend="reference"))
    assert backend.calls == 1
    with pytest.raises(multihead.MultiheadError, match="it has no soft cap"):
        multihead.attention(q, k, v, softcap=30.0, backend=backend)
