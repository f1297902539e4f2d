"""Find a config with which plain transformers loads a model whose heads were pruned or shared.

No rules of families: the numbers of heads in the config (`HEADS_ENTRY`, `KV_HEADS_ENTRY` of
`names.py`) are set to what the attention modules have now, the config is written and read back,
which validates it, and plain transformers builds the model on the meta device. Where its parameters
have the same shapes, it is filled with the weights, which stay where they are in memory, and its
outputs are compared. If the numbers alone don't do, the search goes on with

- `head_dim`, which many families read by `getattr` without declaring it,
- a setting for biases, if the output projections have one that their family hasn't,
- the forms for numbers that differ by layer: lists such as `num_attention_heads_per_layer`, and
  transformers' `per_layer_config`.
"""

from __future__ import annotations

import copy
import itertools
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .contexts import evaluation
from .head_layout import HeadLayout
from .introspect import device_of, tolerance
from .names import HEAD_DIM_ENTRY, HEADS_ENTRY, KV_HEADS_ENTRY, NAMES
from .quiet import quiet
from .site import Site, find_sites
from .slices import outputs_first
from .transformers import NAME

__all__ = ["Plain", "find_plain_config", "set_entries"]

MOST_CONFIGS = 64  # that are tried
LONGEST = 240  # characters of another library's message
Entry = tuple[tuple[str, ...], str]  # path of a config in the whole, and the name in it


@dataclass(frozen=True)
class Plain:
    """A verdict, also its truth value: whether plain transformers loads a model.

    Attributes:
        config: the config with which it does, else None.
        changes: what differs in it from the model's, by the path of a config in the whole and the
            name in it.
        biases: names of the projections that need a bias of zeros for it.
        reason: the number or setting in the way, else "".

    >>> bool(Plain(reason="hidden_size 4096 is not a multiple of 24 heads"))
    False
    """

    config: Any = None
    changes: Mapping[Entry, Any] = field(default_factory=dict)
    biases: tuple[str, ...] = ()
    reason: str = ""

    def __bool__(self) -> bool:
        return self.config is not None

    def apply(self, model: Any) -> None:
        """Give a model this config and these biases."""
        set_entries(model.config, self.changes)
        for name in self.biases:
            module = model.get_submodule(name)
            weight = outputs_first(module)
            module.bias = nn.Parameter(
                weight.new_zeros(weight.shape[0]), requires_grad=bool(module.weight.requires_grad)
            )


class _NotPlainError(Exception):
    """Why a config doesn't do. The reason that came furthest is the one that the user gets."""

    def __init__(self, stage: int, reason: str) -> None:
        super().__init__(reason)
        self.stage, self.reason = stage, reason


INVALID, SHAPES, BIASES, OUTPUTS = range(4)  # stages


@dataclass
class _Part:
    """The attention modules that one config object describes, with their heads now and before."""

    path: tuple[str, ...]
    config: Any
    sites: list[Site] = field(default_factory=list)
    heads: list[int] = field(default_factory=list)
    kv_heads: list[int] = field(default_factory=list)
    before: list[tuple[Any, ...]] = field(default_factory=list)  # what one number covers

    @property
    def is_cut(self) -> bool:
        return any(hasattr(site.module, NAME) for site in self.sites)

    @property
    def is_uniform(self) -> bool:
        """Whether layers that were alike before are alike."""
        now = set(zip(self.before, self.heads, self.kv_heads, strict=True))
        return len(now) == len(set(self.before))


