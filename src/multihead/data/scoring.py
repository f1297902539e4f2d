"""Texts that a model is scored on: which loss it has, and batches with targets or labels for it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import MultiheadError
from ..models.introspect import can_generate, is_encoder_decoder, text_config
from .batch import IGNORED, Batch, collate, scored_inputs
from .tokenizing import count_special_tokens
from .windows import Window

__all__ = [
    "GENERATED_LOSS",
    "LABEL_LOSS",
    "MASKED_LOSS",
    "OUTPUT_LOSS",
    "TOKEN_LOSS",
    "NoLossError",
    "find_loss",
    "generates_targets",
    "make_non_finite_error",
    "require_loss",
    "scored_batch",
    "vocab_size",
]

TOKEN_LOSS, MASKED_LOSS, LABEL_LOSS = "token loss", "masked-token loss", "loss on labels"
# Of models and texts that have none of these, given the original model:
GENERATED_LOSS = "token loss on what the original generates"
OUTPUT_LOSS = "distance from the original's outputs"
BY_ORIGINAL = (GENERATED_LOSS, OUTPUT_LOSS)
MASKED_SHARE = 0.15  # of the tokens are masked, as in BERT's training (Devlin et al. 2019)
OTHERWISE = (
    "For texts with human similarities there is multihead.pruning.similarity, for any other task a"
    " user-defined function (FILE.py:NAME)"
)


class NoLossError(MultiheadError):
    """A model that has no loss on these texts unless the original model is given."""


def require_loss(kind: str, model: nn.Module, original: nn.Module | None) -> None:
    """Raise `NoLossError` for a loss that needs the original model where there is none."""
    if kind not in BY_ORIGINAL or original is not None:
        return
    name = type(model).__name__
    if kind == GENERATED_LOSS:
        raise NoLossError(
            f"{name} is an encoder-decoder: plain text doesn't define which text it should produce"
            " from which. Give rows with a source and a target, or the model before pruning as"
            f" original (--against), whose own output is the target. {OTHERWISE}"
        )
    raise NoLossError(
        f"{name} has no head that predicts tokens, so it has no loss on a text; load it with its"
        " language-modelling head if it has one, give rows with a text and a label, or the model"
        " before pruning as original (--against), from whose outputs the distance is measured."
        f" {OTHERWISE}"
    )


def generates_targets(model: nn.Module) -> bool:
    """Whether it is an encoder-decoder that generates text."""
    return is_encoder_decoder(model) and can_generate(model)


@torch.no_grad()
def find_loss(model: nn.Module, tokenizer: Any, windows: Sequence[Window]) -> str:
    """The loss that a model has on some texts: `TOKEN_LOSS` or `MASKED_LOSS` where it predicts
    tokens, `LABEL_LOSS` where the texts have labels, else one that needs the original model.

    Whether it is causal is tested: with another last token, earlier logits of a causal model stay.

    Raises:
        MultiheadError: targets for a model that produces no text, labels or targets of some texts
            only, a masked model whose tokenizer has no mask token.
    """
    name = type(model).__name__
    has_targets = _all_or_none(windows, "target")
    if generates_targets(model):
        return TOKEN_LOSS if has_targets else GENERATED_LOSS
    if has_targets:
        raise MultiheadError(
            f"the texts are pairs of a source and a target, and {name} is no encoder-decoder that"
            " generates text; give it texts (--calibrate)"
        )
    by_outputs = LABEL_LOSS if _all_or_none(windows, "label") else OUTPUT_LOSS
    if is_encoder_decoder(model):  # with a head that generates nothing
        return by_outputs
    before, after = count_special_tokens(tokenizer)
    ids = windows[0].ids
    few = (ids[before : len(ids) - after] * 8)[:8]
    most = max(max(window.ids) for window in windows)
    tried = []
    for end in (few[-1], (few[-1] + 1) % (most + 1)):
        batch = collate([Window([*few[:-1], end], 0, len(few))], tokenizer).for_model(model)
        output = model(**scored_inputs(model, batch.inputs))
        logits = output.get("logits") if isinstance(output, Mapping) else None
        is_head = isinstance(logits, Tensor) and logits.ndim == 3
        if not is_head or logits.shape[-1] < vocab_size(model, most + 1):  # type: ignore[union-attr]
            return by_outputs
        tried.append(logits[:, :-1].double())  # type: ignore[index]
        if not bool(tried[-1].isfinite().all()):
            raise make_non_finite_error(f"{name} gives logits that are nan or infinite")
    if bool((tried[0] - tried[1]).abs().max() <= 1e-5 * tried[0].abs().max()):
        return TOKEN_LOSS
    if tokenizer.mask_token_id is None:
        raise MultiheadError(
            f"{name} reads both ways and its tokenizer has no mask token, so there is nothing for"
            f" it to predict; give the tokenizer it was trained with. {OTHERWISE}"
        )
    return MASKED_LOSS


def _all_or_none(windows: Sequence[Window], what: str) -> bool:
    has = [getattr(window, what) is not None for window in windows]
    if any(has) and not all(has):  # their numbers are of windows, not of texts
        raise MultiheadError(
            f"some texts have a {what} and others have none; give one with each, or with none"
        )
    return all(has)


def scored_batch(loss: str, tokenizer: Any, windows: Sequence[Window]) -> Batch:
    """A batch of windows with the targets of a loss. Special tokens at the end have none.

    Args:
        loss: `TOKEN_LOSS`: each token is scored given the ones before it. `MASKED_LOSS`: 15% of the
            tokens (special ones aside, at least one) are replaced by the mask token and scored. The
            choice depends on the window alone, so it is the same for all models with this
            tokenizer, whatever else is in the batch.
        tokenizer: the model's tokenizer.
        windows: padded on the right.
    """
    before, after = count_special_tokens(tokenizer)
    batch = collate(windows, tokenizer)
    ids = batch.inputs["input_ids"]
    targets = torch.full_like(ids, IGNORED)
    if loss == TOKEN_LOSS:
        for row, window in enumerate(windows):
            first, last = max(before, 1), len(window.ids) - after
            targets[row, first - 1 : last - 1] = ids[row, first:last]
        return Batch(batch.inputs, batch.valid, targets)
    for row, window in enumerate(windows):
        places = _masked_places(tokenizer, window.ids, before, len(window.ids) - after)
        targets[row, places] = ids[row, places]
    masked = ids.masked_fill(targets != IGNORED, tokenizer.mask_token_id)
    return Batch(batch.inputs | {"input_ids": masked}, batch.valid, targets)


def _masked_places(tokenizer: Any, ids: list[int], first: int, last: int) -> list[int]:
    """Positions to mask, seeded by the token ids."""
    special = set(tokenizer.all_special_ids)
    places = [n for n in range(first, last) if ids[n] not in special]
    seed = hashlib.sha256(np.array(ids, "<i8").tobytes()).digest()[:8]
    number = min(len(places), max(1, round(MASKED_SHARE * len(places))))
    draw = np.random.default_rng(int.from_bytes(seed, "little"))
    return sorted(draw.choice(places, number, replace=False).tolist())


def make_non_finite_error(what: str) -> MultiheadError:
    """The error for outputs that are NaN or infinite; `what` is the beginning of its message."""
    return MultiheadError(
        f"{what}: expected finite numbers. Load the model with dtype='float32', and check its"
        " weights if that doesn't help"
    )


def vocab_size(model: nn.Module, default: int) -> int:
    """The number of tokens that a model knows, by its config."""
    return int(getattr(text_config(model), "vocab_size", default))
