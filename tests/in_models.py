"""Attention modules as their models call them: inputs and outputs, for comparison with layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from multihead import Cache, LatentAttention, MultiHeadAttention

MEMORY = ("key_value_states", "encoder_hidden_states", "cross_attention_states")


@dataclass
class Passed:
    """One call of an attention module."""

    name: str
    module: nn.Module
    hidden: Tensor
    memory: Tensor | None
    bias: Tensor | None  # position bias that another layer computed
    out: Tensor


def calls_in(model: nn.Module, batch: dict[str, Any]) -> list[Passed]:
    """The calls of all attention modules in one pass of the model."""
    found: list[Passed] = []
    updates: list[tuple[nn.Module, Tensor]] = []
    handles = []

    def keep(owner: nn.Module) -> Any:
        return lambda module, args, out: updates.append((owner, out))

    def hook(name: str) -> Any:
        def note(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            given = signature(type(module).forward).bind(module, *args, **kwargs).arguments
            given |= given.pop("kwargs", {})
            first = list(given.values())[1]
            memory = next((given[x] for x in MEMORY if given.get(x) is not None), None)
            bias = given.get("position_bias")
            out = out[0] if isinstance(out, tuple) else out
            residual = given.get("residual")
            out = out if residual is None else out - residual
            update = [x for x in updates if x[0] is module]  # before the residual connection
            out = update[-1][1] if update else out
            if isinstance(first, Tensor) and isinstance(out, Tensor):
                found.append(Passed(name, module, first, memory, bias, out))

        return note

    for name, module in model.named_modules():
        if "Attention" in type(module).__name__:
            handles.append(module.register_forward_hook(hook(name), with_kwargs=True))
            outer = getattr(module, "output", module if hasattr(module, "LayerNorm") else None)
            if isinstance(getattr(outer, "dense", None), nn.Module):
                handles.append(outer.dense.register_forward_hook(keep(module)))
    try:
        with torch.no_grad():
            model(**batch)
    finally:
        for handle in handles:
            handle.remove()
    return found


def convert(module: nn.Module, **options: Any) -> Any:
    is_latent = "kv_b_proj" in module._modules
    cls: Any = LatentAttention if is_latent else MultiHeadAttention
    return cls.from_transformers(module, **options)


def run_layer(layer: Any, call: Passed) -> Tensor:
    given: dict[str, Any] = {} if call.memory is None else {"key": call.memory}
    is_whole = call.bias is not None and call.bias.ndim == 4 and call.memory is None
    if is_whole and layer.positions is None:
        given["attn_bias"] = call.bias
    with torch.no_grad():
        out: Tensor = layer(call.hidden, **given)
    return out


def run_steps(layer: Any, call: Passed, sizes: tuple[int, ...] = (4, 1, 2, 1)) -> Tensor:
    """The output of steps with a cache."""
    length, cache = call.hidden.shape[1], Cache()
    parts = [*sizes, length - sum(sizes)]
    with torch.no_grad():
        steps = [layer(x, cache=cache) for x in call.hidden.split(parts, 1)]
    return torch.cat(steps, 1)


def errors(calls: list[Passed]) -> Iterator[tuple[Passed, Any, float]]:
    """For each call the layer and the largest difference, or the error of conversion."""
    for call in calls:
        try:
            layer = convert(call.module)
        except ValueError as error:
            yield call, error, float("nan")
            continue
        out = run_layer(layer, call)
        yield call, layer, float((out - call.out).abs().max() / call.out.abs().max())