def find_plain_config(model: Any, batch: Mapping[str, Any] | None = None) -> Plain:
    """A config with which plain transformers loads this model, or the reason that there is none.

    Args:
        model: a transformers model, whose heads may have been removed or shared; on the meta device
            its config and the shapes of its parameters are compared, and nothing else.
        batch: model inputs, on which outputs are compared; without them shapes are.

    >>> import multihead
    >>> model, _ = multihead.load_builtin()
    >>> find_plain_config(model).config.num_attention_heads
    8
    """
    layouts = {
        name: layout
        for name, module in model.named_modules()
        if isinstance(layout := getattr(module, NAME, None), HeadLayout)
    }
    if reason := _uneven_reason(layouts):
        return Plain(reason=reason)
    base = copy.deepcopy(model.config)
    for name in (NAME, "quantization_config"):  # the latter is left over from a GGUF file
        base.__dict__.pop(name, None)
    parts = _find_parts(model, base)
    worst = _NotPlainError(-1, _differing_reason(parts))
    for changes in itertools.islice(_changes(parts), MOST_CONFIGS):
        try:
            return _try(model, base, changes, batch)
        except _NotPlainError as error:
            if error.stage == BIASES:
                for flag in _bias_flags(parts):
                    try:
                        return _try(model, base, changes | {flag: True}, batch)
                    except _NotPlainError as other:
                        error = max(error, other, key=lambda e: e.stage)
            worst = max(worst, error, key=lambda e: e.stage)
    if worst.stage < OUTPUTS and not all(part.is_uniform for part in parts):
        return Plain(reason=_differing_reason(parts))
    return Plain(reason=_explain(worst, parts))


# ---- configs to try


def _find_parts(model: Any, base: Any) -> list[_Part]:
    """The configs in a config that describe attention modules, with these modules."""
    configs = list(_walk(base))
    originals = list(_walk(model.config))
    modules = dict(model.named_modules())
    parts = [_Part(path, config) for path, config in configs]
    for site in find_sites(model):
        owner = _config_of_site(site.name, modules)
        number = next(
            (n for n, (_, config) in enumerate(originals) if config is owner),
            next((n for n, (_, c) in enumerate(originals) if type(c) is type(owner)), 0),
        )
        layout: HeadLayout | None = getattr(site.module, NAME, None)
        part = parts[number]
        part.sites.append(site)
        part.heads.append(site.num_heads)
        part.kv_heads.append(site.num_kv_heads)
        whole = site.num_heads if layout is None else layout.config_num_heads
        part.before.append((site.stack, whole, site.head_dim))
    return [part for part in parts if part.sites]


