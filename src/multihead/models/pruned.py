"""The config of a pruned model: one that plain transformers understands if possible, and what
`multihead.load` needs to build the model.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..errors import MultiheadError
from .head_layout import HeadLayout
from .introspect import inner_model
from .resize import resize_as_configured, set_required_attention
from .site import find_sites
from .slices import outputs_first
from .transformers import NAME

__all__ = ["MODULE", "finalize_config", "is_own_code", "pruned_class", "restore_original_class"]

VERSION = 1
MODULE = "modeling_multihead"  # the file of code in a checkpoint, see `pruned_code`


def is_own_code(reference: object) -> bool:
    """Whether an entry of "auto_map" in a config names code that multihead wrote."""
    return str(reference).startswith(f"{MODULE}.")


def pruned_class(model_class: Any, config: Mapping[str, Any]) -> Any:
    """A subclass that builds the model which the config describes and then cuts its heads; None if
    the config has no pruned heads.

    Raises:
        MultiheadError: the config was written by a version of multihead that this one can't read.
    """
    entry = config.get(NAME)
    if entry is None:
        return None
    if (
        not isinstance(entry, dict)
        or entry.get("version") != VERSION
        or not isinstance(entry.get("sites"), dict)
    ):
        version = entry.get("version") if isinstance(entry, dict) else None
        raise MultiheadError(
            f'"{NAME}" in its config.json is of version {version!r}; this multihead reads'
            f" {VERSION}: update it, or prune the model again"
        )
    sites = entry["sites"]

    class PrunedModel(model_class):
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            resize_as_configured(self, sites)

    PrunedModel.__name__ = model_class.__name__
    # transformers finds the names of weights in its own classes' checkpoints by the module
    PrunedModel.__module__ = model_class.__module__
    return PrunedModel


def restore_original_class(model: Any, model_class: Any) -> None:
    """Set the family's own class once the weights are loaded, and the attention that the remaining
    heads need.
    """
    model.__class__ = model_class
    # code that opens the checkpoint, which a checkpoint of the loaded model doesn't have
    code = getattr(model.config, "auto_map", None) or {}
    if any(map(is_own_code, code.values())):
        del model.config.auto_map
    set_required_attention(model)


def finalize_config(model: Any) -> bool:
    """Write into the config of a pruned model what loading it needs; returns whether plain
    transformers can load it. Of a wrapped model the config is that of the model inside.
    """
    model = inner_model(model)
    layouts: dict[str, HeadLayout] = {
        name: layout
        for name, module in model.named_modules()
        if (layout := getattr(module, NAME, None)) is not None
    }
    change = _plain_change(model, layouts)
    if change is not None:
        values, bare_projections = change
        for module in bare_projections:
            weight = outputs_first(module)
            module.bias = nn.Parameter(
                weight.new_zeros(weight.shape[0]), requires_grad=bool(module.weight.requires_grad)
            )
        for name, value in values.items():
            setattr(model.config, name, value)
        for name, layout in layouts.items():  # these are the config's own heads now
            layouts[name] = replace(
                layout,
                heads=tuple(range(len(layout.heads))),
                kv_heads=tuple(range(len(layout.kv_heads))),
                config_num_heads=len(layout.heads),
                has_bias=False,
            )
            setattr(model.get_submodule(name), NAME, layouts[name])
    model.config.multihead = {
        "version": VERSION,
        "sites": {name: layout.to_json() for name, layout in layouts.items()},
    }
    return change is not None


def _plain_change(
    model: Any, layouts: Mapping[str, HeadLayout]
) -> tuple[dict[str, Any], list[nn.Module]] | None:
    """The config values that describe the pruned model, and the projections that need a bias of
    zeros for them; None if no config does.

    Not by rules of families: a model is built from the changed config on the meta device, and the
    shapes of its parameters are compared.
    """
    if any(not layout.heads or not layout.is_even for layout in layouts.values()):
        return None
    sites = find_sites(model)
    parts = [site.slices() for site in sites]
    counts = {(site.num_heads, rows.num_kv_heads) for site, rows in zip(sites, parts, strict=True)}
    if len(counts) != 1:
        return None
    num_heads, num_kv_heads = counts.pop()
    config, values = copy.deepcopy(model.config), {"num_attention_heads": num_heads}
    config.__dict__.pop(NAME, None)
    if hasattr(config, "num_key_value_heads"):
        values["num_key_value_heads"] = num_kv_heads
    if hasattr(config, "head_dim"):
        values["head_dim"] = sites[0].head_dim
    needs_bias = any(layout.has_bias for layout in layouts.values()) and hasattr(
        config, "attention_bias"
    )
    if needs_bias:
        values["attention_bias"] = True
    for name, value in values.items():
        setattr(config, name, value)
    try:
        with torch.device("meta"):
            wanted = {name: value.shape for name, value in type(model)(config).state_dict().items()}
    except (ValueError, TypeError, AttributeError, RuntimeError):  # no such model in this family
        return None
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    modules = [
        module
        for site, rows in zip(sites, parts, strict=True)
        for module in (rows.q.module, rows.k.module, rows.v.module, site.out)
    ]
    bare = (
        [module for module in dict.fromkeys(modules) if getattr(module, "bias", None) is None]
        if needs_bias
        else []
    )
    names = {id(module): name for name, module in model.named_modules()}
    shapes |= {f"{names[id(module)]}.bias": outputs_first(module).shape[:1] for module in bare}
    return (values, bare) if shapes == wanted else None
