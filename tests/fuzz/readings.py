"""Readings against transformers' own eager attention: random small configs of every family, random
texts, padding, masks with four axes, caches, wrappers, implementations and dtypes.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import multihead
from families import FAMILIES, PADDING, SPECIAL, Batch, Family, call_of, enlarge
from fuzz.draw import Draw
from oracles.compare import differences
from oracles.eager import stored_attention
from oracles.statistics import Call, Statistics, statistics

# Decoders whose eager attention takes a mask with four axes as it is, and keeps all keys in a cache
FULL = ("gpt2", "llama", "qwen3", "phi3", "gpt_neox", "granite", "gpt_bigcode")
LIMITS = {torch.float32: (3e-4, 3e-5), torch.float64: (1e-5, 1e-6)}


def vary(draw: Draw, config: Any, family: Family) -> None:
    """Other numbers of layers and heads, windows and caps, in place."""
    for name in ("num_hidden_layers", "n_layer", "encoder_layers", "decoder_layers"):
        if isinstance(getattr(config, name, None), int) and family.name not in ("t5", "llama4"):
            setattr(config, name, draw.randint(1, 3))
    if getattr(config, "layer_types", None):
        kinds = sorted(set(config.layer_types))
        config.layer_types = [draw.choice(kinds) for _ in range(config.num_hidden_layers)]
    grouped = getattr(config, "head_dim", None) and getattr(config, "num_key_value_heads", None)
    if grouped and family.name != "deepseek_v3":
        groups, repeats = draw.randint(1, 3), draw.randint(1, 3)
        config.num_attention_heads, config.num_key_value_heads = groups * repeats, groups
        config.head_dim = 2 * draw.randint(1, 8)
    if getattr(config, "sliding_window", None):
        config.sliding_window = draw.randint(1, 15)
    if getattr(config, "attn_logit_softcapping", None):
        config.attn_logit_softcapping = draw.choice((0.5, 2.0, 20.0))
    if getattr(config, "attention_chunk_size", None):
        config.attention_chunk_size = draw.randint(2, 12)


def draw_model(draw: Draw, family: Family) -> Any:
    made = family.make()
    config = copy.deepcopy(made.config)
    for part in (config, *(getattr(config, n, None) for n in ("text_config", "vision_config"))):
        if part is not None:
            vary(draw, part, family)
    if hasattr(config, "first_k_dense_replace"):  # no experts, which have no float64
        config.first_k_dense_replace = config.num_hidden_layers
    model = type(made)(config).eval().float()
    enlarge(model, draw.randrange(2**31), family.gain)
    # the experts of gpt-oss have no float64
    dtypes = (torch.float32, torch.float32, torch.float64)
    return model.to(torch.float32 if family.name == "gpt_oss" else draw.choice(dtypes))


def draw_text(
    draw: Draw, family: Family, batch: int, length: int, prefix: str, dtype: torch.dtype
) -> Batch:
    words = torch.randint(3, 12, (batch, length), generator=draw.torch)
    words[draw.normal(batch, length) > 1.2] = 2
    if family.inputs == "encoder":
        words = words.clamp(min=6)
    words[:, 0] = 0
    side = draw.choice(("none", "none", "right", "left"))
    if side == "left" and family.inputs in ("encoder", "image and text"):
        side = "right"
    # float64's lowest number and a negative score make -inf, and eager attention of a row of those
    # is NaN
    if side == "none" or dtype == torch.float64:
        return {f"{prefix}input_ids": words}
    real = torch.zeros(batch, length, dtype=torch.long)
    for row in real:
        count = draw.randint(2, length)
        row[slice(count) if side == "right" else slice(length - count, length)] = 1
    if family.inputs == "image and text":
        real[0] = 1  # the text's end is where the highest id is
    pad = 1 if family.name == "roberta" else PADDING
    return {
        f"{prefix}input_ids": words.masked_fill(real == 0, pad),
        f"{prefix}attention_mask": real,
    }


def draw_batch(draw: Draw, family: Family, dtype: torch.dtype) -> Batch:
    batch = draw.randint(1, 3)
    length = draw.randint(3, 24) if family.inputs not in ("image and text",) else draw.randint(3, 9)
    if family.inputs in ("decoder", "encoder"):
        return draw_text(draw, family, batch, length, "", dtype)
    if family.inputs == "both":
        decoder = draw_text(draw, family, batch, draw.randint(3, 12), "decoder_", dtype)
        return draw_text(draw, family, batch, length, "", dtype) | decoder
    if family.inputs == "sound":
        decoder = draw_text(draw, family, batch, draw.randint(3, 12), "decoder_", dtype)
        return {"input_features": draw.normal(batch, 10, 30, dtype=dtype)} | decoder
    if family.inputs == "image":
        return {"pixel_values": draw.normal(batch, 3, 12, 16, dtype=dtype)}
    pixels = {"pixel_values": draw.normal(batch, 3, 12, 12, dtype=dtype)}
    return pixels | draw_text(draw, family, batch, length, "", dtype)


class Outer(nn.Module):
    """A module of a user's around a model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)


def wrap(draw: Draw, model: Any) -> nn.Module:
    """The model, perhaps in a wrapper."""
    kind = draw.choice(("none", "none", "none", "parallel", "outer"))
    if kind == "parallel":
        return nn.DataParallel(model)
    return Outer(model) if kind == "outer" else model