def _walk(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """A config and the configs in it, with their paths."""
    yield path, config
    for name in getattr(config, "sub_configs", ()):
        part = vars(config).get(name)
        if hasattr(part, "sub_configs"):
            yield from _walk(part, (*path, name))


def _config_of_site(name: str, modules: Mapping[str, nn.Module]) -> Any:
    """The config that a site is built from: its own, or that of a module around it."""
    while True:
        config = getattr(modules[name], "config", None)
        config = getattr(config, "_config", config)  # of a `LayerConfig`
        if hasattr(config, "sub_configs") or not name:
            return config
        name = name.rpartition(".")[0]


def _changes(parts: Sequence[_Part]) -> Iterator[dict[Entry, Any]]:
    """Settings of the config to try, the most natural first."""
    lists: dict[Entry, Any] = {}
    numbers: dict[Entry, list[Any]] = {}
    widths: dict[Entry, Any] = {}
    parts = [part for part in parts if part.is_cut]
    for part in parts:
        for name, value in vars(part.config).items():
            now = part.kv_heads if KV_HEADS_ENTRY.search(name) else part.heads
            if not (KV_HEADS_ENTRY.search(name) or HEADS_ENTRY.search(name)):
                continue
            if isinstance(value, (list, tuple)) and len(value) == len(now):
                lists[part.path, name] = list(now)
            elif type(value) is int and (
                now is part.kv_heads or value in {before[1] for before in part.before}
            ):
                # another number may be the same by chance, and stays then
                other = [] if name in (*NAMES.num_heads, *NAMES.num_kv_heads) else [value]
                numbers[part.path, name] = list(dict.fromkeys([*now, *other]))
        known = [name for name in vars(part.config) if HEAD_DIM_ENTRY.search(name)]
        if len({site.head_dim for site in part.sites}) == 1:
            missing = [name for name in known if vars(part.config)[name] is None]
            for name in missing or ["head_dim"] * (not known):
                widths[part.path, name] = part.sites[0].head_dim
    if all(part.is_uniform for part in parts):
        for values in itertools.product(*numbers.values()):
            scalars = dict(zip(numbers, values, strict=True))
            yield scalars | lists
            if widths:
                yield scalars | lists | widths
    elif lists:
        yield lists
    yield from _layer_overrides(parts)


def _layer_overrides(parts: Sequence[_Part]) -> Iterator[dict[Entry, Any]]:
    """transformers' `per_layer_config`: the numbers that differ from the config's, layer by
    layer.
    """
    overrides: dict[Entry, Any] = {}
    for part in parts:
        layers = [site.layer for site in part.sites]
        if None in layers or len(set(layers)) != len(layers):
            return
        numbers = {name for name, value in vars(part.config).items() if type(value) is int}
        kv = numbers & {*NAMES.num_kv_heads}
        heads = numbers & {*NAMES.num_heads}
        stated = part.config.to_dict().get("per_layer_config") or {}
        known = {int(layer): dict(values) for layer, values in stated.items()}
        for layer, num_heads, num_kv_heads in zip(layers, part.heads, part.kv_heads, strict=True):
            values = known.setdefault(int(layer or 0), {})
            values |= dict.fromkeys(heads, num_heads) | dict.fromkeys(kv, num_kv_heads)
        overrides[part.path, "per_layer_config"] = known
    if overrides:
        yield overrides


def _bias_flags(parts: Sequence[_Part]) -> list[Entry]:
    """Settings that would give projections a bias."""
    return [
        (part.path, name)
        for part in parts
        for name, value in vars(part.config).items()
        if value is False and "bias" in name
    ]


# ---- one config


def _try(
    model: Any, base: Any, changes: Mapping[Entry, Any], batch: Mapping[str, Any] | None
) -> Plain:
    """The config with these changes if plain transformers makes this model of it.

    Raises:
        _NotPlainError: why not.
    """
    try:
        config = _read_back(base, changes)
        with quiet(), torch.device("meta"):
            plain = type(model)(copy.deepcopy(config))
    # whatever a family's own code raises of numbers that it isn't made for
    except Exception as error:
        raise _NotPlainError(INVALID, _first_line(error)) from error
    wanted = {name: value.shape for name, value in plain.state_dict().items()}
    have = {name: value.shape for name, value in model.state_dict().items()}
    biases = [name.removesuffix(".bias") for name in wanted if name not in have]
    kind = type(base).__name__
    for name, shape in have.items():
        if name in wanted and wanted[name] != shape:
            raise _NotPlainError(
                SHAPES, f"{kind} makes {name} {list(wanted[name])}, and it is {list(shape)}"
            )
    left = [name for name in have if name not in wanted]
    if any(not name.endswith(".bias") for name in left) or any(
        not _takes_bias(model, name) for name in biases
    ):
        raise _NotPlainError(SHAPES, f"{kind} makes no model with {[*left, *biases][0]}")
    if left:
        raise _NotPlainError(
            BIASES,
            f"{left[0]} replaces removed heads, and no setting of {kind} gives this projection a"
            " bias (compensate='none' needs none)",
        )
    if batch is not None and not any(p.is_meta for p in model.parameters()):
        _prove(model, config, biases, batch)
    return Plain(config, changes, tuple(biases))


def _read_back(base: Any, changes: Mapping[Entry, Any]) -> Any:
    """A config with changes, written and read back as a checkpoint's is, which validates it."""
    config = copy.deepcopy(base)
    set_entries(config, changes)
    with tempfile.TemporaryDirectory() as folder, quiet():
        config.save_pretrained(folder)
        return type(config).from_pretrained(folder, local_files_only=True)


def set_entries(config: Any, changes: Mapping[Entry, Any]) -> None:
    """Set numbers of a config, and of the configs in it."""
    for (path, name), value in changes.items():
        part = config
        for step in path:
            part = getattr(part, step)
        setattr(part, name, value)


def _takes_bias(model: Any, name: str) -> bool:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        return False
    return isinstance(getattr(module, "weight", None), Tensor) and module.weight.ndim == 2


@torch.no_grad()
def _prove(model: Any, config: Any, biases: Sequence[str], batch: Mapping[str, Any]) -> None:
    """Raise unless the model that plain transformers loads from these weights gives the same."""
    state = model.state_dict()
    for name in biases:
        weight = outputs_first(model.get_submodule(name))
        state[f"{name}.bias"] = weight.new_zeros(weight.shape[0])
    try:
        with quiet():
            plain, info = type(model).from_pretrained(
                None,
                config=copy.deepcopy(config),
                state_dict=state,
                dtype=model.dtype,
                output_loading_info=True,
            )
            if wrong := [key for keys in info.values() for key in keys]:
                raise _NotPlainError(OUTPUTS, f"transformers doesn't fill {wrong[0]}")
        outputs = []
        for one in (model, plain.eval().to(device_of(model))):
            # some models mask parts of a picture at random, even in evaluation mode
            with evaluation(one), torch.random.fork_rng([]):
                torch.manual_seed(0)
                outputs.append(list(_tensors(one(**batch))))
    except _NotPlainError:
        raise
    except torch.OutOfMemoryError:  # weights on a GPU are copied: the checkpoint will be the proof
        return
    except Exception as error:  # the family's own code, with numbers that it isn't made for
        raise _NotPlainError(OUTPUTS, _first_line(error)) from error
    for a, b in zip(*outputs):
        if a.shape != b.shape:
            raise _NotPlainError(OUTPUTS, f"it gives {list(b.shape)} for {list(a.shape)}")
        largest = float(a.abs().max()) if a.numel() else 0.0
        off = float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
        if not off <= tolerance(a.dtype) * largest:
            raise _NotPlainError(OUTPUTS, f"its outputs differ by {off:.3g} of {largest:.3g}")


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, (Mapping, list, tuple)):
        for value in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(value)


