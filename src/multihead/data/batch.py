"""`Batch`: the sequences of one pass, which of their positions are text, and the loss on them.

Every text that the library reads, prunes by or tunes on reaches a model as a `Batch`. A position is
scored against its target: the next token for a causal model, the masked one for a masked model, the
label where the batch has labels. The loss is the sum over scored positions of -log p(target), in
nats, so that it doesn't depend on how texts are batched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..errors import MultiheadError
from ..models.contexts import temporary_attributes
from ..models.introspect import (
    IDS,
    PLAIN_IDS,
    config_of,
    device_of,
    forward_kwargs,
    is_encoder_decoder,
    num_virtual_tokens,
    padding_mask,
    select_valid,
    text_config,
    text_inputs,
)
from ..models.site import Site
from .windows import Window

__all__ = [
    "IGNORED",
    "Batch",
    "collate",
    "concatenate",
    "decoder_inputs",
    "run_model",
    "scored_inputs",
    "token_logits",
]

IGNORED = -100  # target of a position that isn't scored, as in torch and transformers


@dataclass(frozen=True)
class Batch:
    """The sequences of one pass of a model.

    Attributes:
        inputs: arguments of `model.forward` by name; tensors begin with the batch axis.
        valid: bool `[B, L]`: the positions that are text and count. Padding isn't, nor are tokens
            that an earlier window had. None: all of a ready-made batch that its own mask allows.
        targets: int64 `[B, L]`: the token against which the logits of a position are scored,
            `IGNORED` for none. None: not known; see `with_targets`.
        document: int64 `[B]`: the document of each sequence, counted from 0 within the batches that
            are read together. None: each sequence is a document.

    >>> import multihead
    >>> model, tokenizer = multihead.load_builtin()
    >>> window = Window(tokenizer("the cat sat on the mat")["input_ids"], 0, 7)
    >>> batch = collate([window], tokenizer).with_targets(model, causal=True)
    >>> with torch.no_grad():
    ...     total, count = batch.loss(model)
    >>> count, float(total) / count < 10
    (6, True)
    """

    inputs: dict[str, Any]
    valid: Tensor | None = None
    targets: Tensor | None = None
    document: Tensor | None = None

    @property
    def tokens(self) -> int:
        """The number of positions that count; those of all inputs where `valid` is None."""
        if self.valid is not None:
            return int(self.valid.sum())
        ids = self.inputs.get("input_ids")
        return int(ids.numel()) if isinstance(ids, Tensor) else 0

    @property
    def partial(self) -> Tensor | None:
        """`valid` where it leaves out positions that aren't padding, else None."""
        mask = padding_mask(self.inputs)
        if self.valid is None or (mask is not None and torch.equal(mask, self.valid)):
            return None
        return self.valid

    def to(self, device: torch.device | str) -> Batch:
        """The batch on a device."""

        def move(value: Any) -> Any:
            return value.to(device) if isinstance(value, Tensor) else value

        inputs = {name: move(value) for name, value in self.inputs.items()}
        return Batch(inputs, move(self.valid), move(self.targets), move(self.document))

    def for_model(self, model: nn.Module) -> Batch:
        """A batch of texts as the model takes it: on its device, and, for an encoder-decoder, with
        the texts on both sides.
        """
        _require_embeddings(model, self.inputs.get("input_ids"))
        batch = self.to(device_of(model))
        inputs = batch.inputs
        if is_encoder_decoder(model):
            inputs = inputs | decoder_inputs(model, inputs)
        return dataclasses.replace(batch, inputs=text_inputs(model, inputs))

    def select(self, x: Tensor, site: Site | None = None) -> Tensor:
        """The rows `[n, D]` of `x` `[B, L, D]` that are no padding.

        Args:
            x: computed from the model's sequence; all rows of another shape are taken.
            site: where it was computed, for instance in the decoder.
        """
        return select_valid(x, padding_mask(self.inputs, "" if site is None else site.stack))

    def with_targets(
        self, model: nn.Module, *, causal: bool | None, scored: Tensor | None = None
    ) -> Batch:
        """The same batch with the targets that follow from its labels, or from its next tokens.

        Args:
            model: the model, which may be an encoder-decoder: then the decoder's tokens are scored.
            causal: whether a position sees earlier ones only; None where it isn't known.
            scored: bool `[B, L]`: the tokens that are scored, `valid` by default.

        Raises:
            MultiheadError: labels of another shape; neither labels nor next tokens to score.
        """
        inputs, both_sides = self.inputs, is_encoder_decoder(model)
        labels = inputs.get("labels")
        names = ("decoder_input_ids",) if both_sides else (*IDS, *PLAIN_IDS)
        values = (inputs.get(name) for name in names)
        ids = next((x for x in values if isinstance(x, Tensor) and x.dtype == torch.int64), None)
        is_shifted = labels is None and not both_sides
        expected = None if ids is None else ids.shape
        if labels is not None and (labels.ndim != 2 or expected not in (None, labels.shape)):
            raise MultiheadError(
                f"labels {list(labels.shape)}: a loss needs one label for each token,"
                f" {'[B, L]' if expected is None else list(expected)} (-100 where there is none)"
            )
        if labels is not None:
            targets = labels if not causal or both_sides else _next(labels, IGNORED)
        elif ids is not None and (causal is not False or both_sides):
            prefix = "decoder_" if both_sides else ""
            mask = padding_mask(inputs, "decoder" if both_sides else "")
            if both_sides and "decoder_attention_mask" not in inputs:
                mask = None
            targets = _next_tokens(ids, mask, inputs.get(prefix + "position_ids"))
        else:
            raise MultiheadError(
                f"{type(model).__name__} doesn't define which token comes next, so its loss needs"
                " labels: give ready-made batches with labels [B, L] (-100 where there is none)"
            )
        scored = self.valid if scored is None else scored
        if scored is not None:
            scored = _next(scored, False) if is_shifted else scored
            targets = targets.masked_fill(~scored.to(targets.device), IGNORED)
        return dataclasses.replace(self, targets=targets)

    # ---- the loss

    def loss(self, model: nn.Module, output: Any = None) -> tuple[Tensor, int]:
        """The sum of the token losses in nats, a differentiable number, and how many tokens were
        scored.

        Args:
            model: a model whose output has `logits` `[B, L, V]`.
            output: of `model(**scored_inputs(model, batch.inputs))`, if it was run already.
        """
        total, count = self.losses(model, output)
        return total.sum(), int(count.sum())

    def gradient_loss(self, model: nn.Module) -> Tensor:
        """The loss, summed, whose gradients show how much a head matters."""
        return self.loss(model)[0]

    def losses(
        self, model: nn.Module, output: Any = None, *, most_logits: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """The loss of each sequence, float64, and the number of its scored tokens, `[B]` both.

        Args:
            most_logits: compute so many logits at once (without gradients), which saves most of the
                memory of a pass.
        """
        sequence, _ = self.scored_positions()
        each = self.token_losses(model, output, most_logits=most_logits).double()
        assert self.targets is not None
        total = each.new_zeros(len(self.targets)).index_add(0, sequence, each)
        return total, torch.bincount(sequence, minlength=len(self.targets))

    def token_losses(
        self, model: nn.Module, output: Any = None, *, most_logits: int | None = None
    ) -> Tensor:
        """-log p(target) of each scored position `[n]`, in the order of `scored_positions`."""
        at = self.scored_positions()
        assert self.targets is not None
        if output is None and most_logits is not None and len(at[0]):
            parts = _logits_in_parts(model, self.inputs, at, most_logits)
        else:
            if output is None:
                output = model(**scored_inputs(model, self.inputs))
            logits = token_logits(model, output)
            virtual = num_virtual_tokens(model)
            if logits.shape[1] == self.targets.shape[1] + virtual:
                logits = logits[:, virtual:]
            if logits.shape[:2] != self.targets.shape:
                raise MultiheadError(
                    f"{type(model).__name__} gives logits {list(logits.shape[:2])} for targets"
                    f" {list(self.targets.shape)}: a loss needs one logit vector for each token;"
                    " give labels of that shape, or leave the pictures out"
                )
            parts = iter([logits[at]])
        targets, losses, start = self.targets[at], [], 0
        for logits in parts:
            work = logits.to(torch.promote_types(logits.dtype, torch.float32))
            some = targets[start : start + len(logits)]
            losses.append(nn.functional.cross_entropy(work, some, reduction="none"))
            start += len(logits)
        return torch.cat(losses)

    def scored_positions(self) -> tuple[Tensor, Tensor]:
        """The scored positions: their sequence and their place in it, `[n]` both."""
        if self.targets is None:
            raise MultiheadError("this batch has no targets; see Batch.with_targets")
        sequence, position = (self.targets != IGNORED).nonzero(as_tuple=True)
        return sequence, position


# ---- batches from windows


def collate(
    windows: Sequence[Window],
    tokenizer: Any,
    *,
    left: bool = False,
    document: Sequence[int] | None = None,
) -> Batch:
    """Pad windows to one batch of `input_ids` and `attention_mask`, int64 `[B, L]`.

    Args:
        windows: one for each sequence.
        tokenizer: for the padding token.
        left: pad on the left, for texts that are to be continued.
        document: the document of each window; see `Batch`.

    Raises:
        IndexError: no window.

    >>> import multihead
    >>> _, tokenizer = multihead.load_builtin()
    >>> rows = [tokenizer(text)["input_ids"] for text in ("the cat sat", "the cat")]
    >>> batch = collate([Window(ids, 0, len(ids)) for ids in rows], tokenizer)
    >>> batch.inputs["attention_mask"].tolist(), batch.tokens
    ([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]], 9)
    """
    side = "left" if left else "right"
    rows = [torch.tensor(window.ids, device="cpu") for window in windows]
    padding = tokenizer.pad_token_id or 0
    ids = pad_sequence(rows, batch_first=True, padding_value=padding, padding_side=side)
    # Not `ids != padding`: where there is no padding token, or it is the end token, real tokens
    # have that id too.
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side=side)
    valid = mask.bool()
    if any(window.last - window.first < len(window.ids) for window in windows):
        place = torch.arange(ids.shape[1], device="cpu")
        valid = torch.stack([(place >= w.first) & (place < w.last) for w in windows])
    return Batch(
        {"input_ids": ids, "attention_mask": mask},
        valid,
        document=None if document is None else torch.tensor(document, device="cpu"),
    )


