"""The tensors that transformers' cache holds of each module, counted tensor by tensor: the model
runs on the meta device, where nothing is computed, for two and for three tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as fx_config
from torch.utils._python_dispatch import TorchDispatchMode

from ..models.quiet import quiet
from .shape import Kept

# Attributes of a cache's layers. Those of the prefill are kept whole next to a window of the tokens
# generated after it.
KEYS, PREFILL = ("keys", "values"), ("prefill_keys", "prefill_values")


@dataclass(frozen=True)
class Held:
    """The tensors that one module puts into the cache."""

    keys: tuple[int, ...] = ()  # numbers of a token's keys, and of its values
    layers: int = 0  # of the cache that hold such keys, where layers share the module
    whole: bool = False  # it keeps every token, whatever its layer's window
    others: tuple[Kept, ...] = ()  # other numbers of a token: keys of an indexer
    states: tuple[tuple[str, Kept], ...] = ()  # whatever the length, with the attribute's name


def probe_cache(model: nn.Module) -> dict[str, Held]:
    """The tensors that each module of a model puts into its cache, by module path; nothing where
    the model takes no cache, or can't be run without values.

    Args:
        model: on the meta device, in bfloat16, with nothing but token ids to read.
    """
    try:
        short = _run(model, 2)
        paths = [path for tensors in short.values() for path in tensors]
        # a second run only where names don't show what grows with the number of tokens
        long = short if all(map(_growth, paths)) else _run(model, 3)
    except Exception:  # of a model's own code, which may be anything
        return {}
    if {name: tensors.keys() for name, tensors in short.items()} != {
        name: tensors.keys() for name, tensors in long.items()
    }:
        return {}
    return {name: _compare(tensors, long[name]) for name, tensors in short.items()}


def has_only_keys(cache: Sequence[Any]) -> bool:
    """Whether all layers of a cache keep keys and values of all tokens, of a window, or nothing."""
    from transformers import cache_utils

    plain = (
        cache_utils.DynamicLayer,
        cache_utils.DynamicSlidingWindowLayer,
        cache_utils.DummyLayer,
    )
    return bool(cache) and all(type(layer) in plain for layer in cache)


def _growth(path: str) -> str:
    """ "keys" for what grows with the number of tokens, "states" for what doesn't, by its path in
    the cache; "" where that isn't known.
    """
    attribute = path.rpartition(".")[2]
    return "states" if "_states." in path else "keys" if attribute in (*KEYS, *PREFILL) else ""


def _compare(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Held:
    """The parts that grow with the number of tokens, and those that don't."""
    keys: dict[str, list[int]] = {}
    others, states, whole = [], [], False
    for path, tensor in before.items():
        grown = after[path].numel() - tensor.numel()
        if _growth(path) == "keys":
            grown = tensor.numel() // tensor.shape[-2]  # a window may be full already
        own = tensor.dtype is not torch.bfloat16
        kept = Kept(grown or tensor.numel(), tensor.element_size() if own else None)
        layer, _, attribute = path.rpartition(".")
        if attribute in (*KEYS, *PREFILL):
            keys.setdefault(layer, []).append(kept.numbers)
            whole |= attribute in PREFILL
        elif grown:
            others.append(kept)
        else:
            states.append((path.split(".")[-2 if attribute.isdigit() else -1], kept))
    of_token = tuple(next(iter(keys.values()), ()))
    return Held(of_token, len(keys), whole, tuple(others), tuple(states))


def _run(model: nn.Module, length: int) -> dict[str, dict[str, Tensor]]:
    """The tensors that each module added to the cache of a pass, by path in the cache."""
    found: dict[str, dict[str, Tensor]] = {}
    known: dict[str, Tensor] = {}

    def after(name: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        for cache in filter(_is_cache, (*args, *kwargs.values())):
            now = dict(_tensors(cache))
            for path, tensor in now.items():
                if path not in known:
                    found.setdefault(name, {})[path] = tensor
            known.update(now)

    with ExitStack() as stack:
        for name, module in model.named_modules():

            def hook(*call: Any, name: str = name) -> None:
                after(name, *call)

            handle = module.register_forward_hook(hook, with_kwargs=True)
            stack.callback(handle.remove)
        stack.enter_context(torch.no_grad())
        stack.enter_context(quiet())
        stack.enter_context(_Valueless())
        # x[x > 0]
        stack.enter_context(fx_config.patch(meta_nonzero_assume_all_nonzero=True))  # type: ignore[attr-defined]
        model(input_ids=torch.zeros(1, length, dtype=torch.long, device="meta"), use_cache=True)
    return _by_layer(found)


def _by_layer(found: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """The same, where a layer's tensors that grow belong to the module that adds its keys, and not
    to the one that happens to return next.
    """
    owners = {
        path.rpartition(".")[0]: name
        for name, tensors in found.items()
        for path in tensors
        if path.rpartition(".")[2] in KEYS
    }
    sorted_out: dict[str, dict[str, Tensor]] = {}
    for name, tensors in found.items():
        for path, tensor in tensors.items():
            layer = path.rpartition(".")[0]
            owner = name if "states" in path else owners.get(layer, name)
            sorted_out.setdefault(owner, {})[path] = tensor
    return sorted_out


class _Valueless(TorchDispatchMode):
    """Give what depends on values, which tensors on the meta device lack: no nonzero elements, and
    zero for a number.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.nonzero.default:
            return args[0].new_empty((0, args[0].ndim), dtype=torch.long)
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return args[0].dtype.is_floating_point and 0.0
        return func(*args, **(kwargs or {}))


def _is_cache(value: Any) -> bool:
    return any("Cache" in base.__name__ for base in type(value).__mro__)


def _tensors(value: Any, path: str = "", depth: int = 5) -> Iterator[tuple[str, Tensor]]:
    """All tensors with a batch and numbers in a cache, by their path in it."""
    if isinstance(value, Tensor):
        if value.ndim > 1 and value.numel():
            yield path, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _tensors(inner, f"{path}.{name}", depth)
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from _tensors(inner, f"{path}.{number}", depth)
    elif depth and (hasattr(value, "update") or _is_cache(value)):  # a layer of a cache
        yield from _tensors(vars(value), path, depth - 1)
