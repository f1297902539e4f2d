"""The config of a pruned model: one that plain transformers understands where it can, and what
`multihead.load` needs.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import MultiheadError
from .resize import attend_unevenly, reshape
from .site import find_sites
from .slices import outputs_first
from .transformers import NAME, Cut

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["load", "pruned_class", "settle"]

VERSION = 1


def load(
    model: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Opens a model, one that `multihead prune` or `multihead share` wrote too: an ordinary
    transformers model.

    It generates with a cache, trains, and is saved again by `save_pretrained`. Arguments and errors
    are those of `multihead read`: a folder, a GGUF file or a hub name; `dtype` "float32" unless
    given.
    """
    from .loading import load as open_

    return open_(model, device=device, dtype=dtype, trust_remote_code=trust_remote_code).model


def pruned_class(kind: Any, raw: Mapping[str, Any]) -> Any:
    """A class that makes the model which the config describes and then cuts it; `None` where
    nothing was cut.
    """
    told = raw.get(NAME)
    if told is None:
        return None
    if (
        not isinstance(told, dict)
        or told.get("version") != VERSION
        or not isinstance(told.get("sites"), dict)
    ):
        version = told.get("version") if isinstance(told, dict) else None
        raise MultiheadError(
            f'"{NAME}" in its config.json is of version {version!r}; this multihead reads'
            f" {VERSION}: update it, or prune the model again"
        )

    cuts = told["sites"]

    class Narrowed(kind):
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            reshape(self, cuts)

    Narrowed.__name__ = kind.__name__
    Narrowed.__module__ = (
        kind.__module__
    )  # by which transformers knows what weights are called in its own classes' checkpoints
    return Narrowed


def opened(model: Any, kind: Any) -> None:
    """After the weights came: the class is the family's own, and attention what the heads need."""
    model.__class__ = kind
    attend_unevenly(model)


def settle(model: Any) -> bool:
    """Writes into the config of a pruned model what it takes to load it. True where plain
    transformers does.
    """
    cuts = {
        name: cut
        for name, module in model.named_modules()
        if (cut := getattr(module, NAME, None)) is not None
    }
    plain = _plain(model, cuts)
    if plain is not None:
        numbers, biases = plain
        for module in biases:
            trained = bool(module.weight.requires_grad)
            module.bias = nn.Parameter(
                outputs_first(module).new_zeros(outputs_first(module).shape[0]),
                requires_grad=trained,
            )
        for name, value in numbers.items():
            setattr(model.config, name, value)
        for name, cut in cuts.items():  # now the config's own heads, by the names that they had
            heads, groups = range(len(cut.heads)), range(len(cut.kv))
            cuts[name] = replace(
                cut, heads=tuple(heads), kv=tuple(groups), of=len(heads), bias=False
            )
            setattr(model.get_submodule(name), NAME, cuts[name])
    model.config.multihead = {
        "version": VERSION,
        "sites": {name: cut.to_json() for name, cut in cuts.items()},
    }
    return plain is not None


def _plain(model: Any, cuts: Mapping[str, Cut]) -> tuple[dict[str, Any], list[nn.Module]] | None:
    """The numbers that would make the config describe the model, and the projections that need a
    bias of zeros for it.

    Not by rules of families: a model is made of the changed config, without memory, and its
        parameters' shapes are compared.
    """
    if any(not cut.heads or not cut.even for cut in cuts.values()):
        return None
    sites = find_sites(model)
    found = [site.slices() for site in sites]
    counts = {(site.num_heads, rows.num_kv_heads) for site, rows in zip(sites, found, strict=True)}
    if len(counts) != 1:
        return None
    heads, groups = counts.pop()
    config, numbers = copy.deepcopy(model.config), {"num_attention_heads": heads}
    config.__dict__.pop(NAME, None)
    if hasattr(config, "num_key_value_heads"):
        numbers["num_key_value_heads"] = groups
    if hasattr(config, "head_dim"):
        numbers["head_dim"] = sites[0].head_dim
    biased = any(cut.bias for cut in cuts.values()) and hasattr(config, "attention_bias")
    if biased:
        numbers["attention_bias"] = True
    for name, value in numbers.items():
        setattr(config, name, value)
    try:
        with torch.device("meta"):
            wanted = {name: value.shape for name, value in type(model)(config).state_dict().items()}
    except (
        ValueError,
        TypeError,
        AttributeError,
        RuntimeError,
    ):  # the family can't be made with such numbers
        return None
    held = {name: value.shape for name, value in model.state_dict().items()}
    parts = [
        part
        for site, rows in zip(sites, found, strict=True)
        for part in (rows.q.module, rows.k.module, rows.v.module, site.out)
    ]
    bare = (
        [part for part in dict.fromkeys(parts) if getattr(part, "bias", None) is None]
        if biased
        else []
    )
    names = {id(module): name for name, module in model.named_modules()}
    held |= {f"{names[id(part)]}.bias": outputs_first(part).shape[:1] for part in bare}
    return (numbers, bare) if held == wanted else None
