"""The parts of a model that are called with token ids or masks, and these arguments."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.block import TransformerBlock
from ..models.introspect import IDS, PLAIN_IDS, config_of, list_inner_models
from ..models.site import Site

__all__ = ["StackInputs", "find_stacks", "holds_all", "ids_among", "is_not_text", "placeholders_of"]

TOWER = re.compile(r"(^|[._])(vision|visual|vit|image|video|audio|speech)")
NOT_TEXT = ("pixel_values", "pixel_values_videos", "input_features", "input_values")


@dataclass
class StackInputs:
    """Arguments of one stack of a model (an encoder, a decoder, the whole) in one pass."""

    ids: Tensor | None = None  # [B, L]
    mask: Tensor | None = None  # [B, past + L], nonzero for tokens, zero for padding
    encoder_mask: Tensor | None = None  # [B, S] of the sequence that cross-attention reads
    cache: Any = None
    past: int = 0  # positions in the cache
    is_not_text: bool = False  # it was given pictures or sound
    positions: Tensor | None = None  # [B, L], if given
    key_ids: Tensor | None = None  # [B, past + L]
    reason: str = ""  # why key_ids is unknown
    found: dict[Any, Any] = field(default_factory=dict)  # key positions by token, sorted once
    continues: bool = False  # the rows continue the sequences of the last pass
    repeats: int = 0  # leading positions that the last pass had, too: it runs without a cache
    length: int | None = None  # L: queries of another number aren't its tokens
    number: int = 0  # of the call
    knows_cache: bool = False  # an earlier pass had its cache
    is_whole: bool = False  # an encoder and a decoder, given the encoder's sequence
    given_ids: Tensor | None = None  # [B, n], where its rows aren't these tokens alone
    places: Tensor | None = None  # [B, L]: the number of each row among them, -1 for rows added
    masks_others: bool = False  # there is a mask of other rows than the queries

    def describes(self, path: str, length: int) -> bool:
        """Whether its ids and mask can be those of `length` queries of the site at `path`."""
        if self.is_not_text and TOWER.search(path):
            return False
        if self.length is None and self.mask is not None and self.cache is None:
            return self.mask.shape[1] == length
        return self.length in (None, length)


def find_stacks(model: nn.Module, sites: Sequence[Site]) -> dict[str, nn.Module]:
    """Modules by name that are called with token ids or a padding mask; the model itself is ""."""
    stacks = {}
    for name, module in model.named_modules():
        try:
            names = inspect.signature(module.forward).parameters
        except (TypeError, ValueError):
            continue
        masked = (
            "attention_mask" in names and "hidden_states" not in names and hasattr(module, "config")
        )
        of_torch = "tgt_key_padding_mask" in names or isinstance(module, TransformerBlock)
        known = (*IDS, *NOT_TEXT, *(PLAIN_IDS if holds_all(name, sites) else ()))
        if masked or of_torch or not names.keys().isdisjoint(known):
            stacks[name] = module
    return stacks | {"": model}


def ids_among(given: Mapping[str, Any], *, outermost: bool, across: bool) -> Tensor | None:
    """The token ids `[B, L]` among the arguments of a stack.

    Where sequences are read `across` and several arguments could be ids, there are none: which
    sequence is whose isn't known.
    """
    integers = {
        name: value
        for name, value in given.items()
        if isinstance(value, Tensor)
        and value.ndim == 2
        and value.dtype in (torch.int64, torch.int32)
        and "mask" not in name
    }
    if across and len(integers) > 1:
        return None
    if given.get("input_ids") is not None:
        return given["input_ids"]
    names = IDS + PLAIN_IDS if outermost else IDS
    return next((integers[name] for name in names if name in integers), None)


def is_not_text(given: Mapping[str, Any], *, outermost: bool) -> bool:
    """Whether a stack was given pictures or sound."""
    pictures = (
        isinstance(value, Tensor)
        and value.ndim >= 4
        and value.is_floating_point()
        and "mask" not in name
        for name, value in given.items()
    )
    return any(given.get(name) is not None for name in NOT_TEXT) or (outermost and any(pictures))


def holds_all(name: str, sites: Sequence[Site]) -> bool:
    """Whether the module at this path holds all sites."""
    return all(not name or f"{site.name}.".startswith(f"{name}.") for site in sites)


def placeholders_of(model: nn.Module) -> list[int]:
    """Token ids that only keep a place for a picture or a sound."""
    found = set[int]()
    for inner in list_inner_models(model) or [model]:
        config: Any = config_of(inner)
        for part in (config, getattr(config, "thinker_config", None)):
            for kind in (
                "image",
                "video",
                "audio",
                "img_context",
                "video_context",
                "sound_context",
            ):
                for end in ("id", "index"):
                    value = getattr(part, f"{kind}_token_{end}", None)
                    if isinstance(value, int) and not isinstance(value, bool):
                        found.add(value)
    return sorted(found)
