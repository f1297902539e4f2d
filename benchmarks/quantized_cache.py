"""int8 KV caches against float32 and bfloat16: the time of a decoding step, the error on a real
model's keys, by how they are stored, and that model's loss.

The model is SmolLM2-135M (scripts/fetch_models.py), the text Python's language reference
(`pydoc_data.topics`), both of which every machine with this project has.
"""

from __future__ import annotations

import math
import pydoc_data.topics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.turns import TOY, Turns, ratios
from multihead import Cache, attention, load_builtin
from multihead.layers import QuantizedCache, Rotary, rotate
from multihead.layers.quantized_cache import create_basis, quantize
from multihead.layers.visible_keys import attend
from multihead.masks import causal

MODEL = Path(__file__).parents[1] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
SHAPES = [(12, 12, 64), (32, 8, 128)]  # heads, key/value heads, width
LENGTHS = [4096, 32768]
TOKENS = 4096  # of the loss
KEYS = 2048  # of the errors


@torch.no_grad()
def tables(toy: bool = False) -> Iterator[tuple[str, list[dict[str, str]], str]]:
    torch.manual_seed(0)
    yield steps(toy)
    model, ids = model_and_text(toy)
    yield errors(model, ids[:, : 64 if toy else KEYS])
    yield losses(model, ids)


# ---- Time and memory


def steps(toy: bool) -> tuple[str, list[dict[str, str]], str]:
    rows, turns = [], TOY if toy else Turns()
    for heads, groups, width in SHAPES[-1:] if toy else SHAPES:
        for length in [600] if toy else LENGTHS:
            k, v = (torch.randn(1, groups, length, width) for _ in "kv")
            q = torch.randn(1, heads, 1, width)
            caches = {"float32": Cache(length), "bfloat16": Cache(length)}
            caches["int8"] = QuantizedCache(length)
            ways: dict[str, Callable[[], Any]] = {}
            for name, cache in caches.items():
                dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
                new = [x.to(dtype) for x in (q, k, v)]
                cache.update(new[1][:, :, :-1], new[2][:, :, :-1])
                ways[name] = step(cache, *new)
            want = attention(q, k, v)
            for name, bound in (("float32", 1e-5), ("bfloat16", 0.03), ("int8", 0.03)):
                assert error(ways[name]().float(), want) < bound, "nothing is timed"
            seconds, ratio = ratios(ways, turns)
            other = {x: caches[x].nbytes / caches["int8"].nbytes for x in ("float32", "bfloat16")}
            rows.append(
                {
                    "query / key heads": f"{heads} / {groups}, {width} wide",
                    "S": f"{length:,}",
                    **{
                        f"{name}": f"{1e3 * seconds[name]:.2f} ms"
                        for name in ("float32", "bfloat16", "int8")
                    },
                    "int8 / float32": f"{ratio['int8']:.2f}",
                    "int8 / bfloat16": f"{ratio['int8'] / ratio['bfloat16']:.2f}",
                    "int8 cache": f"{caches['int8'].nbytes / 2**20:.1f} MiB",
                    "those of float32, bfloat16": " and ".join(
                        f"{x:.2f} times" for x in other.values()
                    ),
                }
            )
    notes = (
        "A step of one query: the new key and value are stored, and attention reads the cache."
        " Goals: int8 / float32 below 1, int8 / bfloat16 at most 1."
    )
    return "A decoding step by the dtype of its cache", rows, notes


