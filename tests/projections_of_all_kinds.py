"""Output projections that hold their weights in every way that libraries have, each with a twin: a
plain Linear of the same matrix.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, weight_norm

Change = Callable[[nn.Linear], nn.Module]


def scaled(layer: nn.Linear, factor: float = 2.0) -> nn.Linear:
    layer = copy.deepcopy(layer)
    layer.weight.data *= factor
    return layer


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrized(layer: nn.Linear) -> nn.Module:
    return parametrize.register_parametrization(layer, "weight", Twice())


def stale_weight_norm(layer: nn.Linear) -> nn.Module:
    """Its `weight` is that of before until the next call."""
    normed: Any = weight_norm(layer)
    normed.weight_g.data *= 2
    return normed


def hooked(layer: nn.Linear) -> nn.Module:
    """A hook changes what it returns."""
    layer.register_forward_hook(lambda module, args, out: 2 * (out - module.bias) + module.bias)
    return layer


class Packed(nn.Module):
    """A row of int8 with its scale, as GPTQ's and AWQ's modules have; tensors that are no
    parameters.
    """

    def __init__(self, layer: nn.Linear, *, buffers: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        weight = layer.weight.data
        scales = weight.abs().amax(1, keepdim=True) / 127
        packed = (weight / scales).round().to(torch.int8)
        if buffers:
            self.register_buffer("scales", scales)
            self.register_buffer("packed", packed)
            self.bias: Any = layer.bias
        else:
            self.held = packed, scales, layer.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        held = getattr(self, "held", None) or (self.packed, self.scales, self.bias)
        packed, scales, bias = held
        return x @ (packed.to(x.dtype) * scales.to(x.dtype)).T + bias.to(x.dtype)


def unpacked(layer: nn.Linear) -> nn.Linear:
    packed, layer = Packed(layer), copy.deepcopy(layer)
    layer.weight.data = packed.packed.float() * packed.scales
    return layer


class Wrapped(nn.Module):
    """A user's module, which knows its width and nothing else."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.inner, self.in_features = layer, layer.in_features

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Elsewhere(Tensor):
    """A wrapper subclass that supports a product and nothing else, as quantised tensors do."""

    @staticmethod
    def __new__(cls, data: Tensor) -> Elsewhere:
        return Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype, device=data.device)

    def __init__(self, data: Tensor) -> None:
        self.held = data

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        aten = torch.ops.aten
        if function is aten.detach.default:
            return cls(args[0].held)
        if function not in (aten.t.default, aten.mm.default, aten.addmm.default):
            raise NotImplementedError(f"{function} isn't supported")
        return function(*torch.utils._pytree.tree_map_only(cls, lambda x: x.held, args))


def with_subclass(layer: nn.Linear) -> nn.Module:
    layer.weight = nn.Parameter(Elsewhere(layer.weight.data), requires_grad=False)
    return layer


def sharded(layer: nn.Linear) -> nn.Module:
    """Whole only while it is called, as FSDP's modules are."""
    whole = layer.weight.data.clone()

    def put(rows: int) -> None:
        layer.weight = nn.Parameter(whole[:rows].clone(), requires_grad=False)

    layer.register_forward_pre_hook(lambda module, args: put(len(whole)))
    layer.register_forward_hook(lambda module, args, out: put(1))
    put(1)
    return layer


KINDS: dict[str, tuple[Change, Change]] = {
    "weight norm": (parametrizations.weight_norm, copy.deepcopy),
    "weight norm by a hook": (weight_norm, copy.deepcopy),
    "weight norm, changed since": (stale_weight_norm, scaled),
    "parametrized": (parametrized, scaled),
    "a hook that changes the output": (hooked, scaled),
    "packed": (Packed, unpacked),
    "packed, without tensors": (lambda layer: Packed(layer, buffers=False), unpacked),
    "a user's module": (Wrapped, copy.deepcopy),
    "a tensor subclass": (with_subclass, copy.deepcopy),
    "sharded": (sharded, copy.deepcopy),
}
