"""One attention module of a transformers model, and the layer in its place: `replace_attention`
converts, swaps and restores them one by one.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import MultiheadError
from .attention import MultiHeadAttention
from .latent import LatentAttention
from .model_attention import IGNORED, ROLES, ModelAttention
from .rotary import Rotary

__all__ = ["convert_unit", "find_units", "rebuild_unit", "swap_unit"]

_ATTENTION = re.compile("attention|attn", re.IGNORECASE)
_ROTARY = re.compile("rotary|rope", re.IGNORECASE)
_OUT = "output.dense"  # where BERT and its relatives have W_O, next to the attention module


class AttentionUnit(NamedTuple):
    """The modules that one layer replaces: an attention module, and W_O if its parent has that."""

    path: str
    module: nn.Module
    parent: nn.Module | None  # which holds W_O

    @property
    def whole(self) -> nn.Module:
        return self.module if self.parent is None else self.parent

    @property
    def describe(self) -> str:
        return f"{self.path} ({type(self.module).__name__})"


def find_units(model: nn.Module) -> list[AttentionUnit]:
    """The innermost modules that are attention by the name of their class and have weights."""
    named = [
        (path, module)
        for path, module in model.named_modules()
        if _ATTENTION.search(type(module).__name__) and next(module.parameters(), None) is not None
    ]
    units = []
    for path, module in named:
        if any(other.startswith(f"{path}.") for other, _ in named):
            continue
        parent = model.get_submodule(path.rpartition(".")[0])
        has_out = _get(parent, _OUT) is not None
        units.append(AttentionUnit(path, module, parent if has_out else None))
    return units


def _get(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


class Converted(NamedTuple):
    layer: MultiHeadAttention | LatentAttention
    pairs: str  # how the model arranges rotations
    rounded: list[nn.Parameter]  # the module's, to which the layer added something


def convert_unit(unit: AttentionUnit, model: nn.Module) -> Converted:
    """The layer of an attention module, which has the module's own parameters where it can."""
    for module in unit.whole.modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        # those of transformers, which records outputs, are without effect here
        hooked = any(not _module_of(hook).startswith("transformers.") for hook in hooks)
        if hooked or "forward" in vars(module):
            raise MultiheadError(
                f"{unit.describe} can't be replaced: {type(module).__name__} in it has hooks, or a"
                " forward that was replaced on this one object; remove them first"
            )
    try:
        layer = _to_layer(unit.whole)
        pairs = _find_pairs(layer, unit.module, model)
        _check_arguments(unit.module, layer)
    except (MultiheadError, TypeError) as error:
        raise MultiheadError(f"{unit.describe} can't be replaced: {error}") from error
    own = dict(unit.whole.named_parameters())
    rounded: list[nn.Parameter] = []
    trace = _trace(unit.whole, unit.describe)
    for name, source in trace.sources.items():
        if source.name:
            _set_parameter(layer, name, own[source.name])
        elif bool(source.constant.any()):
            rounded += [own[theirs] for theirs in trace.parts_of(source)]
    layer.mask = None  # the model gives the masks
    return Converted(layer, pairs, rounded)


def _check_arguments(module: nn.Module, layer: nn.Module) -> None:
    """Raise if every call has an argument that the layer couldn't take."""
    _, *others = list(inspect.signature(type(module).forward).parameters.values())[1:]
    uses_alibi = getattr(getattr(module, "config", None), "alibi", True)
    for p in others:
        if p.name == "alibi" and not uses_alibi:  # Falcon's, None where it rotates
            continue
        required = p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        if required and p.name == "position_bias" and layer.positions is not None:  # MPT's
            raise MultiheadError(
                "its forward needs position_bias=, which the layer would add to its own"
            )
        if required and p.name not in ROLES and p.name not in IGNORED:
            raise MultiheadError(f"its forward needs {p.name}=, which the layer doesn't know")


def _to_layer(whole: nn.Module) -> MultiHeadAttention | LatentAttention:
    is_latent = hasattr(whole, "kv_a_proj_with_mqa")
    cls = LatentAttention if is_latent else MultiHeadAttention
    return cls.from_transformers(whole)