def step(cache: Cache, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """A decoding step that is undone after it, so that it can be repeated."""
    state = cache.state()

    def run() -> Tensor:
        cache.restore(state)
        visible = cache.update(k[:, :, -1:], v[:, :, -1:])
        out = attend(q, visible.k, visible.v, None, quantized=visible.quantized)
        assert isinstance(out, Tensor)
        return out

    return run


def error(x: Tensor, exact: Tensor) -> float:
    return float((x - exact).norm() / exact.norm())


# ---- A real model


def model_and_text(toy: bool) -> tuple[Any, Tensor]:
    """The model and `[1, tokens]` ids."""
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    if toy:
        model, tokenizer = load_builtin()
        text = text[:2000]
    else:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        given = {"gguf_file": MODEL.name}
        model = AutoModelForCausalLM.from_pretrained(MODEL.parent, dtype=torch.float32, **given)
        tokenizer = AutoTokenizer.from_pretrained(MODEL.parent, **given)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    return model.eval(), ids[:, : 128 if toy else TOKENS]


Stored = Callable[[Tensor], Tensor]


def use(model: Any, compute: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """Let the model's attention be `compute(q, k, v)` -> `[B, H, L, E]`."""
    from transformers import AttentionInterface

    def forward(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any
    ) -> tuple[Tensor, None]:
        return compute(q, k, v).transpose(1, 2).contiguous(), None

    AttentionInterface.register("multihead_benchmark", forward)
    model.set_attn_implementation("multihead_benchmark")


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, causal())


def cached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    visible = QuantizedCache().update(k, v)
    out = attend(q, visible.k, visible.v, causal(), quantized=visible.quantized)
    assert isinstance(out, Tensor)
    return out


def errors(model: Any, ids: Tensor) -> tuple[str, list[dict[str, str]], str]:
    """Errors of head outputs, by how keys and values are rounded."""
    heads = model.config.head_dim
    rotary = Rotary(heads, theta=model.config.rope_parameters["rope_theta"])
    cos, sin = rotary.cos_sin(torch.arange(ids.shape[1]))
    basis = create_basis(heads)

    def by_token(x: Tensor) -> Tensor:
        numbers, scale = quantize(x)
        return numbers * scale[..., None]

    def by_halves(x: Tensor) -> Tensor:
        return by_token(x.unflatten(-1, (2, -1))).flatten(-2)

    def by_channel(x: Tensor) -> Tensor:
        # a scale for each component, from the first tokens: those that come later may exceed it
        scale = x[:, :, :256].abs().amax(2, keepdim=True) / 127
        return (x / scale).round().clamp(-127, 127) * scale

    def in_basis(how: Stored) -> Stored:
        return lambda x: how(x @ basis) @ basis.T

    def before_rotation(how: Stored) -> Stored:
        return lambda x: rotate(how(rotate(x, cos, -sin)), cos, sin)

    def in_blocks(x: Tensor) -> Tensor:
        # a scale for each component and 64 tokens, which have to be there before they are stored
        parts = (y.abs().amax(2, keepdim=True) / 127 for y in x.split(64, 2))
        scaled = zip(x.split(64, 2), parts)
        return torch.cat([(y / s).round() * s for y, s in scaled], 2)

    def keep(x: Tensor) -> Tensor:
        return x

    ours, early = in_basis(by_token), before_rotation
    blocks = "4 + 4 E / 64"
    ways: dict[str, tuple[Stored, Stored, str]] = {
        "QuantizedCache: a scale a head and token, cosine basis": (ours, ours, "8"),
        "the same, keys before rotation": (early(ours), ours, "8"),
        "without the basis": (by_token, by_token, "8"),
        "without it, keys before rotation": (early(by_token), by_token, "8"),
        "without it, two scales a head and token": (by_halves, by_halves, "16"),
        "keys: a scale a component and 64 tokens": (in_blocks, ours, blocks),
        "the same, before rotation": (early(in_blocks), ours, blocks),
        "keys: a scale a component, from 256 tokens": (by_channel, ours, "4"),
        "the same, before rotation ": (early(by_channel), ours, "4"),
        "keys alone, in the basis": (ours, keep, "4"),
        "values alone, in the basis": (keep, ours, "4"),
    }
    found: dict[str, list[Tensor]] = {name: [] for name in ways}

    def by_head(x: Tensor) -> Tensor:
        return x.transpose(0, 1).flatten(1).norm(dim=1)

    def measure(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        want = exact(q, k, v)
        for name, (of_k, of_v, _) in ways.items():
            found[name].append(by_head(exact(q, of_k(k), of_v(v)) - want) / by_head(want))
        ours = by_head(cached(q, k, v) - want) / by_head(want)
        assert torch.allclose(ours, found[next(iter(ways))][-1], rtol=0.05), "another cache"
        return want

    use(model, measure)
    model(ids)
    rows = []
    for name, (_, _, more) in ways.items():
        all_heads = torch.stack(found[name])  # [layers, H]
        rows.append(
            {
                "stored": name.strip(),
                "bytes a token and head, beside E + Ev": more,
                "mean error": f"{float(all_heads.mean()):.1e}",
                "worst head": f"{float(all_heads.max()):.1e}",
            }
        )
    notes = (
        f"{type(model).__name__} on {ids.shape[1]:,} tokens, error of each head's outputs relative"
        " to their size. Goal: 2e-2."
    )
    return "Error of head outputs, by how keys and values are rounded", rows, notes


def losses(model: Any, ids: Tensor) -> tuple[str, list[dict[str, str]], str]:
    rows, first = [], math.nan
    for name, compute in (("float32", exact), ("int8", cached)):
        use(model, compute)
        logits = model(ids).logits[0, :-1].float()
        loss = float(F.cross_entropy(logits, ids[0, 1:]))
        first = loss if math.isnan(first) else first
        change = f"{100 * (loss / first - 1):+.3f} %"
        rows.append({"cache": name, "loss": f"{loss:.4f}", "change": change})
    notes = (
        f"Teacher-forced, on {ids.shape[1]:,} tokens, each of which reads rounded keys and values."
    )
    return "Loss of a model with an int8 cache", rows, f"{notes} Goal: within 1 %."
