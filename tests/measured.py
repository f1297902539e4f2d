"""What attention modules of a real model hold, compute and cache, counted while it runs: the judge
of predicted costs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from multihead.costs.shape import Shape
from multihead.models.site import Site, find_attention
from oracles.eager import stored_attention


@dataclass(frozen=True)
class Measured:
    """One attention module."""

    parameters: int
    heads: (
        tuple[int, int, int, int] | None
    )  # H, G, E, V of what entered its attention; None where it wasn't reached
    rows: int = 0
    keys: int = 0
    operations: int = 0  # of one text
    pairs: int = 0  # of one text, that its mask allowed
    calls: int = 0


def parameters(site: Site) -> int:
    """Every number inside of the module and of its output projection, once."""
    return sum(p.numel() for p in {*site.module.parameters(), *site.out.parameters()})


def measured(
    model: Any, batch: dict[str, Any], states: Collection[str] = ()
) -> dict[str, Measured]:
    """Every attention module, by name, over one pass of eager attention; `states` are the modules
    that keep a state instead.
    """
    batches = next(iter(batch.values())).shape[0]
    counter = FlopCounterMode(display=False)
    with stored_attention(model) as stored, torch.no_grad(), counter:
        model(**batch)
    root = type(model).__name__
    counts = {
        name.removeprefix(root).lstrip("."): sum(ops.values())
        for name, ops in counter.get_flop_counts().items()
    }
    found = {}
    for site in find_attention(model, states)[0]:
        calls = [call for call in stored if call.site == site.name]
        outside = not site.out_name.startswith(f"{site.name}.")
        operations = counts.get(site.name, 0) + (counts.get(site.out_name, 0) if outside else 0)
        if not calls:
            found[site.name] = Measured(parameters(site), None)
            continue
        q, k, v = calls[0].query.shape, calls[0].key.shape, calls[0].value.shape
        pairs = int(calls[0].allowed.sum()) // q[0]
        apart = q[0] != batches  # a call for each picture, where several are packed into one row
        if (
            apart and len({call.query.shape for call in calls}) > 1
        ):  # pictures of several sizes: no one length to predict for
            found[site.name] = Measured(parameters(site), None)
            continue
        texts = sum(call.query.shape[0] for call in calls) if apart else batches
        found[site.name] = Measured(
            parameters(site),
            (q[1], k[1], q[3], v[3]),
            q[2],
            k[2],
            operations // texts,
            pairs,
            1 if apart else len(calls),
        )
    return found


def differences(shape: Shape, real: Measured) -> list[str]:
    """Where a predicted shape isn't what was measured, in words; none where it is."""
    found = []
    if (total := sum(shape.parameters.values())) != real.parameters:
        found.append(f"{total} parameters, not {real.parameters}")
    if real.heads is None:
        return found
    kv_heads = shape.num_heads if shape.latent_dim else shape.num_kv_heads
    if (heads := (shape.num_heads, kv_heads, shape.head_dim, shape.value_dim)) != real.heads:
        found.append(f"heads {heads}, not {real.heads}")
    context, source = (real.keys if shape.encoder else real.rows), real.keys
    if (calls := shape.calls) != real.calls:
        found.append(f"{calls} calls, not {real.calls}")
    if (total := shape.prefill(context, source, full=True).total) != real.operations:
        found.append(f"{total} operations, not {real.operations}")
    pairs = shape.pairs(context, source)
    # what an indexer didn't choose is masked in some models, and left out of the products in others
    scored = replace(shape, topk=None).pairs(context, source)
    if real.pairs not in (pairs, scored):
        found.append(f"{pairs} pairs, not {real.pairs}")
    return found


def cache_bytes(cache: Any) -> int:
    """Bytes of a transformers cache: of every tensor with a batch in it, wherever it is, once."""
    seen: set[int] = set()

    def count(value: Any, depth: int) -> int:
        if id(value) in seen or depth == 0 or isinstance(value, torch.nn.Module):
            return 0
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            return value.numel() * value.element_size() if value.ndim > 1 else 0
        if isinstance(value, dict):
            return sum(count(inner, depth) for inner in value.values())
        if isinstance(value, (list, tuple)):
            return sum(count(inner, depth) for inner in value)
        inside = "ache" in type(value).__mro__[-2].__name__ or hasattr(value, "get_seq_length")
        inside |= hasattr(value, "layers") or hasattr(value, "conv_states")
        return count(vars(value), depth - 1) if inside and hasattr(value, "__dict__") else 0

    return count(cache, 6)