def masked(draw: Draw, family: Family, batch: Batch, dtype: torch.dtype) -> tuple[Batch, Batch]:
    """The batch with a mask of four axes, for eager attention and in one of its other forms."""
    ids = batch["input_ids"]
    texts, length = ids.shape
    allowed = (draw.normal(texts, 1, length, length) > -0.7).tril()
    allowed |= torch.eye(length, dtype=torch.bool)
    low = torch.finfo(dtype).min
    own = torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, low)
    number = draw.choice((low, -1e9, -1e5, -torch.inf, low / 2))
    given = torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, number)
    return {"input_ids": ids, "attention_mask": own}, {"input_ids": ids, "attention_mask": given}


def pieces_of(draw: Draw, length: int) -> list[slice]:
    ends = sorted({draw.randint(1, length) for _ in range(draw.randint(1, 3))} | {length})
    return [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]


def run_pieces(model: Any, batch: Batch, pieces: list[slice] | None) -> None:
    with torch.no_grad():
        if pieces is None:
            model(**batch)
            return
        cache = None
        for piece in pieces:
            inputs = {"input_ids": batch["input_ids"][:, piece]}
            if "attention_mask" in batch:
                inputs["attention_mask"] = batch["attention_mask"][:, : piece.stop]
            cache = model(**inputs, past_key_values=cache, use_cache=True).past_key_values


def expected(
    family: Family, model: Any, runs: list[tuple[Batch, list[slice] | None]]
) -> dict[str, Statistics]:
    calls: dict[str, list[Call]] = {}
    for batch, pieces in runs:
        with stored_attention(model) as stored:
            run_pieces(model, batch, pieces)
        per_site: dict[str, int] = {}
        for call in stored:
            given = batch
            mask = batch.get("attention_mask")
            if mask is not None and mask.ndim == 4:
                given = {"input_ids": batch["input_ids"]}
            if pieces is not None:
                piece = pieces[per_site.get(call.site, 0)]
                per_site[call.site] = per_site.get(call.site, 0) + 1
                calls.setdefault(call.site, []).append(piece_of(family, model, call, given, piece))
            else:
                calls.setdefault(call.site, []).append(call_of(family, model, call, given))
    return {site: statistics(found) for site, found in calls.items()}


def piece_of(family: Family, model: Any, stored: Any, batch: Batch, piece: slice) -> Call:
    """A stored call of a piece of the text with what the inputs tell of its rows and keys."""
    so_far = {name: x[:, : piece.stop] for name, x in batch.items()}
    real = so_far.get("attention_mask")
    found = call_of(family, model, stored, {"input_ids": so_far["input_ids"]})
    shape = tuple(so_far["input_ids"].shape)
    keys = np.ones(shape, bool) if real is None else real.numpy().astype(bool)
    return Call(**found.__dict__ | {"real_keys": keys, "real_queries": keys[:, piece]})


def state_of(model: nn.Module) -> tuple[Any, ...]:
    return (
        model.config._attn_implementation,
        {name: x.clone() for name, x in model.state_dict().items()},
        {
            name: len(m._forward_hooks) + len(m._forward_pre_hooks)
            for name, m in model.named_modules()
        },
        {name: sorted(m.__dict__) for name, m in model.named_modules()},
    )


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)
    if isinstance(a, tuple):
        return all(equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def run(seed: int) -> str:
    """Run one reading; return its family."""
    draw = Draw(seed)
    torch.manual_seed(seed)
    family = draw.choice(FAMILIES)
    model = draw_model(draw, family)
    implementation = draw.choice(("eager", "sdpa", "sdpa"))
    try:
        model.set_attn_implementation(implementation)
    except (ValueError, ImportError):
        implementation = model.config._attn_implementation
    dtype = model.dtype
    own: list[tuple[Batch, list[slice] | None]] = []
    given: list[tuple[Batch, list[slice] | None]] = []
    kinds = []
    for _ in range(draw.randint(1, 3)):
        batch = draw_batch(draw, family, dtype)
        pieces = None
        kind = draw.choice(("plain", "plain", "mask", "cache"))
        other = batch
        if kind == "mask" and family.name in FULL:
            batch, other = masked(draw, family, batch, dtype)
        elif kind == "cache" and family.name in FULL:
            pieces = pieces_of(draw, batch["input_ids"].shape[1])
        else:
            kind = "plain"
        kinds.append(kind)
        own.append((batch, pieces))
        given.append((other, pieces))
    wrapped = wrap(draw, model)
    before = state_of(model)
    how = f"{family.name}, {implementation}, {dtype}, in {type(wrapped).__name__}, {kinds}"
    try:
        special: Any = {} if family.inputs == "image" else {"special_ids": set(SPECIAL)}
        if all(kind == "plain" for kind in kinds) and draw.maybe():
            how += ", read"
            table = multihead.read(wrapped, [batch for batch, _ in given], probe=False, **special)
        else:
            how += ", reading"
            inner = draw.maybe(0.3)  # the model is called, not what it is wrapped in
            with multihead.reading(wrapped, **special) as session:
                for batch, pieces in given:
                    run_pieces(model if inner else wrapped, batch, pieces)
            table = session.table()
        assert equal(state_of(model), before), "the model isn't what it was"
        twins = expected(family, model, own)
        wrong = differences(table, twins, limits=LIMITS[dtype])
        assert not wrong, f"{len(wrong)} differences: {wrong[:3]}"
        documents = sum(next(iter(batch.values())).shape[0] for batch, _ in given)
        pieced = sum((len(p) - 1) * b["input_ids"].shape[0] for b, p in given if p is not None)
        counted = table.meta["documents"]
        assert counted in (documents, documents + pieced), f"{counted} documents, not {documents}"
    except Exception as error:
        error.add_note(f"seed {seed}: {how}, {model.config}")
        raise
    return family.name


__all__ = ["run"]
