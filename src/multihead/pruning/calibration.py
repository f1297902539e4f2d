"""A calibration text as batches, each with the loss of the model on it: what importance is measured
by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MultiheadError
from ..models.site import Site
from ..models.transformers import evaluation
from .pieces import HeadlessError, Piece, documents_of, given_to, loss_kind, pieces_of, words_of

__all__ = ["Batch", "batches_of"]

LOGITS = 2**26  # that are held at once, with their gradients
ROWS = 4096  # tokens in a batch at most
PARTS = 8  # batches at least, so that some can be held out
CONTEXT = 512  # tokens of a window
TEMPERATURE = 0.05  # of the contrastive loss (Gao et al. 2021)
DOCUMENTS = 16  # that are told apart

Loss = Callable[
    [Any], tuple[Tensor, int]
]  # of the model's output: the sum, and over how many tokens


@dataclass(frozen=True)
class Batch:
    """Model inputs and the loss on them."""

    inputs: dict[str, Any]
    of_output: Loss

    def loss(self, model: nn.Module) -> tuple[Tensor, int]:
        """The sum over tokens, in nats, and their number."""
        return self.of_output(model(**self.inputs))

    def real(self, site: Site, x: Tensor) -> Tensor:
        """The rows `[n, ...]` of `[B, L, ...]` that are text."""
        decodes = "decoder_attention_mask" in self.inputs and site.stack == "decoder"
        mask = self.inputs.get("decoder_attention_mask" if decodes else "attention_mask")
        if isinstance(mask, Tensor) and mask.shape == x.shape[:2]:
            return x[mask.bool()]
        return x.reshape(-1, x.shape[-1])


def batches_of(
    model: nn.Module,
    texts: Iterable[str],
    tokenizer: Any,
    *,
    context: int | None = None,
    tokens: int | None = None,
) -> list[Batch]:
    """Texts as batches of windows, with the loss that the model has.

    Of a causal model, of tokens that come next; of a masked one, of the masked; of an encoder
    without a head, how hard it is to tell which second half of a document belongs to which first
    half, by their means (contrastive: what its embeddings are for).
    """
    texts = [texts] if isinstance(texts, str) else list(texts)
    found = documents_of(model, texts, tokenizer, 1, context, tokens, CONTEXT)
    if context is None and len(found) < PARTS:  # little text: shorter windows
        found = documents_of(
            model, texts, tokenizer, 1, max(16, sum(len(ids) for ids, *_ in found) // PARTS), tokens
        )
    try:
        with evaluation(model), torch.no_grad():
            pieces = pieces_of(loss_kind(model, tokenizer, found), tokenizer, found)
    except HeadlessError:
        return _halves(model, [ids for ids, *_ in found], tokenizer)
    most = max(
        1, min(LOGITS // words_of(model, 2**16), ROWS) // max(len(piece.ids) for piece in pieces)
    )
    most = min(most, -(-len(pieces) // PARTS))
    return [_batch(model, pieces[i : i + most], tokenizer) for i in range(0, len(pieces), most)]


def _batch(model: nn.Module, pieces: list[Piece], tokenizer: Any) -> Batch:
    inputs = given_to(model, [piece.ids for piece in pieces], tokenizer)
    device = inputs["input_ids"].device
    at = [
        torch.tensor([n for n, piece in enumerate(pieces) for _ in piece.rows], device=device),
        torch.tensor([row for piece in pieces for row in piece.rows], device=device),
    ]
    targets = torch.tensor([token for piece in pieces for token in piece.targets], device=device)

    def loss(output: Any) -> tuple[Tensor, int]:
        logits = output["logits"][at[0], at[1]].float()
        return nn.functional.cross_entropy(logits, targets, reduction="sum"), len(targets)

    return Batch(inputs, loss)


def _halves(model: nn.Module, documents: list[list[int]], tokenizer: Any) -> list[Batch]:
    long = [ids for ids in documents if len(ids) >= 8]
    if len(long) < 2:
        raise MultiheadError(
            f"{type(model).__name__} has no head that says tokens, so its heads are judged by"
            f" telling documents apart, and the calibration text has {len(long)} of 8 tokens or"
            " more; give at least two, better a hundred"
        )
    found = []
    size = min(DOCUMENTS, len(long))
    for start in range(0, len(long) - size + 1, size):
        some = long[start : start + size]
        halves = [ids[: len(ids) // 2] for ids in some] + [ids[len(ids) // 2 :] for ids in some]
        inputs = given_to(model, halves, tokenizer)
        found.append(Batch(inputs, _contrast(inputs["attention_mask"], size)))
    return found


def _contrast(mask: Tensor, size: int) -> Loss:
    def loss(output: Any) -> tuple[Tensor, int]:
        hidden = output["last_hidden_state"].float()
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        unit = nn.functional.normalize(mean, dim=-1)
        alike = unit[:size] @ unit[size:].T / TEMPERATURE
        each = torch.arange(size, device=alike.device)
        both = [
            nn.functional.cross_entropy(scores, each, reduction="sum")
            for scores in (alike, alike.T)
        ]
        return (both[0] + both[1]) / 2, size

    return loss
