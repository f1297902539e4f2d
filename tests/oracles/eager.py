"""transformers' own eager attention, run on a model with everything that it was given and returned
stored.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .statistics import Flags, Floats

NAME = "stored_eager"


@dataclass(frozen=True)
class Stored:
    """One call of an attention module."""

    site: str  # the module's path in the model
    module: torch.nn.Module
    query: Floats  # [B, H, L, E]
    key: Floats  # [B, G, S, E]
    value: Floats  # [B, G, S, Ev]
    weights: Floats  # [B, H, L, S]
    allowed: Flags  # [B, L, S]
    scale: float
    softcap: float | None
    bias: Floats | None  # [1, H, L, S]
    sinks: Floats | None  # [H]
    window: int | None


@contextmanager
def stored_attention(model: PreTrainedModel) -> Iterator[list[Stored]]:
    """Within the block, every attention call of the model runs its own eager function and is added
    to the list.
    """
    calls: list[Stored] = []
    names = {module: name for name, module in model.named_modules()}

    def attention(
        module: torch.nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **given: Any
    ) -> Any:
        mask = attention_mask
        eager = sys.modules[type(module).__module__].eager_attention_forward
        out, weights = eager(module, query, key, value, mask, **given)
        shape = (query.shape[0], query.shape[2], key.shape[2])
        assert mask is None or mask.shape[1] == 1
        allowed = (
            np.ones(shape, bool)
            if mask is None
            else (mask[:, 0] > torch.finfo(mask.dtype).min / 2).numpy()
        )
        scale = given.get("scaling")
        calls.append(
            Stored(
                site=names[module],
                module=module,
                query=doubles(query),
                key=doubles(key),
                value=doubles(value),
                weights=doubles(weights),
                allowed=np.broadcast_to(allowed, shape),
                scale=query.shape[-1] ** -0.5 if scale is None else scale,
                softcap=given.get("softcap"),
                bias=(
                    None if given.get("position_bias") is None else doubles(given["position_bias"])
                ),
                sinks=None if given.get("s_aux") is None else doubles(given["s_aux"]),
                window=given.get("sliding_window"),
            )
        )
        return out, weights

    before = model.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, eager_mask)
    model.set_attn_implementation(NAME)
    try:
        yield calls
    finally:
        model.set_attn_implementation(before)


def doubles(tensor: torch.Tensor) -> Floats:
    return tensor.detach().double().numpy()


def formula(
    call: Stored,
    *,
    allowed: Flags | None = None,
    scale: float | None = None,
    without: frozenset[str] = frozenset(),
    tiled: bool = False,
) -> Floats:
    """DESIGN.md's formula on the stored queries and keys, with a chosen part of it left out or
    replaced.
    """
    repeats = call.query.shape[1] // call.key.shape[1]
    key = np.tile(call.key, (1, repeats, 1, 1)) if tiled else np.repeat(call.key, repeats, axis=1)
    scores = (call.scale if scale is None else scale) * call.query @ key.swapaxes(-1, -2)
    if call.softcap is not None and "softcap" not in without:
        scores = call.softcap * np.tanh(scores / call.softcap)
    if call.bias is not None and "bias" not in without:
        scores = scores + call.bias
    scores = np.where((call.allowed if allowed is None else allowed)[:, None], scores, -np.inf)
    highest = scores.max(axis=-1, keepdims=True)
    powers = np.exp(scores - np.where(np.isinf(highest), 0.0, highest))
    total = powers.sum(axis=-1, keepdims=True)
    if call.sinks is not None and "sinks" not in without:
        total = total + np.exp(call.sinks.reshape(-1, 1, 1) - highest)
    return np.divide(powers, total, out=np.zeros_like(powers), where=total > 0)
