"""Copies of KV caches, for a pass that must not write into those that a model was given."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.cache import Cache

__all__ = ["copy_caches"]


def copy_caches(inputs: Any) -> Any:
    """The inputs with copies of their caches and dicts, since a pass writes into those it gets."""

    def copied(value: Any) -> Any:
        if hasattr(value, "get_seq_length") or isinstance(value, Cache):
            return _copy_cache(value)
        if isinstance(value, Mapping) and not hasattr(value, "to_tuple"):
            value = copy.copy(value)
            value.update({k: copied(v) for k, v in value.items()})
            return value
        return type(value)(map(copied, value)) if type(value) in (list, tuple) else value

    if isinstance(inputs, dict):
        return {k: copied(v) for k, v in inputs.items()}
    return tuple(map(copied, inputs))


def _copy_cache(cache: Any) -> Any:
    """A copy of a cache whose tensors may be part of a graph, or which holds a stream: `deepcopy`
    alone refuses both.
    """
    copies: dict[int, Any] = {}
    seen: set[int] = set()

    def copy_tensors(value: Any) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, torch.Stream):  # of an offloaded cache: one serves both
            copies[id(value)] = value
        elif isinstance(value, Tensor):
            if value.requires_grad:
                copies[id(value)] = value.detach().clone()
        elif isinstance(value, Mapping):
            for part in value.values():
                copy_tensors(part)
        elif isinstance(value, (list, tuple)):
            for part in value:
                copy_tensors(part)
        elif hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)):
            copy_tensors(vars(value))

    copy_tensors(cache)
    return copy.deepcopy(cache, copies)
