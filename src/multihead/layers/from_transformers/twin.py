"""`Twin`, a small-cost copy of a module to experiment with, and what its attention is called with.

Conversion reads a module by running it. The twin has the module's structure and float32 copies of
its parameters on the CPU, with other numbers: large enough that every projection, norm, bias, sink
and table changes the output, also where the module was just initialised with zeros and ones. The
module itself is never run or changed.
"""

from __future__ import annotations

import copy
import inspect
import math
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import MultiheadError

NAME = "multihead_observer"  # of the attention function that the twin calls
SEEN = "_multihead_seen"  # attribute of the twin's modules, a list of calls
GAIN = 1.5  # standard deviation of what a matrix makes of an input of unit variance


@dataclass
class Call:
    """The arguments of a module's attention function, and its result."""

    q: Tensor  # [B, H, L, E]
    k: Tensor  # [B, G, S, E]
    v: Tensor  # [B, G, S, Ev]
    options: dict[str, Any] = field(default_factory=dict)


def refuse(module: nn.Module, feature: str, do: str = "") -> MultiheadError:
    """The error for what a layer can't express: the module's class, the feature with its value, and
    what to do.
    """
    return MultiheadError(
        f"{type(module).__name__}: {feature}; {do or 'no layer of multihead computes that'}"
    )


def twin_of(module: nn.Module) -> nn.Module:
    """The twin of a module: same structure, other numbers, no hooks, evaluation mode."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        return _copy(module, generator, {})


def _copy(module: nn.Module, generator: torch.Generator, configs: dict[int, Any]) -> nn.Module:
    if _has_own_call(module):
        raise MultiheadError(
            f"{type(module).__name__}: its forward was replaced on this instance (by accelerate's"
            " hooks, for instance); remove those first"
        )
    made = copy.copy(module)
    state = made.__dict__
    for name in [name for name in state if name.endswith("_hooks")]:
        state[name] = OrderedDict()
    state["training"] = False
    state["_parameters"] = {
        name: None
        if parameter is None
        else nn.Parameter(_renumber(module, name, parameter, generator), requires_grad=False)
        for name, parameter in module._parameters.items()
    }
    state["_buffers"] = {
        name: buffer.float().cpu()
        if isinstance(buffer, Tensor) and buffer.is_floating_point()
        else buffer.cpu()
        if isinstance(buffer, Tensor)
        else buffer
        for name, buffer in module._buffers.items()
    }
    state["_modules"] = {
        name: None if child is None else _copy(child, generator, configs)
        for name, child in module._modules.items()
    }
    if "config" in state:
        state["config"] = _config(state["config"], configs)
    state[SEEN] = []
    return made


def _has_own_call(module: nn.Module) -> bool:
    return "forward" in module.__dict__


def _config(config: Any, configs: dict[int, Any]) -> Any:
    """A copy of a config whose attention function is the observer."""
    if id(config) not in configs:
        made = SimpleNamespace() if config is None else copy.copy(config)
        made.__dict__.pop("_attn_implementation", None)
        private = "_attn_implementation_internal"
        made.__dict__[private if hasattr(made, private) else "_attn_implementation"] = NAME
        configs[id(config)] = made
    return configs[id(config)]


def _renumber(
    module: nn.Module, name: str, parameter: Tensor, generator: torch.Generator
) -> Tensor:
    x = parameter.detach().to("cpu", torch.float32, copy=True)

    def noise() -> Tensor:
        return torch.empty(x.shape).normal_(generator=generator)

    deviation = float(x.std()) if x.numel() > 1 else 0.0
    if not math.isfinite(deviation):
        x, deviation = torch.zeros_like(x), 0.0
    if x.ndim < 2 or "norm" in type(module).__name__.lower():
        return x.clamp(-2, 2) + 0.3 * noise()
    if isinstance(module, nn.Embedding):
        return noise()
    fan_in = x.shape[-1] if isinstance(module, nn.Linear) else x.shape[0]
    if deviation < 1e-8:
        return noise() * (GAIN * fan_in**-0.5)
    return x * (GAIN * fan_in**-0.5 / deviation)


# ---- Runs


def _observe(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *rest: Any,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """The eager attention function of the module's file, which also notes its call."""
    names = ("dropout", "scaling")
    options |= dict(zip(names, rest))
    vars(module)[SEEN].append(Call(query, key, value, dict(options)))
    eager = definition_of(module, "eager_attention_forward")
    out: tuple[Tensor, Tensor | None] = eager(module, query, key, value, attention_mask, **options)
    return out


def definition_of(module: nn.Module, name: str) -> Any:
    """The object of this name in the file that defines the module's class, or a base of it."""
    for base in type(module).__mro__:
        found = getattr(sys.modules.get(base.__module__), name, None)
        if found is not None:
            return found
    return None


@contextmanager
def _registered(twin: nn.Module) -> Iterator[None]:
    functions = next(
        (
            found
            for part in twin.modules()
            if (found := definition_of(part, "ALL_ATTENTION_FUNCTIONS")) is not None
        ),
        None,
    )
    if functions is not None and NAME not in functions:
        functions.register(NAME, _observe)
    yield


def run(twin: nn.Module, arguments: dict[str, Any]) -> tuple[Tensor, list[Call]]:
    """The output of a twin `[B, L, D]`, and the calls of its attention function."""
    for part in twin.modules():
        vars(part)[SEEN].clear()
    with torch.no_grad(), _registered(twin):
        out = twin(**arguments)
    calls = [call for part in twin.modules() for call in vars(part)[SEEN]]
    return (out[0] if isinstance(out, tuple | list) else out), calls


def signature_of(module: nn.Module) -> dict[str, inspect.Parameter]:
    """The parameters of a module's forward, without `*args` and `**kwargs`."""
    parameters = inspect.signature(type(module).forward).parameters
    found = {
        name: p
        for name, p in parameters.items()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    found.pop("self", None)
    return found
