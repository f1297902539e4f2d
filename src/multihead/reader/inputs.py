"""What a model is called with, stack by stack: where a reading learns which rows are text, and which token stands where."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

TOWER = re.compile(r"(^|[._])(vision|visual|vit|image|video|audio|speech)")
NOT_TEXT = ("pixel_values", "pixel_values_videos", "input_features", "input_values")


@dataclass
class Inputs:
    """What one stack of a model (an encoder, a decoder, the whole) was called with."""

    ids: Tensor | None  # [B, L]
    mask: Tensor | None  # [B, past + L], 1 = text
    encoder_mask: Tensor | None  # [B, S] of the sequence that cross-attention reads
    cache: Any = None
    past: int = 0
    other: bool = False  # it was given pictures or sound, not text
    positions: Tensor | None = None  # [B, L], where they were given
    key_ids: Tensor | None = None  # [B, past + L]
    reason: str = ""  # why key_ids isn't known
    length: int | None = None  # of what it was given: rows of another number aren't its text

    def speaks_of(self, name: str, length: int) -> bool:
        """Whether its ids and mask can be those of `length` rows of the site `name`."""
        return self.length in (None, length) and not (self.other and TOWER.search(name))


def stacks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that are called with token ids or a padding mask: where the rows of a site get their text from."""
    found = {}
    for name, module in model.named_modules():
        try:
            names = inspect.signature(module.forward).parameters
        except (TypeError, ValueError):
            continue
        masked = "attention_mask" in names and "hidden_states" not in names and hasattr(module, "config")
        if masked or not names.keys().isdisjoint(("input_ids", *NOT_TEXT)):
            found[name] = module
    return found | {"": model}


def marks(cache: Any) -> Tensor:
    """One number for each of the last cached positions, `[B, n]`: by them a cache is known again, whatever was done to it."""
    inner = getattr(cache, "self_attention_cache", cache)
    for layer in getattr(inner, "layers", ()):
        keys = getattr(layer, "keys", None)
        if isinstance(keys, Tensor) and keys.ndim == 4 and keys.numel():
            return keys[:, 0, : length_of(cache), 0].detach().clone()
    return torch.empty(0, 0)


def follow(ids: Tensor, before: Tensor, now: Tensor, past: int) -> Tensor | None:
    """Ids of the `past` positions in a cache, where its marks are among those `before`: cut, reordered or repeated rows.

    None where they aren't: then the cache holds another text.
    """
    length = ids.shape[1]
    # marks cover the last positions of each: before length - n .. length, now past - m .. past
    start = max(length - before.shape[1], past - now.shape[1])
    if past > length or past <= start or not before.numel() or not now.numel():
        return None
    old = before[:, start - (length - before.shape[1]) : past - (length - before.shape[1])]
    new = now[:, start - (past - now.shape[1]) :]
    same = (old[None] == new[:, None]).all(-1)
    return ids[same.int().argmax(1), :past] if bool(same.any(1).all()) else None


def length_of(cache: Any) -> int:
    if cache is None or not hasattr(cache, "get_seq_length"):
        return 0
    return int(cache.get_seq_length())


def special_ids_of(model: nn.Module) -> set[int]:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found: set[int] = set()
    for name in ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"):
        value = getattr(text, name, None)
        found.update([value] if isinstance(value, int) else value if isinstance(value, list) else [])
    return found


def placeholders_of(model: nn.Module) -> list[int]:
    """Token ids that only hold a place for a picture or a sound."""
    config: Any = getattr(model, "config", None)
    names = [f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index")]
    return [value for name in names if isinstance(value := getattr(config, name, None), int)]
