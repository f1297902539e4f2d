"""Statistics of attention modules of any make, from the weights that they return or that their
formula gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oracles.eager import doubles
from oracles.statistics import Call, Flags, Statistics, statistics

Seen = list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]]  # path, module, arguments


def sharpened(model: nn.Module, seed: int = 0) -> Any:
    """The model in float64 and evaluation, with weights so large that attention is far from
    even.
    """
    generator = torch.Generator().manual_seed(seed)
    model = model.double().eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        noise = torch.empty(weight.shape, dtype=weight.dtype).normal_(generator=generator)
        last = name.rpartition(".")[2]
        if weight.ndim < 2 or last in ("bias_k", "bias_v"):
            weight.add_(0.3 * noise)
        elif "table" in last or "embed" in name or "token" in last:
            weight.copy_(noise)
        else:
            weight.copy_(2 * weight[0].numel() ** -0.5 * noise)
    return model


@contextmanager
def watched(model: nn.Module, kinds: type | tuple[type, ...]) -> Iterator[Seen]:
    """What each attention module of the model is called with, torch's fused layers off so that none
    is passed by.
    """
    seen: Seen = []
    handles = [
        module.register_forward_pre_hook(
            lambda m, args, kwargs, name=name: seen.append((name, m, args, kwargs)),
            with_kwargs=True,
        )
        for name, module in model.named_modules()
        if isinstance(module, kinds)
    ]
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield seen
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
        for handle in handles:
            handle.remove()


def call(
    weights: Tensor,
    values: Tensor,
    out: Any,
    allowed: Flags | Tensor | None = None,
    *,
    rows: Any = None,
    keys: Any = None,
    ids: Tensor | None = None,
    special: frozenset[int] | None = None,
    cross: bool = False,
) -> Call:
    """weights `[B, H, L, S]`, values `[B, G, S, Ev]`; rows and keys, bool, name those that are
    text.
    """
    batch, _, length, width = weights.shape
    every = np.ones((batch, length, width), bool)
    may = every if allowed is None else np.broadcast_to(np.asarray(allowed), every.shape)
    rows, keys = (
        flags if given is None else np.asarray(given)
        for flags, given in ((every[:, :, 0], rows), (every[:, 0], keys))
    )
    return Call(
        doubles(weights),
        doubles(values),
        may,
        doubles(out.weight).T,
        rows,
        keys,
        None if ids is None else ids.numpy(),
        special,
        cross,
    )


def torch_call(
    module: nn.MultiheadAttention, args: tuple[Any, ...], kwargs: dict[str, Any], **more: Any
) -> Call:
    """A call of an `nn.MultiheadAttention`, from the weights that it returns itself."""
    names = (
        "query",
        "key",
        "value",
        "key_padding_mask",
        "need_weights",
        "attn_mask",
        "average_attn_weights",
        "is_causal",
    )
    given = (
        dict(zip(names, args, strict=False))
        | kwargs
        | dict(need_weights=True, average_attn_weights=False)
    )
    with torch.no_grad():
        _, weights = module.forward(**given)
    value = given["value"]
    value = (
        value[None] if value.ndim == 2 else value if module.batch_first else value.transpose(0, 1)
    )
    weights = weights if weights.ndim == 4 else weights[None]
    w = module.v_proj_weight if module.in_proj_weight is None else module.in_proj_weight.chunk(3)[2]
    b = None if module.in_proj_bias is None else module.in_proj_bias.chunk(3)[2]
    values = F.linear(value, w, b).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
    keys = values.shape[2]
    allowed = np.ones((weights.shape[0], weights.shape[2], keys), bool)
    padding, mask = given.get("key_padding_mask"), given.get("attn_mask")
    text = np.ones((weights.shape[0], keys), bool)
    if padding is not None:
        text = np.atleast_2d((~padding if padding.dtype == torch.bool else padding == 0).numpy())
        allowed &= text[:, None]
    if mask is not None:
        may = ~mask if mask.dtype == torch.bool else mask > -1e4
        allowed &= (
            may if may.ndim == 2 else may.unflatten(0, (-1, module.num_heads))[:, 0]
        ).numpy()
    key = given["key"]
    cross = key.shape != given["query"].shape or not torch.equal(key, given["query"])
    rows = None if cross else text
    return call(
        weights[..., :keys],
        values,
        module.out_proj,
        allowed,
        **(dict(rows=rows, keys=text, cross=cross) | more),
    )


def twin(calls: list[tuple[str, Call]]) -> dict[str, Statistics]:
    by_site: dict[str, list[Call]] = {}
    for name, one in calls:
        by_site.setdefault(name, []).append(one)
    return {name: statistics(found) for name, found in by_site.items()}


def as_before(model: nn.Module) -> Any:
    """Everything of a model that a reading touches."""
    return (
        [
            (
                name,
                len(m._forward_hooks),
                len(m._forward_pre_hooks),
                m.training,
                "forward" in vars(m),
                vars(m).get("operator"),
                vars(m).get("fused_attn"),
            )
            for name, m in model.named_modules()
        ],
        torch.backends.mha.get_fastpath_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )
