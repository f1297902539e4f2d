"""The config of a pruned model: one that plain transformers understands if possible, and what
`multihead.load` needs to build the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import MultiheadError
from .head_layout import HeadLayout
from .introspect import inner_model
from .plain import Plain, find_plain_config
from .resize import resize_as_configured, set_required_attention
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


def finalize_config(model: Any, batch: Mapping[str, Any] | None = None) -> Plain:
    """Write into the config of a pruned model what loading it needs; returns whether plain
    transformers can load it. Of a wrapped model the config is that of the model inside.

    Args:
        batch: inputs on which the model that plain transformers loads is compared.
    """
    model = inner_model(model)
    plain = find_plain_config(model, batch)
    layouts: dict[str, HeadLayout] = {
        name: layout
        for name, module in model.named_modules()
        if (layout := getattr(module, NAME, None)) is not None
    }
    if plain:
        plain.apply(model)
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
    return plain
