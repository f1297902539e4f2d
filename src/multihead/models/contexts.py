"""Context managers that change a model for a while: evaluation mode, attributes, attention; and
whether a backward pass is under way.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode; afterwards each module is in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def temporary_attributes(module: nn.Module, **attributes: Any) -> Iterator[None]:
    """Set attributes of the instance (None: remove them); afterwards they are as before."""
    own = vars(module)
    before = {name: own.get(name) for name in attributes}
    try:
        _set(own, attributes)
        yield
    finally:
        _set(own, before)


def _set(own: dict[str, Any], attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        if value is None:
            own.pop(name, None)
        else:
            own[name] = value


NAMED = "_multihead_named"  # of an attention module: the implementation that its config named


def named_implementation(module: nn.Module) -> str:
    """The attention implementation that a module's config names, also while an instrumentation has
    put another in its place; "" without.
    """
    own = vars(module).get(NAMED)
    return own or getattr(getattr(module, "config", None), "_attn_implementation", None) or ""


@contextmanager
def attention_implementation(model: nn.Module, name: str) -> Iterator[None]:
    """Set the attention implementation in every transformers config of the model; afterwards each
    config names the one that it named before.
    """
    configs: dict[int, Any] = {}
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            configs[id(config)] = config
    before = [(c, c._attn_implementation_internal) for c in configs.values()]
    try:
        for config, _ in before:
            config._attn_implementation_internal = name
        yield
    finally:
        for config, old in before:
            config._attn_implementation_internal = old


@contextmanager
def without_stored_weights(model: nn.Module) -> Iterator[bool]:
    """Turn `output_attentions` off in every transformers config of the model; afterwards each is as
    before. The weights of all heads aren't there to be returned where they are read block by block.

    Yields whether one was on.
    """
    every: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    configs = {id(c): c for c in every if getattr(c, "_output_attentions", False)}
    try:
        for config in configs.values():
            config._output_attentions = False
        yield bool(configs)
    finally:
        for config in configs.values():
            config._output_attentions = True


def is_in_backward() -> bool:
    """Whether this runs inside a backward pass, which recomputes checkpointed layers."""
    return torch._C._current_graph_task_id() != -1


class _ForceEager:
    """torch.compile off in the whole process while any `with uncompiled:` lasts, in any thread."""

    def __init__(self) -> None:
        self.lock, self.users = threading.Lock(), 0
        self.stance: Any = None

    def __enter__(self) -> None:
        with self.lock:
            self.users += 1
            if self.users == 1:
                self.stance = torch.compiler.set_stance("force_eager")
                self.stance.__enter__()

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.users -= 1
            if not self.users:
                self.stance.__exit__(None, None, None)


uncompiled = _ForceEager()
