"""A copy of a module whose weights are large enough that a bug shows: freshly drawn ones make
attention nearly even.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import nn

# standard deviation of what a matrix makes of a unit input; scores then differ by about 2.5
GAIN = 1.6


@torch.no_grad()
def sharpened(module: nn.Module) -> nn.Module:
    """A deep copy, on the CPU, in float64 and evaluation, with random weights of that size; buffers
    and gains of norms stay.
    """
    module = copy.deepcopy(module).to("cpu", torch.float64).eval()
    generator = torch.Generator().manual_seed(0)
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if not parameter.is_floating_point() or not parameter.numel():
                continue
            noise = (
                torch.empty(parameter.shape, dtype=torch.float64)
                .normal_(generator=generator)
                .to(parameter)
            )
            if parameter.ndim >= 2:
                inputs_first = (
                    type(owner).__name__ in ("Conv1D", "EinsumDense", "Dense")
                    or "embedding" in name.lower()
                )
                fan_in = (
                    parameter.shape[0]
                    if inputs_first
                    else max(
                        parameter.shape[-1],
                        (
                            parameter[0].numel() // max(1, parameter.shape[1])
                            if parameter.ndim > 2
                            else 0
                        ),
                    )
                )
                if parameter.ndim > 2:
                    fan_in = max(parameter.shape)
                parameter.copy_(GAIN * fan_in**-0.5 * noise)
            elif "bias" in name or name.startswith("b_"):
                parameter.copy_(0.3 * noise)
    return module


def sharpen_arrays(thing: Any) -> Any:
    """The same for an object that keeps its weights in NumPy arrays."""
    thing = copy.deepcopy(thing)
    draw = np.random.default_rng(0)
    for name, value in vars(thing).items():
        if (
            isinstance(value, np.ndarray)
            and value.ndim >= 2
            and np.issubdtype(value.dtype, np.floating)
        ):
            if value.shape[-1] == value.shape[-2] and set(np.unique(value)) <= {0.0, 1.0, -np.inf}:
                continue  # a mask
            setattr(thing, name, draw.normal(size=value.shape) * GAIN * max(value.shape) ** -0.5)
    return thing