class _Source(NamedTuple):
    """Where a parameter of a layer comes from."""

    name: str  # the parameter of the module that it is, unchanged; "" where it isn't one
    number: Tensor  # numbers of its elements among all of the module, from 1 on; 0 for a constant
    constant: Tensor  # what the layer adds to them


class _Trace(NamedTuple):
    sources: dict[str, _Source]
    ranges: dict[str, tuple[int, torch.Size]]  # first number and shape of the module's parameters

    def parts_of(self, source: _Source) -> dict[str, Tensor]:
        """The module's parameters of which a parameter of the layer has parts, and which elements
        come from each.
        """
        found = {}
        for name, (first, shape) in self.ranges.items():
            inside = (source.number >= first) & (source.number < first + shape.numel())
            if bool(inside.any()):
                found[name] = inside
        return found


def _trace(whole: nn.Module, describe: str) -> _Trace:
    """Where the parameters of a module go in its layer, found by converting the module with the
    numbers of their elements for weights, and with zeros.
    """
    counted: dict[int, Any] = {}
    zeros: dict[int, Any] = {}
    ranges, start = {}, 1
    for name, weight in whole.named_parameters():
        numbers = torch.arange(start, start + weight.numel(), dtype=torch.float64)
        counted[id(weight)] = nn.Parameter(numbers.view(weight.shape), requires_grad=False)
        zeros[id(weight)] = nn.Parameter(torch.zeros_like(counted[id(weight)]), requires_grad=False)
        ranges[name] = (start, weight.shape)
        start += weight.numel()
    configs = {  # which copies share
        id(config): config
        for module in whole.modules()
        if (config := vars(module).get("config")) is not None
    }
    first, second = (
        _to_layer(copy.deepcopy(whole, configs | weights)) for weights in (counted, zeros)
    )
    sources: dict[str, _Source] = {}
    seen = torch.zeros(start, dtype=torch.bool)
    names = {first_number: name for name, (first_number, _) in ranges.items()}
    for (name, numbers), constant in zip(first.named_parameters(), second.parameters()):
        number = (numbers - constant).detach().long()
        seen[number.flatten()] = True
        least = int(number.flatten()[0])
        source = names.get(least, "")
        is_same = (
            bool(source)
            and ranges[source][1] == number.shape
            and not bool(constant.any())
            and torch.equal(number.flatten(), torch.arange(least, least + number.numel()))
        )
        sources[name] = _Source(source if is_same else "", number, constant.detach())
    for name, (least, shape) in ranges.items():
        part = seen[least : least + shape.numel()]
        if bool(part.any()) and not bool(part.all()):
            raise MultiheadError(
                f"{describe} can't be replaced: the layer has only a part of its {name}, which"
                " couldn't be restored"
            )
    return _Trace(sources, ranges)


def _module_of(hook: Any) -> str:
    return getattr(hook, "__module__", None) or ""


def _find_pairs(layer: Any, module: nn.Module, model: nn.Module) -> str:
    """How the rotations that the model computes for its layers are arranged: "halves" (all angles,
    then all again), "neighbours" (each angle twice), or "unknown" where none is the layer's, so
    that the layer computes its rotations from position ids.
    """
    positions = layer.positions
    if not isinstance(positions, Rotary):
        return "unknown"
    ids = torch.arange(1, 4)[None]
    half = positions.rotary_dim // 2
    wanted = torch.stack(positions.cos_sin(ids[0]))
    for table in _rotations(model, module, ids):
        once = table if table.shape[-1] == half else table[..., :half]
        if once.shape == wanted.shape and torch.allclose(once, wanted, atol=1e-5):
            return "halves"
        if table.shape[-1] == 2 * half and torch.allclose(table[..., ::2], wanted, atol=1e-5):
            return "neighbours"
    return "unknown"