# ---- reasons


def _uneven_reason(layouts: Mapping[str, HeadLayout]) -> str:
    for name, layout in layouts.items():
        if not layout.heads:
            return (
                f"{name} has no heads left, and the configs of transformers have no layers without"
                " heads"
            )
        if not layout.is_even:
            return (
                f"the query heads of {name} share its key/value heads unevenly, which no attention"
                " of transformers computes"
            )
    return ""


def _differing_reason(parts: Sequence[_Part]) -> str:
    for part in parts:
        if not part.is_uniform:
            least, most = min(part.heads), max(part.heads)
            name = f"{least} to {most} heads" if least < most else "unequal key/value heads"
            return (
                f"its layers have {name}, and {type(part.config).__name__} has one number for all"
            )
    return "its config names no numbers of heads"


def _explain(error: _NotPlainError, parts: Sequence[_Part]) -> str:
    """The number of a config that is in the way."""
    if error.stage in (INVALID, SHAPES):
        for part in parts:
            heads, width, kv_heads = part.heads[0], part.sites[0].head_dim, part.kv_heads[0]
            if kv_heads != heads and not any(map(KV_HEADS_ENTRY.search, vars(part.config))):
                return (
                    f"{type(part.config).__name__} has no number of key/value heads, and its"
                    f" {heads} heads read {kv_heads}"
                )
            name = next((n for n in NAMES.embed_dim if type(vars(part.config).get(n)) is int), "")
            total = vars(part.config).get(name)
            if not name or part.before[0][1] == heads:
                continue
            if total % heads and (error.stage == INVALID or not _states_width(part)):
                return f"{name} {total} is not a multiple of {heads} heads"
            if total // heads != width and error.stage == SHAPES and not _states_width(part):
                return (
                    f"{name} {total} over {heads} heads would make them {total // heads} wide, and"
                    f" they are {width} wide: {type(part.config).__name__} has no number for that"
                )
    return error.reason


def _states_width(part: _Part) -> bool:
    return any(value and HEAD_DIM_ENTRY.search(name) for name, value in vars(part.config).items())


def _first_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    text = re.sub(r"^Class validation error for validator '\w+': *", "", text)
    return f"{type(error).__name__}: {text}"[:LONGEST]
