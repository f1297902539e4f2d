"""A calibration text as batches, each with the loss of the model on it: importance is measured by
that loss.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batch import Batch, collate
from ..data.documents import Document, each_document
from ..data.scoring import NoLossError, find_loss, scored_batch, vocab_size
from ..data.windows import Window, cut_texts
from ..errors import MultiheadError
from ..models.contexts import evaluation
from ..models.introspect import device_of, forward_kwargs

__all__ = ["ContrastiveBatch", "calibration_batches"]

LOGITS = 2**26  # that are held at once, with their gradients
ROWS = 4096  # tokens in a batch at most
PARTS = 8  # batches at least, so that some can be held out
CONTEXT = 512  # tokens of a window
TEMPERATURE = 0.05  # of the contrastive loss (Gao et al. 2021)
DOCUMENTS = 16  # in a batch of the contrastive loss


class ContrastiveBatch(Batch):
    """The first halves of some documents, then their second halves; the loss is how hard it is to
    find the second half that belongs to a first one by their mean hidden states (Gao et al. 2021).

    `inputs` are those of `2n` sequences, and `document` their documents, 0..n-1 twice.
    """

    def loss(self, model: nn.Module, output: Any = None) -> tuple[Tensor, int]:
        """The contrastive loss in nats, summed over the documents, and their number."""
        if output is None:
            output = model(**forward_kwargs(model, self.inputs, logits="all"))
        hidden, mask = output["last_hidden_state"].float(), self.inputs["attention_mask"]
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        first, second = nn.functional.normalize(mean, dim=-1).chunk(2)
        scores = first @ second.T / TEMPERATURE
        own = torch.arange(len(first), device=scores.device)
        both = [nn.functional.cross_entropy(x, own, reduction="sum") for x in (scores, scores.T)]
        return (both[0] + both[1]) / 2, len(first)


def calibration_batches(
    model: nn.Module,
    texts: Document | Iterable[Document],
    tokenizer: Any,
    *,
    context: int | None = None,
    tokens: int | None = None,
) -> list[Batch]:
    """Texts as batches of windows with the loss that the model has, on its device.

    The loss of a causal model is that of the next tokens, of a masked one that of the masked
    tokens. An encoder without a head has a contrastive loss, since that is what its embeddings are
    for: see `ContrastiveBatch`.

    Args:
        model: a model that reads text.
        texts: the calibration text or texts, or conversations.
        tokenizer: the model's tokenizer.
        context: tokens of a window; by default at most 512, fewer where there is little text.
        tokens: stop after so many.

    Raises:
        MultiheadError: a model without a loss, or too little text for one.
    """
    texts = list(each_document(texts))
    windows = cut_texts(model, texts, tokenizer, context=context, longest=CONTEXT, tokens=tokens)
    if context is None and len(windows) < PARTS:  # little text: shorter windows
        shorter = max(16, sum(len(window.ids) for window in windows) // PARTS)
        windows = cut_texts(model, texts, tokenizer, context=shorter, tokens=tokens)
    try:
        with evaluation(model):
            kind = find_loss(model, tokenizer, windows)
    except NoLossError:
        return _halves(model, windows, tokenizer)
    longest = max(len(window.ids) for window in windows)
    size = max(1, min(LOGITS // vocab_size(model, 2**16), ROWS) // longest)
    size = min(size, -(-len(windows) // PARTS))
    device = device_of(model)
    parts = (windows[start : start + size] for start in range(0, len(windows), size))
    return [scored_batch(kind, tokenizer, part).to(device) for part in parts]


def _halves(model: nn.Module, windows: list[Window], tokenizer: Any) -> list[Batch]:
    long = [window.ids for window in windows if len(window.ids) >= 8]
    if len(long) < 2:
        raise MultiheadError(
            f"{type(model).__name__} has no head that predicts tokens, so its heads are scored by"
            f" telling documents apart, and the calibration text has {len(long)} of 8 tokens or"
            " more; give at least two, better a hundred"
        )
    batches: list[Batch] = []
    size = min(DOCUMENTS, len(long))
    device = device_of(model)
    for start in range(0, len(long) - size + 1, size):
        some = long[start : start + size]
        halves = [ids[: len(ids) // 2] for ids in some] + [ids[len(ids) // 2 :] for ids in some]
        batch = collate([Window(ids, 0, len(ids)) for ids in halves], tokenizer).to(device)
        document = torch.arange(size, device=device).repeat(2)
        batches.append(ContrastiveBatch(batch.inputs, batch.valid, document=document))
    return batches
