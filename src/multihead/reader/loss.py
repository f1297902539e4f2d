"""The loss of each document of a batch: the sum over tokens of -log p(token), in nats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MultiheadError
from ..models.introspect import forward_kwargs, is_encoder_decoder


def losses(
    model: nn.Module,
    batch: Mapping[str, Any],
    output: Any,
    *,
    causal: bool | None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss of each document and the number of its tokens, `[B]` both.

    The target of a row is its label where the batch has `labels` (-100: none), else the token that
    comes next. Tokens that aren't among those that `counts` `[B, L]` names have no loss; in an
    encoder-decoder they are what its rows should say.
    """
    logits = output.get("logits") if isinstance(output, dict) else None
    named = type(model).__name__
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        raise MultiheadError(
            f"{named} gives no logits for each token, so it has no loss that importance or effect"
            " could be of; leave them out, or load it with its language-modelling head"
            " (AutoModelForCausalLM)"
        )
    encodes = is_encoder_decoder(model)
    labels, ids = batch.get("labels"), batch.get("decoder_input_ids" if encodes else "input_ids")
    mask = batch.get("decoder_attention_mask" if encodes else "attention_mask")
    positions = batch.get("decoder_position_ids" if encodes else "position_ids")
    if labels is not None and labels.shape != logits.shape[:2]:
        raise MultiheadError(
            f"labels {list(labels.shape)}: importance and effect need one label for each token, "
            f"{list(logits.shape[:2])} (-100 where there is none)"
        )
    if labels is not None:
        target = (
            labels
            if not causal or encodes
            else torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        )
    elif ids is not None and (
        causal is not False or encodes
    ):  # of a text of one token it isn't known, and no matter
        target = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
        if mask is not None and mask.ndim == 2:
            real = mask[:, -ids.shape[1] :].bool()
            target = target.masked_fill(
                ~torch.nn.functional.pad(real[:, 1:] & real[:, :-1], (0, 1)), -100
            )
        if (
            positions is not None and positions.ndim == 2 and positions.shape[1] == ids.shape[1]
        ):  # texts packed in one row
            target = target.masked_fill(
                torch.nn.functional.pad(positions.diff(dim=1) != 1, (0, 1)), -100
            )
    else:
        raise MultiheadError(
            f"{named} doesn't say which token comes next, so importance and effect need labels:"
            " give ready-made batches with labels [B, L] (-100 where there is none)"
        )
    if logits.shape[1] != target.shape[1]:
        raise MultiheadError(
            f"logits of {logits.shape[1]} rows and targets of {target.shape[1]}: importance and"
            " effect need one logit vector for each token; give labels of that length, or leave"
            " the pictures out"
        )
    if counts is not None:
        if (
            labels is None and not encodes
        ):  # a token of a text that is read in windows stands a row behind what tells it
            counts = torch.nn.functional.pad(counts[:, 1:], (0, 1))
        target = target.masked_fill(~counts.to(target.device), -100)
    work = torch.promote_types(logits.dtype, torch.float32)
    each = torch.nn.functional.cross_entropy(
        logits.to(work).transpose(1, 2), target, ignore_index=-100, reduction="none"
    )
    return each.sum(1), (target != -100).sum(1)


def whole_of(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs for a loss of one's own: logits of every row, no cache, and no loss of the
    model's.
    """
    decoder = is_encoder_decoder(model) and "decoder_input_ids" not in batch
    # of an encoder-decoder the decoder's input may be made of the labels
    inputs = {k: v for k, v in batch.items() if k != "labels" or decoder}
    return forward_kwargs(model, inputs, logits="all")
