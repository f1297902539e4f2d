"""`LatentAttention` against its own expanded form and against layers with multi-head and grouped
attention of the same width, decoding and prefilling; and the number of queries from which the
expanded form is faster.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.turns import TOY, Turns, ratios
from multihead import Cache, LatentAttention, MultiHeadAttention, attention
from multihead.layers import Rotary, latent
from multihead.masks import causal


class Sizes(NamedTuple):
    width: int = 2048
    heads: int = 16
    head_dim: int = 128
    latent: int = 512
    rotary: int = 64
    groups: int = 4
    held: tuple[int, ...] = (4096, 32768)
    chunk: int = 512
    queries: tuple[int, ...] = (1, 16, 64, 128, 192, 256, 384)

    @property
    def row(self) -> int:
        return self.latent + self.rotary

    def create(self, form: str = "auto") -> LatentAttention:
        layer = LatentAttention(
            self.width,
            self.heads,
            kv_latent_dim=self.latent,
            rotary_dim=self.rotary,
            head_dim=self.head_dim,
        )
        layer.form = form
        return layer.eval()

    def create_heads(self, groups: int) -> MultiHeadAttention:
        options: Any = dict(num_kv_heads=groups, head_dim=self.head_dim, bias=False)
        return MultiHeadAttention(
            self.width, self.heads, positions=Rotary(self.head_dim), **options
        ).eval()


SMALL = Sizes(64, 4, 8, 16, 4, 2, (32,), 8, (1, 8))


def tables(toy: bool = False) -> Iterator[tuple[str, list[dict[str, str]], str]]:
    torch.manual_seed(0)
    sizes, turns = (SMALL, TOY) if toy else (Sizes(), Turns(7, 8.0))
    with torch.no_grad():
        yield _steps(sizes, turns)
        yield _prompts(sizes, turns)
        yield _switch(sizes, turns)


def _filled(layer: nn.Module, held: int, room: int) -> Cache:
    """A cache of a layer with `held` random tokens."""
    cache = Cache(max_length=held + room)
    if isinstance(layer, LatentAttention):
        rows = torch.randn(1, 1, held, layer.kv_latent_dim + layer.rotary_dim)
        cache.update(rows, rows[..., :0])
    else:
        assert isinstance(layer, MultiHeadAttention)
        k, v = torch.randn(2, 1, layer.num_kv_heads, held, layer.head_dim)
        cache.update(k, v)
    return cache


def _call(layer: nn.Module, x: Tensor, cache: Cache) -> Callable[[], Tensor]:
    """A call of the layer after the tokens that the cache holds now."""
    held = cache.length

    def run() -> Tensor:
        out: Tensor = layer(x, mask=causal(), cache=cache)
        cache.crop(held)
        return out

    return run


def _calls(sizes: Sizes, held: int, length: int) -> tuple[dict[str, Any], dict[str, Cache]]:
    """The calls of `length` tokens of all layers, checked, and their caches."""
    x = torch.randn(1, length, sizes.width)
    ours, expanded = sizes.create("absorbed"), sizes.create("expanded")
    expanded.load_state_dict(ours.state_dict())
    cache = _filled(ours, held, length)
    layers: dict[str, nn.Module] = {"absorbed": ours, "expanded": expanded}
    caches = {"absorbed": cache, "expanded": copy.copy(cache)}
    for name, groups in (("MHA", sizes.heads), ("GQA", sizes.groups)):
        layers[name] = sizes.create_heads(groups)
        caches[name] = _filled(layers[name], held, length)
    calls = {name: _call(layers[name], x, caches[name]) for name in layers}
    first, second = calls["absorbed"](), calls["expanded"]()
    assert torch.allclose(first, second, atol=1e-4 * first.abs().max().item()), "nothing is timed"
    return calls, caches


def _reading(numel: int) -> Callable[[], Tensor]:
    """Read so many float32, and nothing else."""
    memory = torch.randn(numel)
    return lambda: memory.sum()


def _multiplying(count: int) -> Callable[[], Tensor]:
    """A product of large matrices with about so many multiplications."""
    side = 1024
    a, b = torch.randn(side, side), torch.randn(side, max(1, count // side**2))
    return lambda: a @ b


def _steps(sizes: Sizes, turns: Turns) -> tuple[str, list[dict[str, str]], str]:
    rows = []
    for held in sizes.held:
        calls, caches = _calls(sizes, held, 1)
        weights = sum(p.numel() for p in sizes.create().parameters())
        seen = held + 1
        q, stored = torch.randn(1, sizes.heads, 1, sizes.row), caches["absorbed"]._k
        assert stored is not None
        stored = stored[:, :, :seen]
        ways = calls | {
            "attention alone": lambda s=stored, q=q: attention(q, s, s[..., : sizes.latent]),
            "reading the latents": _reading(seen * sizes.row),
            "reading latents and weights": _reading(seen * sizes.row + weights),
            "the multiplications alone": _multiplying(
                sizes.heads * seen * (sizes.row + sizes.latent)
            ),
        }
        seconds, _ = ratios(ways, turns)
        for name in ways:
            cache = caches.get(name)
            size = "" if cache is None else f"{cache.nbytes / 2**20:.1f} MiB"
            rows.append(
                {
                    "tokens held": f"{held:,}",
                    "a step": name,
                    "time": f"{1e3 * seconds[name]:.2f} ms",
                    "to the absorbed": f"{seconds[name] / seconds['absorbed']:.2f}",
                    "cache": size,
                }
            )
    return (
        f"A decoding step of latent attention, {sizes.width} wide, {sizes.heads} heads, float32",
        rows,
        (
            f"Latent {sizes.latent}, rotary {sizes.rotary}, head width {sizes.head_dim}; GQA has"
            f" {sizes.groups} key/value heads. Goals: the absorbed step at least 5 times as fast as"
            " the expanded one at 32,768 tokens, and at most 1.1 times as long as reading latents"
            " and weights. The multiplications are timed as one large matrix product."
        ),
    )


def _prompts(sizes: Sizes, turns: Turns) -> tuple[str, list[dict[str, str]], str]:
    rows = []
    for held, length in [(0, sizes.held[0]), *((n, sizes.chunk) for n in sizes.held)]:
        calls, _ = _calls(sizes, held, length)
        del calls["absorbed"]
        seconds, _ = ratios(calls, turns._replace(fewest=3))
        rows.append(
            {"tokens held": f"{held:,}", "new": f"{length:,}"}
            | {name: f"{1e3 * seconds[name]:.0f} ms" for name in calls}
            | {
                f"expanded to {name}": f"{seconds['expanded'] / seconds[name]:.2f}"
                for name in ("MHA", "GQA")
            }
        )
    return (
        f"Prompts, {sizes.width} wide, {sizes.heads} heads, float32",
        rows,
        "A whole prompt, and a further piece of one.",
    )


def _switch(sizes: Sizes, turns: Turns) -> tuple[str, list[dict[str, str]], str]:
    rows, layer = [], sizes.create()
    most = [max(n for n in range(1, 4096) if layer._absorbs(n, held + n)) for held in sizes.held]
    for held in sizes.held:
        row = {"tokens held": f"{held:,}"}
        for length in sizes.queries:
            cache, x = _filled(layer, held, length), torch.randn(1, length, sizes.width)
            calls: dict[str, Any] = {}
            for form in ("expanded", "absorbed"):
                other = sizes.create(form)
                other.load_state_dict(layer.state_dict())
                calls[form] = _call(other, x, copy.copy(cache))
            _, ratio = ratios(calls, turns._replace(fewest=3, longest=turns.longest / 4))
            row[str(length)] = f"{ratio['absorbed']:.2f}"
        rows.append(row)
    return (
        "Time of the absorbed form to that of the expanded, by the number of queries",
        rows,
        (
            "The layer absorbs where that takes at most"
            f" {latent.MORE_MULTIPLICATIONS} times as many multiplications: up to"
            f" {', '.join(map(str, most))} queries."
        ),
    )
