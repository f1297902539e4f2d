"""Texts as what a model is given of them, and what its output should say: the loss of the next
token, or of masked ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data.texts import max_positions, tokens_of
from ..data.windows import Plan, windows
from ..errors import MultiheadError
from ..models.introspect import forward_kwargs, is_encoder_decoder, text_config
from ..models.transformers import having

__all__ = [
    "MASKED",
    "TOKEN",
    "HeadlessError",
    "Piece",
    "documents_of",
    "given_to",
    "logits_of",
    "loss_kind",
    "no_numbers",
    "pieces_of",
    "words_of",
]

TOKEN, MASKED = "token loss", "masked-token loss"
SHARE = 0.15  # of the tokens are masked, as in BERT's training (Devlin et al. 2019)
CONTEXT = 1024  # tokens of a window unless told otherwise, if the model has as many positions
LOGITS = 2**24  # that are held at once


class HeadlessError(MultiheadError):
    """A model without a head that says tokens."""


@dataclass(frozen=True)
class Piece:
    """What the model is given of a document, the rows whose output is scored, and the tokens that
    they should say.
    """

    ids: list[int]
    rows: list[int]
    targets: list[int]


def documents_of(
    model: nn.Module,
    texts: str | Iterable[str],
    tokenizer: Any,
    batch_size: int,
    context: int | None,
    tokens: int | None,
    most: int = CONTEXT,
) -> list[tuple[list[int], int, int]]:
    """Token ids of each document, and between which of them its own tokens stand."""
    if not isinstance(texts, (str, Iterable)):
        raise TypeError(f"texts is a {type(texts).__name__}: expected a string or several")
    if tokens is not None and tokens < 1:
        raise MultiheadError(f"tokens={tokens}: expected at least 1, or None for the whole text")
    config: Any = getattr(model, "config", None)
    limit = (
        max_positions(config, tokenizer)
        if hasattr(config, "get_text_config") and tokenizer is not None
        else None
    )
    plan = Plan(
        (),
        tokenizer,
        limit=limit,
        context=min(limit or most, most) if context is None else context,
        batch_size=batch_size,
    )
    assert plan.context is not None and plan.stride is not None
    after = plan.special - plan.before
    found: list[tuple[list[int], int, int]] = []
    given = 0
    for number, text in enumerate([texts] if isinstance(texts, str) else texts):
        for ids, *_ in windows(
            tokens_of(text, number, tokenizer), plan.before, after, plan.context, plan.stride
        ):
            found.append((ids, plan.before, len(ids) - after))
            given += len(ids)
            if tokens is not None and given >= tokens:
                return found
    if not found:
        raise MultiheadError("texts=[] is empty: expected at least one text")
    return found


def loss_kind(model: nn.Module, tokenizer: Any, found: list[tuple[list[int], int, int]]) -> str:
    """Which loss a model has. Whether it reads both ways is tried out: another last token, and
    earlier rows that notice.
    """
    name = type(model).__name__
    otherwise = (
        "For texts with human similarities there is multihead.pruning.similarity, for any other"
        " task a function of your own (FILE.py:NAME)"
    )
    if is_encoder_decoder(model):
        raise MultiheadError(
            f"{name} is an encoder-decoder: which text it should make of which, plain text doesn't"
            f" say. {otherwise}"
        )
    ids, first, last = found[0]
    few = (ids[first:last] * 8)[:8]
    most = max(max(ids) for ids, *_ in found)
    outputs = []
    for end in (few[-1], (few[-1] + 1) % (most + 1)):
        output = model(**given_to(model, [[*few[:-1], end]], tokenizer))
        logits = output.get("logits") if isinstance(output, Mapping) else None
        if (
            not isinstance(logits, Tensor)
            or logits.ndim != 3
            or logits.shape[-1] < words_of(model, most + 1)
        ):
            raise HeadlessError(
                f"{name} has no head that says tokens, so it has no loss on a text; load it with"
                f" its language-modelling head if it has one. {otherwise}"
            )
        outputs.append(logits[:, :-1].double())
        if not bool(outputs[-1].isfinite().all()):
            raise no_numbers(f"{name} gives logits that are nan or infinite")
    if bool((outputs[0] - outputs[1]).abs().max() <= 1e-5 * outputs[0].abs().max()):
        return TOKEN
    if tokenizer.mask_token_id is None:
        raise MultiheadError(
            f"{name} reads both ways and its tokenizer has no mask token, so nothing says what it"
            f" should foretell; give the tokenizer it was trained with. {otherwise}"
        )
    return MASKED


def no_numbers(what: str) -> MultiheadError:
    return MultiheadError(
        f"{what}: expected finite numbers. Load the model with dtype='float32', and check its"
        " weights if that doesn't help"
    )


def pieces_of(
    kind: str, tokenizer: Any, documents: Iterable[tuple[list[int], int, int]]
) -> list[Piece]:
    return [
        (_following if kind == TOKEN else _masked)(tokenizer, *document) for document in documents
    ]


def _following(tokenizer: Any, ids: list[int], first: int, last: int) -> Piece:
    rows = range(max(first, 1), last)
    return Piece(ids, [row - 1 for row in rows], [ids[row] for row in rows])


def _masked(tokenizer: Any, ids: list[int], first: int, last: int) -> Piece:
    """The choice hangs on the document alone, so that no other one and no order of them changes
    it.
    """
    special = set(tokenizer.all_special_ids)
    may = [row for row in range(first, last) if ids[row] not in special]
    seed = hashlib.sha256(np.array(ids, "<i8").tobytes()).digest()[:8]
    number = min(len(may), max(1, round(SHARE * len(may))))
    rows = sorted(
        np.random.default_rng(int.from_bytes(seed, "little"))
        .choice(may, number, replace=False)
        .tolist()
    )
    chosen = set(rows)
    hidden = [tokenizer.mask_token_id if row in chosen else token for row, token in enumerate(ids)]
    return Piece(hidden, rows, [ids[row] for row in rows])


def given_to(model: nn.Module, rows: list[list[int]], tokenizer: Any) -> dict[str, Any]:
    """Padded on the right. Real tokens are marked, as padding may have the id of an ordinary
    one.
    """
    device = next(model.parameters()).device
    longest = max(map(len, rows))
    padding = tokenizer.pad_token_id or 0
    ids = torch.tensor([row + [padding] * (longest - len(row)) for row in rows], device=device)
    mask = torch.tensor(
        [[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=device
    )
    return forward_kwargs(model, {"input_ids": ids, "attention_mask": mask}, logits="all")


def logits_of(
    model: nn.Module, inputs: dict[str, Any], at: list[Tensor], targets: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits `[n, V]` of some rows at a time, and what they should say.

    The stack below the head runs once; then the whole model is called with a stack that only hands
    over some of those rows. So the head does all that it does, scales and caps too.
    """
    stack: Any = getattr(model, "base_model", model)
    output: Any = stack(**inputs) if stack is not model else None
    hidden = getattr(output, "last_hidden_state", None)
    if isinstance(hidden, Tensor) and hidden.shape[:2] == inputs["input_ids"].shape:
        rows, step = hidden[at[0], at[1]], max(16, LOGITS // words_of(model, 2**16))
        for start in range(0, len(rows), step):
            piece = rows[None, start : start + step]
            few = {
                name: (
                    value[:1, :1].expand(1, piece.shape[1]) if isinstance(value, Tensor) else value
                )
                for name, value in inputs.items()
            }
            with having(
                stack, forward=lambda *args, of=piece, **kwargs: type(output)(last_hidden_state=of)
            ):
                logits = model(**few)["logits"]
            if logits.shape[:2] != piece.shape[:2]:  # a head that isn't on top of this stack
                break
            yield logits[0], targets[start : start + step]
        else:
            return
    yield model(**inputs)["logits"][at[0], at[1]], targets


def words_of(model: nn.Module, otherwise: int) -> int:
    """How many tokens a model knows, by its config."""
    return int(getattr(text_config(model), "vocab_size", otherwise))
