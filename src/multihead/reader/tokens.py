"""What a model is called with, stack by stack: where a reading learns which rows are text, and
which token stands where.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.block import TransformerBlock

TOWER = re.compile(r"(^|[._])(vision|visual|vit|image|video|audio|speech)")
NOT_TEXT = ("pixel_values", "pixel_values_videos", "input_features", "input_values")
IDS = ("input_ids", "token_ids", "tokens", "ids", "idx")  # and, of the outermost module alone,
PLAIN = ("x", "input", "inputs")  # where they are integers


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
    found: dict[Any, Any] = field(default_factory=dict)  # keys by token, sorted once a pass
    continues: bool = False  # its texts are those of the last pass: the same rows, further on
    length: int | None = None  # of what it was given: rows of another number aren't its text

    def speaks_of(self, name: str, length: int) -> bool:
        """Whether its ids and mask can be those of `length` rows of the site `name`."""
        return self.length in (None, length) and not (self.other and TOWER.search(name))


def stacks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that are called with token ids or a padding mask: where the rows of a site get their
    text from.
    """
    found = {}
    for name, module in model.named_modules():
        try:
            names = inspect.signature(module.forward).parameters
        except (TypeError, ValueError):
            continue
        masked = (
            "attention_mask" in names and "hidden_states" not in names and hasattr(module, "config")
        )
        told = "tgt_key_padding_mask" in names or isinstance(module, TransformerBlock)
        if masked or told or not names.keys().isdisjoint((*IDS, *NOT_TEXT)):
            found[name] = module
    return found | {"": model}


def ids_among(given: Mapping[str, Any], *, outermost: bool, across: bool) -> Tensor | None:
    """The token ids `[B, L]` among the arguments of a stack.

    Where sequences are read across, and nothing says which of several is whose, there are none.
    """
    whole = {
        name: value
        for name, value in given.items()
        if isinstance(value, Tensor)
        and value.ndim == 2
        and value.dtype in (torch.int64, torch.int32)
        and "mask" not in name
    }
    if across and len(whole) > 1:
        return None
    if given.get("input_ids") is not None:
        return given["input_ids"]
    return next(
        (whole[name] for name in (IDS + PLAIN if outermost else IDS) if name in whole), None
    )


def not_text(given: Mapping[str, Any], *, outermost: bool) -> bool:
    """Whether a stack was given pictures or sound."""
    pictures = (
        isinstance(value, Tensor)
        and value.ndim >= 4
        and value.is_floating_point()
        and "mask" not in name
        for name, value in given.items()
    )
    return any(given.get(name) is not None for name in NOT_TEXT) or (outermost and any(pictures))


def marks(cache: Any) -> Tensor:
    """One number for each of the last cached positions, `[B, n]`: by them a cache is known again,
    whatever was done to it.

    Of the layer that holds most positions, and of such layers the last: its keys hang on what
        others have dropped, too.
    """
    inner, length = getattr(cache, "self_attention_cache", cache), length_of(cache)
    best = torch.empty(0, 0)
    for layer in getattr(inner, "layers", ()):
        keys = getattr(layer, "keys", None)
        if (
            isinstance(keys, Tensor)
            and keys.ndim == 4
            and keys.numel()
            and min(keys.shape[2], length) >= best.shape[1]
        ):
            best = keys[:, 0, :length, 0].detach()
    return best.clone()


def follow(ids: Tensor, before: Tensor, now: Tensor, past: int) -> Tensor | None:
    """Ids of the `past` positions in a cache, where its marks are among those `before`: cut,
    reordered or repeated rows.

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
    stays = (
        torch.eye(*same.shape, device=same.device) * same
    )  # of rows that look alike, the one in its own place
    return ids[(same + stays).argmax(1), :past] if bool(same.any(1).all()) else None


def length_of(cache: Any) -> int:
    if cache is None or not hasattr(cache, "get_seq_length"):
        return 0
    return int(cache.get_seq_length())


def ids_given(special_ids: Any) -> set[int]:
    """The token ids that somebody gave; `TypeError` for anything else."""
    given = (
        special_ids.tolist() if hasattr(special_ids, "tolist") else special_ids
    )  # an array's or a tensor's own numbers
    found: list[Any] = list(given) if isinstance(given, Iterable) else [None]
    if not all(isinstance(i, Integral) and not isinstance(i, bool) for i in found):
        raise TypeError(
            f"special_ids={special_ids!r}: expected token ids, such as [0, 2], or None for the"
            " tokenizer's own"
        )
    return {int(i) for i in found}


def placeholders_of(model: nn.Module) -> list[int]:
    """Token ids that only hold a place for a picture or a sound."""
    config: Any = getattr(model, "config", None)
    names = [
        f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index")
    ]
    return [value for name in names if isinstance(value := getattr(config, name, None), int)]


def decoder_inputs(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """The text as a decoder is taught it: one place to the right, behind the start token."""
    config: Any = model.config
    start = (
        config.decoder_start_token_id
        if config.decoder_start_token_id is not None
        else config.bos_token_id
    )
    ids, mask = batch["input_ids"], batch["attention_mask"]
    return {
        "decoder_input_ids": torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], 1),
        "decoder_attention_mask": torch.cat([torch.ones_like(mask[:, :1]), mask[:, :-1]], 1),
    }
