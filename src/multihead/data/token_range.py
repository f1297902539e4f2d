"""A range of the tokens of a pass, where its inputs are only tokens, masks and positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

# inputs [B, L, ...] with an entry for each token, and those that stay as they are
ALONG = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids")
PLAIN = ("use_cache", "return_dict", "logits_to_keep", "output_hidden_states", "output_attentions")


def count_tokens(inputs: Mapping[str, Any]) -> int | None:
    """The number of tokens L of model inputs by name; None where a part of the tokens can't be cut
    out: other inputs among them, a mask of queries and keys, a cache.

    >>> import torch
    >>> count_tokens({"input_ids": torch.ones(2, 5), "attention_mask": torch.ones(2, 5)})
    5
    >>> count_tokens({"input_ids": torch.ones(2, 5), "attention_mask": torch.ones(2, 1, 5, 5)})
    """
    given = {name: value for name, value in inputs.items() if value is not None}
    along = [value for name, value in given.items() if name in ALONG]
    tokens = given.get("input_ids", given.get("inputs_embeds"))
    if not isinstance(tokens, Tensor) or tokens.ndim < 2:
        return None
    length = tokens.shape[1]
    if not all(isinstance(v, Tensor) and v.ndim >= 2 and v.shape[1] == length for v in along):
        return None
    mask = given.get("attention_mask")
    others = [name for name in given if name not in (*ALONG, *PLAIN, "labels")]
    chosen = any(isinstance(given.get(name), Tensor) for name in PLAIN)
    if others or chosen or (mask is not None and mask.ndim != 2):
        return None
    return length


def cut_tokens(inputs: Mapping[str, Any], start: int, number: int) -> dict[str, Any]:
    """The inputs of `number` tokens from `start` on, without labels.

    >>> import torch
    >>> cut_tokens({"input_ids": torch.arange(6)[None], "use_cache": False}, 2, 3)
    {'input_ids': tensor([[2, 3, 4]]), 'use_cache': False}
    """
    return {
        name: value.narrow(1, start, number) if name in ALONG else value
        for name, value in inputs.items()
        if value is not None and name != "labels"
    }