def concatenate(batches: Sequence[Batch]) -> Batch:
    """One batch of all sequences, those of batches shorter than the longest padded on the right."""

    def pad(x: Tensor, value: int) -> Tensor:
        return nn.functional.pad(x, (0, length - x.shape[1]), value=value) if x.ndim == 2 else x

    two_axes = [x.shape[1] for b in batches for x in b.inputs.values() if x.ndim == 2]
    length = max(two_axes, default=0)
    inputs = {
        name: torch.cat([pad(batch.inputs[name], 0) for batch in batches])
        for name in batches[0].inputs
    }
    valid = [batch.valid for batch in batches]
    targets = [batch.targets for batch in batches]
    return Batch(
        inputs,
        None if None in valid else torch.cat([pad(x, 0) for x in valid if x is not None]),
        None if None in targets else torch.cat([pad(x, IGNORED) for x in targets if x is not None]),
    )


def _require_embeddings(model: nn.Module, ids: Any) -> None:
    """Raise where a token has no row in the model's table of embeddings."""
    try:
        rows = getattr(model.get_input_embeddings(), "num_embeddings", None)  # type: ignore[operator]
    except (AttributeError, NotImplementedError):  # no such table, or none that is found by name
        return
    if isinstance(rows, int) and isinstance(ids, Tensor) and ids.numel() and ids.max() >= rows:
        raise MultiheadError(
            f"the tokenizer gives token {int(ids.max()):,}, and {type(model).__name__} has"
            f" embeddings of {rows:,} tokens; take both from the same checkpoint"
        )


