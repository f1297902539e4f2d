"""Copies with random weights so large that a bug shows: freshly initialised ones give nearly even
attention.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import nn

# Deviation of a matrix' output for a unit input; scores then differ by about 2.5.
GAIN = 1.6


@torch.no_grad()
def with_large_random_weights(module: nn.Module) -> nn.Module:
    """A deep copy on the CPU, in float64 and evaluation, with large random matrices and biases.

    Buffers and gains of norms stay.

    >>> layer = with_large_random_weights(nn.Linear(64, 64))
    >>> layer.weight.dtype, bool(abs(layer.weight.std() - 1.6 / 8) < 0.01)
    (torch.float64, True)
    """
    module = copy.deepcopy(module).to("cpu", torch.float64).eval()
    generator = torch.Generator().manual_seed(0)
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if not parameter.is_floating_point() or not parameter.numel():
                continue
            noise = torch.empty(parameter.shape, dtype=torch.float64)
            noise = noise.normal_(generator=generator).to(parameter)
            if parameter.ndim >= 2:
                parameter.copy_(GAIN * _fan_in(owner, name, parameter) ** -0.5 * noise)
            elif "bias" in name or name.startswith("b_") or not parameter.any():
                # At 0, where a sink or gate starts, what is done with it doesn't show.
                parameter.copy_(0.3 * noise)
    return module


def _fan_in(owner: nn.Module, name: str, parameter: torch.Tensor) -> int:
    if parameter.ndim > 2:
        return max(parameter.shape)
    inputs_first = type(owner).__name__ in ("Conv1D", "EinsumDense", "Dense")
    return parameter.shape[0 if inputs_first or "embedding" in name.lower() else -1]


def with_large_random_arrays(thing: Any) -> Any:
    """The same for an object that keeps its weights in NumPy arrays; 0/1 and -inf masks stay."""
    thing = copy.deepcopy(thing)
    generator = np.random.default_rng(0)
    for name, value in vars(thing).items():
        if not isinstance(value, np.ndarray) or value.ndim < 2:
            continue
        is_square = value.shape[-1] == value.shape[-2]
        is_mask = is_square and set(np.unique(value)) <= {0.0, 1.0, -np.inf}
        if np.issubdtype(value.dtype, np.floating) and not is_mask:
            scale = GAIN * max(value.shape) ** -0.5
            setattr(thing, name, generator.normal(size=value.shape) * scale)
    return thing
