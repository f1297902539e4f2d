"""Weights as modules apply them: read where they are plain parameters, else measured.

Offloaded, quantised, adapted, parametrized and user-defined projections hold their weights in many
ways, but all are called in one: the module applied to unit vectors gives its matrix row by row. So
nothing is read past the module, whatever wraps it. Weights that accelerate keeps elsewhere are
fetched by its own hook.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops.backends.blocks import autocast_off
from .contexts import evaluation
from .slices import has_plain_weight, in_features, is_transposed

CHUNK = 1024  # unit vectors at once
TESTS = 8  # random inputs that show how far a module is from linear
# Of unit vectors, where a sum with the bias would round small weights away.
SIZES = {torch.float16: 64, torch.bfloat16: 4096}
INEXACT = 0.06  # relative to the largest output; beyond that a module isn't taken for linear
OURS = "_multihead_hook"  # attribute of the hooks that this library registers


class Projection(NamedTuple):
    """A linear module as a matrix: y = x @ weight + bias.

    Attributes:
        weight, bias: `[inputs, outputs]` and `[outputs]`.
        error: the largest deviation of the module from that, relative to its largest output: 0
            where weights were read, rounding where they were measured, more where the module
            quantises what enters it.
    """

    weight: Tensor
    bias: Tensor
    error: float = 0.0


@torch.no_grad()
def read_projection(
    module: nn.Module, like: Tensor | None = None, *, hooks: bool = False
) -> Projection:
    """The matrix of a Linear, a Conv1D, or any module with `in_features` that acts like one.

    Args:
        module: the projection; dropout in it is left out.
        like: a tensor of the device and dtype that enter it; by default those of its parameters.
        hooks: apply forward hooks on it, too, except those of this library. Then the matrix is
            always measured.

    >>> layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    >>> found = read_projection(layer)
    >>> torch.allclose(found.weight, layer.weight.T), found.error < 1e-6
    (True, True)
    """
    if not hooks and has_plain_weight(module):
        with loaded(module):
            plain: Any = module
            weight, bias = plain.weight.detach(), plain.bias
            if hasattr(module, "_hf_hook"):
                weight, bias = weight.clone(), None if bias is None else bias.clone()
        weight = weight if is_transposed(module) else weight.T
        bias = weight.new_zeros(weight.shape[1]) if bias is None else bias.detach()
        return Projection(weight, bias)
    device, dtypes = _place(module, like)
    for dtype in dtypes:
        zero = torch.zeros(1, 1, in_features(module), device=device, dtype=dtype)
        try:
            shift = apply_quietly(module, zero, hooks)[0, 0]
            break
        except RuntimeError:  # it takes another dtype
            if dtype == dtypes[-1]:
                raise
    with autocast_off(zero):
        return _measure(module, zero, shift, hooks)


def _measure(module: nn.Module, zero: Tensor, shift: Tensor, hooks: bool) -> Projection:
    """The projection whose output for `zero` `[1, 1, inputs]` is `shift`."""
    width, size = zero.shape[-1], SIZES.get(zero.dtype, 1)
    work = torch.promote_types(zero.dtype, torch.float32)
    parts = []
    for start in range(0, width, CHUNK):
        unit = zero.new_zeros(1, min(CHUNK, width - start), width)
        unit[0].diagonal(start).fill_(size)
        part = apply_quietly(module, unit, hooks)[0].to(work) - shift.to(work)
        parts.append((part / size).to(shift.dtype))
    x = torch.randn(1, TESTS, width, generator=torch.Generator().manual_seed(0)).to(zero)
    y = apply_quietly(module, x, hooks)[0].to(work) - shift.to(work)
    candidates = [torch.cat(parts)]
    if not hooks and (stored := _dequantised(module)) is not None:
        candidates.insert(0, stored.T.to(candidates[0]))
    largest = max(float(y.abs().max()), 1e-30)
    errors = [
        float((x[0].to(work) @ weight.to(work) - y).abs().max()) / largest for weight in candidates
    ]
    best = min(range(len(errors)), key=lambda n: errors[n])
    return Projection(candidates[best], shift, errors[best])


def read_embedding(module: nn.Module) -> Tensor:
    """The table `[V, D]` of an embedding.

    >>> read_embedding(nn.Embedding(5, 3)).shape
    torch.Size([5, 3])
    """
    weight: Any = module._parameters.get("weight")
    if weight is not None and type(weight) is nn.Parameter:
        with torch.no_grad(), loaded(module):
            table: Any = module.weight
            return table.detach().clone() if hasattr(module, "_hf_hook") else table.detach()
    for layer in (module, getattr(module, "base_layer", module)):
        number: Any = getattr(layer, "num_embeddings", None)
        if number is not None:
            break
    else:
        weight = module.weight
        number = len(weight() if inspect.ismethod(weight) else weight)
    with torch.no_grad(), evaluation(module):
        device = _place(module, None)[0]
        found: Tensor = module.forward(torch.arange(number, device=device))
        return found.detach()


@contextmanager
def loaded(module: nn.Module) -> Iterator[None]:
    """The parameters of a module in memory, if accelerate keeps them elsewhere between calls."""
    if not hasattr(module, "_hf_hook"):
        yield
        return
    from accelerate.utils import align_module_device  # type: ignore[import-untyped]

    with align_module_device(module):
        yield


def has_hooks(module: nn.Module) -> bool:
    """Whether others registered forward hooks on it."""
    every = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return any(not hasattr(hook, OURS) for hook in every)


def describe_state(module: nn.Module) -> list[Any]:
    """A value that changes when a module applies other weights: versions of its tensors, and the
    adapters that are active.
    """
    found: list[Any] = []
    for tensor in (*module.parameters(), *module.buffers()):
        version = 0 if tensor.is_inference() else tensor._version
        found.append(
            (id(tensor) if type(tensor) is not nn.Parameter else tensor.data_ptr(), version)
        )
    if type(module) is not nn.Linear:
        for part in module.modules():
            for name in ("active_adapters", "disable_adapters", "merged_adapters", "scaling"):
                if hasattr(part, name):
                    found.append(repr(getattr(part, name)))
    return found


@torch.no_grad()
def apply_quietly(module: nn.Module, x: Tensor, hooks: bool = False) -> Tensor:
    """The output `[1, n, outputs]` of the module's forward for x `[1, n, inputs]`, in evaluation
    mode and without autocast; not of a call, whose hooks might take unit vectors for a text.

    With `hooks` those of others are called, too; what a hook before the forward returns is left
    out, for x is what enters after it.
    """
    with evaluation(module), autocast_off(x):
        if hooks:
            for number, before in list(module._forward_pre_hooks.items()):
                if not hasattr(before, OURS):
                    named = number in module._forward_pre_hooks_with_kwargs
                    before(module, (x,), {}) if named else before(module, (x,))
        y: Any = module.forward(x)
        if hooks:
            for number, after in list(module._forward_hooks.items()):
                if not hasattr(after, OURS):
                    named = number in module._forward_hooks_with_kwargs
                    changed = after(module, (x,), {}, y) if named else after(module, (x,), y)
                    y = y if changed is None else changed
        found: Tensor = y[0] if isinstance(y, tuple) else y
        return found


def _place(module: nn.Module, like: Tensor | None) -> tuple[torch.device, list[torch.dtype]]:
    """The device of what enters a projection, and the dtypes that it may have, the likeliest
    first.
    """
    tensors = [*module.parameters(), *module.buffers()]
    dtypes = [t.dtype for t in tensors if t.is_floating_point() and t.dtype.itemsize > 1][:1]
    dtypes += [] if like is None else [like.dtype]
    devices = [] if like is None else [like.device]
    where = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    devices += [] if where is None else [torch.device(where)]
    devices += [t.device for t in tensors if not t.is_meta]
    device = devices[0] if devices else torch.device("cpu")
    return device, list(dict.fromkeys([*dtypes, torch.float32]))


def _dequantised(module: nn.Module) -> Tensor | None:
    """The weight `[outputs, inputs]` that a quantised module stores, as floating numbers."""
    weight: Any = getattr(module, "weight", None)
    if inspect.ismethod(weight):  # of torch.ao's modules
        weight = weight()
    if not isinstance(weight, Tensor) or not hasattr(weight, "dequantize"):
        return None
    if type(weight) in (Tensor, nn.Parameter) and not weight.is_quantized:
        return None
    try:
        found = weight.dequantize()
    except (NotImplementedError, RuntimeError, TypeError):
        return None
    shape = len(found) if found.ndim == 2 else 0
    return found.detach() if shape and found.shape[1] == in_features(module) else None
