"""The probe: random tokens repeated once, where induction shows and chance can't (Olsson et al.
2022).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..data.tokenizing import max_positions
from ..models.introspect import (
    config_of,
    device_of,
    forward_kwargs,
    inner_model,
    is_encoder_decoder,
    text_config,
)
from .session import Reading

BLOCK = 48  # random tokens in a block
BATCH = 4  # blocks, each repeated once
SEED = 0


def run_probe(session: Reading, tokenizer: Any = None) -> None:
    """Read the probe: the queries of the second copies count, for the masses `probe:NAME`.

    The model inside wrappers reads it: random tokens need no prompt.
    """
    model = inner_model(session.model)
    ids, select = draw_probe(model, session.special, tokenizer)
    device = device_of(model)
    with session.passes(prefix="probe:", select=select, on_site=None):
        model(**forward_kwargs(model, {"input_ids": ids.to(device)}))


def draw_probe(
    model: nn.Module, special: Iterable[int], tokenizer: Any = None
) -> tuple[Tensor, Tensor]:
    """Token ids `[BATCH, (1 +) 2 * block]`, the start token first where the tokenizer adds one, and
    the queries that count, bool of that shape. The same every time.
    """
    config = text_config(model)
    start = []
    if tokenizer is not None and tokenizer.bos_token_id is not None:
        start = [i for i in tokenizer("a")["input_ids"][:1] if i == tokenizer.bos_token_id]
    limit = max_positions(config_of(model), tokenizer) or 10**9
    size = min(config.vocab_size, len(tokenizer) if tokenizer is not None else config.vocab_size)
    allowed = torch.ones(size, device="cpu")
    allowed[[i for i in special if i < size]] = 0
    block = min(max(2, min(BLOCK, (limit - len(start)) // 2)), int(allowed.sum()))
    generator = torch.Generator().manual_seed(SEED)
    blocks = torch.stack(
        [torch.multinomial(allowed, block, generator=generator) for _ in range(BATCH)]
    )
    first = torch.tensor(start, dtype=torch.int64, device="cpu").expand(BATCH, -1)
    ids = torch.cat([first, blocks, blocks], 1)
    select = torch.zeros_like(ids, dtype=torch.bool)
    select[:, len(start) + block :] = True
    return ids, select


def takes_probe(model: nn.Module) -> bool:
    """Whether the model is a language model without an encoder, from transformers."""
    config = text_config(model)
    return (
        hasattr(config_of(model), "get_text_config")  # the inputs of a user's module aren't known
        and isinstance(getattr(config, "vocab_size", None), int)
        and not is_encoder_decoder(model)
    )