def _rotations(model: nn.Module, module: nn.Module, ids: Tensor) -> Iterator[Tensor]:
    """Cosines and sines `[2, L, R]` of these positions, by each module that computes some."""
    device = next(model.parameters()).device
    for other in model.modules():
        if not _ROTARY.search(type(other).__name__) or isinstance(other, Rotary):
            continue
        given = (torch.zeros(1, 1, device=device), ids.to(device))
        kinds: list[tuple[Any, ...]] = [()]
        if "layer_type" in inspect.signature(type(other).forward).parameters:
            # ModernBERT's blocks know their type, its attention doesn't
            own = getattr(module, "layer_type", None)
            types = getattr(getattr(other, "config", None), "layer_types", None) or [None]
            kinds = [(x,) for x in ([own] if own is not None else dict.fromkeys(types))]
        for kind in kinds:
            try:
                found = other(*given, *kind)
            except Exception:  # it is called otherwise, so its results aren't what layers get
                continue
            is_pair = isinstance(found, tuple) and len(found) == 2
            if is_pair and all(isinstance(x, Tensor) and x.ndim == 3 for x in found):
                yield torch.stack(found)[:, 0].float().cpu()


def _set_parameter(module: nn.Module, name: str, weight: nn.Parameter) -> None:
    path, _, last = name.rpartition(".")
    setattr(module.get_submodule(path), last, weight)


def swap_unit(unit: AttentionUnit, converted: Converted, model: nn.Module) -> None:
    """Put the layer in the module's place. The module is kept without memory for its weights, other
    than those that the layer has rounded.
    """
    kept = {"": unit.module}
    attention = ModelAttention(converted.layer, unit.module, pairs=converted.pairs)
    if unit.parent is not None:
        kept[_OUT] = unit.parent.get_submodule(_OUT)
        unit.parent.set_submodule(_OUT, nn.Identity())
    for module in kept.values():
        for name, weight in list(module.named_parameters()):
            if not any(weight is exact for exact in converted.rounded):
                empty = torch.empty_like(weight, device="meta")
                _set_parameter(module, name, nn.Parameter(empty, weight.requires_grad))
    attention.kept.update(kept)
    model.set_submodule(unit.path, attention)


def rebuild_unit(path: str, attention: ModelAttention, parent: nn.Module) -> dict[str, nn.Module]:
    """The modules that a layer replaced, with the layer's weights, by their paths."""
    kept, layer = attention.kept, attention.attention
    last = path.rpartition(".")[2]
    whole = kept[""]
    if _OUT in kept:
        whole = _with_modules(parent, {last: whole, _OUT: kept[_OUT]})
    describe = f"{path} ({type(kept['']).__name__})"
    if layer.shard is not None:
        raise MultiheadError(
            f"{describe} can't be restored: the heads of its layer are divided among ranks; save"
            " the layer's weights with torch.distributed.checkpoint, and load them into one that"
            " isn't divided"
        )
    trace, weights = _trace(whole, describe), dict(layer.named_parameters())
    if set(trace.sources) != set(weights):
        raise MultiheadError(
            f"{describe} can't be restored: modules in the layer were replaced, whose parameters"
            f" are {', '.join(sorted(set(weights) ^ set(trace.sources)))}; put nn.Linear back"
        )
    parts: dict[str, Tensor] = {}
    exact = {name: x for name, x in whole.named_parameters() if not x.is_meta}
    for name, source in trace.sources.items():
        weight = weights[name]
        if source.name:
            _set_parameter(whole, source.name, weight)
            continue
        value = weight.detach() - source.constant.to(weight)
        for theirs, inside in trace.parts_of(source).items():
            least, shape = trace.ranges[theirs]
            if theirs in exact and torch.equal(
                exact[theirs].detach() + source.constant.to(weight), weight
            ):
                continue
            flat = parts.setdefault(theirs, value.new_empty(shape.numel()))
            inside = inside.to(value.device)
            flat[source.number.to(value.device)[inside] - least] = value[inside]
            made = nn.Parameter(flat.view(shape), requires_grad=weight.requires_grad)
            _set_parameter(whole, theirs, made)
    device = next(layer.parameters()).device
    for module in kept.values():
        module.train(attention.training).to(device)  # buffers, too
    above = path.rpartition(".")[0]
    return {f"{above}.{inner}".lstrip(".") if inner else path: m for inner, m in kept.items()}


def _with_modules(module: nn.Module, inner: dict[str, nn.Module]) -> nn.Module:
    """A shallow copy of a module with other modules at these paths."""
    made = copy.copy(module)
    children = dict(module._modules)
    vars(made)["_modules"] = children
    for path, other in inner.items():
        name, _, rest = path.partition(".")
        child = children[name]
        children[name] = other if child is None or not rest else _with_modules(child, {rest: other})
    return made