def decoder_inputs(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The text as a decoder is taught it: one position later, after the start token."""
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    starts = [getattr(config_of(model), name, None) for name in names]
    start = next((value for value in starts if isinstance(value, int)), None)
    if start is None:
        raise MultiheadError(
            f"{type(model).__name__} has no decoder_start_token_id in its config, with which its"
            " decoder begins; set model.config.decoder_start_token_id"
        )
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    return {
        "decoder_input_ids": torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], 1),
        "decoder_attention_mask": torch.cat([torch.ones_like(mask[:, :1]), mask[:, :-1]], 1),
    }


def run_model(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """The output of a pass on tokenized texts or ready-made inputs, without a cache."""
    if "input_ids" in inputs:
        inputs = text_inputs(model, inputs)
    return model(**forward_kwargs(model, inputs, logits="all"))


def scored_inputs(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a pass whose output is scored: logits of every position, no cache, and no loss
    of the model's own.
    """
    # an encoder-decoder may make its decoder's input from the labels
    needs_labels = is_encoder_decoder(model) and "decoder_input_ids" not in inputs
    kept = {name: v for name, v in inputs.items() if name != "labels" or needs_labels}
    return forward_kwargs(model, kept, logits="all")


# ---- targets and logits


def _next(x: Tensor, end: int | bool) -> Tensor:
    """Each position's next value `[B, L]`, `end` at the last one."""
    return nn.functional.pad(x[:, 1:], (0, 1), value=end)


def _next_tokens(ids: Tensor, mask: Any, positions: Any) -> Tensor:
    """The next token of each position: none at a padding's edge, or where another text begins."""
    targets = _next(ids, IGNORED)
    if isinstance(mask, Tensor) and mask.ndim == 2:
        mask = mask[:, -ids.shape[1] :].bool()
        targets = targets.masked_fill(~(mask & _next(mask, False)), IGNORED)
    if isinstance(positions, Tensor) and positions.shape[1:] == ids.shape[1:]:
        jumps = positions.diff(dim=1) != 1  # several texts in one sequence
        targets = targets.masked_fill(nn.functional.pad(jumps, (0, 1)), IGNORED)
    return targets


def token_logits(model: nn.Module, output: Any) -> Tensor:
    """The logits `[B, L, V]` in a model's output.

    Raises:
        MultiheadError: there are none for each token.
    """
    logits = output.get("logits") if isinstance(output, Mapping) else None
    if isinstance(output, (Tensor, tuple)):  # of a wrapper
        width = getattr(text_config(model), "vocab_size", None)
        parts = output if isinstance(output, tuple) else (output,)
        found = (x for x in parts if isinstance(x, Tensor) and x.ndim == 3)
        logits = next((x for x in found if x.shape[-1] == width), None)
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        raise MultiheadError(
            f"{type(model).__name__} gives no logits for each token, so it has no loss; load it"
            f" with its"
            " language-modelling head (AutoModelForCausalLM), or leave out what needs a loss"
        )
    return logits


def _logits_in_parts(
    model: nn.Module, inputs: Mapping[str, Any], at: tuple[Tensor, Tensor], most: int
) -> Iterator[Tensor]:
    """Logits `[n, V]` of some positions at a time.

    The stack below the head runs once; then the whole model is called with a stack that only hands
    over hidden states of some positions. So the head does all that it does, scales and caps too.
    """
    inputs = scored_inputs(model, inputs)
    stack: Any = getattr(model, "base_model", model)
    has_stack = stack is not model and not is_encoder_decoder(model)
    output: Any = stack(**inputs) if has_stack else None
    hidden = getattr(output, "last_hidden_state", None)
    if isinstance(hidden, Tensor) and hidden.shape[:2] == inputs["input_ids"].shape:
        rows = hidden[at]
        step = max(16, most // getattr(text_config(model), "vocab_size", 2**16))
        for start in range(0, len(rows), step):
            piece = rows[None, start : start + step]
            few = {
                name: (
                    value[:1, :1].expand(1, piece.shape[1]) if isinstance(value, Tensor) else value
                )
                for name, value in inputs.items()
            }

            def give(*args: Any, piece: Tensor = piece, **kwargs: Any) -> Any:
                return type(output)(last_hidden_state=piece)

            with temporary_attributes(stack, forward=give):
                logits = model(**few)["logits"]
            if logits.shape[:2] != piece.shape[:2]:  # a head that isn't on top of this stack
                break
            yield logits[0]
        else:
            return
    yield model(**inputs)["logits"][at]
