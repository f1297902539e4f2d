"""Texts or ready-made inputs as batches, each with the loss of the model on it: importance is
measured by that loss, and so is the cost of pruning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batch import Batch, collate, run_model
from ..data.documents import Document, several
from ..data.ready import are_ready, take_ready
from ..data.scoring import (
    GENERATED_LOSS,
    LABEL_LOSS,
    OUTPUT_LOSS,
    TOKEN_LOSS,
    find_loss,
    generates_targets,
    require_loss,
    scored_batch,
    vocab_size,
)
from ..data.targets import (
    LabelledBatch,
    generate_ids,
    generate_targets,
    labelled_batch,
    target_batch,
    with_decoder,
    with_targets,
)
from ..data.windows import Window, cut_texts
from ..errors import MultiheadError
from ..models.contexts import evaluation
from ..models.introspect import (
    can_generate,
    device_of,
    inner_model,
    is_sentence_transformer,
    text_config,
    text_inputs,
)
from .distillation import distil

__all__ = [
    "calibration_batches",
    "count_sequences",
    "loss_batch",
    "most_sequences",
    "proof_inputs",
    "ready_loss_batch",
    "require_one_loss",
    "split_inputs",
]

LOGITS = 2**26  # that are held at once, with their gradients
ROWS = 4096  # tokens in a batch at most
PARTS = 8  # batches at least, so that some can be held out
CONTEXT = 512  # tokens of a window
KEPT = 2**22  # numbers of the model's own outputs that are kept of a batch
SHORTEST = 16  # tokens of a window, where there is little text
PROOF_TOKENS = 64


def calibration_batches(
    model: nn.Module,
    texts: Document | Iterable[Document] | Iterable[Mapping[str, Any]],
    tokenizer: Any = None,
    *,
    context: int | None = None,
    tokens: int | None = None,
) -> tuple[str, list[Batch]]:
    """Texts or ready-made inputs as batches with the loss that the model has on them, on its
    device, and the name of that loss.

    The loss of a causal model is that of the next tokens, of a masked one that of the masked
    tokens, of an encoder-decoder that of the target's tokens (which it generates, if the texts have
    none), of a classifier that of the labels. Without labels, and of any other model, it is the
    distance from the model's own outputs, as it is before it changes.

    Args:
        model: any model with heads.
        texts: the calibration text or texts, conversations, rows with a label or a target, or
            ready-made batches of model inputs.
        tokenizer: the model's tokenizer, for texts.
        context: tokens of a window; by default at most 512, fewer where there is little text.
        tokens: stop after so many.

    Raises:
        MultiheadError: too little text to score heads on one part and to hold out another; labels
            or targets that the model doesn't take.
    """
    listed = list(several(texts))
    if are_ready(listed):
        return _ready_batches(model, listed)
    windows = cut_texts(model, listed, tokenizer, context=context, longest=CONTEXT, tokens=tokens)
    is_whole = any(w.target is not None or w.label is not None for w in windows)
    if context is None and len(windows) < PARTS and not is_whole:  # little text: shorter windows
        shorter = max(SHORTEST, sum(len(window.ids) for window in windows) // PARTS)
        windows = cut_texts(model, listed, tokenizer, context=shorter, tokens=tokens)
    _require_parts(windows, context, is_whole)
    with evaluation(model):
        kind = find_loss(model, tokenizer, windows)
        longest = max(len(window.ids) + len(window.target or ()) for window in windows)
        size = max(1, min(LOGITS // vocab_size(model, 2**16), ROWS) // longest)
        size = min(size, -(-len(windows) // PARTS))
        size = most_sequences(kind, model, tokenizer, size)
        parts = (windows[start : start + size] for start in range(0, len(windows), size))
        return kind, [loss_batch(kind, model, tokenizer, part, model) for part in parts]


def _require_parts(windows: Sequence[Window], context: int | None, is_whole: bool) -> None:
    if len(windows) > 1:
        return
    given = len(windows[0].ids)
    least = "at least two rows, better a hundred"
    if not is_whole:
        least = f"at least {(context or SHORTEST) + 1:,} tokens, better {PARTS * CONTEXT:,}"
    shorter = "" if context is None else f", or a context (--context) below {given:,}"
    raise MultiheadError(
        f"texts hold {given:,} tokens in one {'row' if is_whole else 'window'}: heads are scored on"
        f" one part of the text, and criteria compared on another; give {least}{shorter}"
    )


def _ready_batches(model: nn.Module, listed: Sequence[Any]) -> tuple[str, list[Batch]]:
    """Ready-made batches; few ones are split, so that some can be held out."""
    given = [take_ready(model, inputs, number) for number, inputs in enumerate(listed)]
    parts = -(-PARTS // len(given))
    given = [
        part
        for inputs in given
        for part in split_inputs(inputs, -(-(count_sequences(inputs) or 1) // parts))
    ]
    if len(given) < 2:
        raise MultiheadError(
            "texts hold one batch of one sequence (or picture, or sound): heads are scored on one"
            " part of them, and criteria compared on another; give at least two, better a hundred"
        )
    kinds, batches = zip(*[_tried(model, inputs) for inputs in given], strict=True)
    return require_one_loss(kinds), list(batches)


def _tried(model: nn.Module, inputs: dict[str, Any]) -> tuple[str, Batch]:
    """Model inputs as a batch with a loss; raises where the model fails on them."""
    try:
        return ready_loss_batch(model, inputs, model)
    except (MultiheadError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of any model's code
        shapes = ", ".join(
            f"{name} {list(x.shape) if isinstance(x, Tensor) else type(x).__name__}"
            for name, x in inputs.items()
        )
        raise MultiheadError(
            f"texts: {type(model).__name__} fails on the model inputs {shapes}"
            f" ({type(error).__name__}: {error}); give inputs that its forward takes"
        ) from error


# ---- batches with a loss


def loss_batch(
    kind: str,
    model: nn.Module,
    tokenizer: Any,
    windows: Sequence[Window],
    original: nn.Module | None,
) -> Batch:
    """Windows as a batch on the model's device, with the loss that `find_loss` named; `original` is
    the whole model, for the losses that need it.
    """
    device = device_of(model)
    if kind == GENERATED_LOSS and original is not None:
        windows = generate_targets(original, tokenizer, windows)
    if windows[0].target is not None:
        return target_batch(model, tokenizer, windows)
    if kind == LABEL_LOSS:
        return LabelledBatch(labelled_batch(model, tokenizer, windows).to(device).inputs)
    if kind == OUTPUT_LOSS and original is not None:
        batch = with_decoder(original, collate(windows, tokenizer).to(device))
        return distil(original, batch, KEPT)
    return scored_batch(kind, tokenizer, windows).to(device)


def most_sequences(kind: str, model: nn.Module, tokenizer: Any, size: int) -> int:
    """`size`, or 1 for a classifier that finds a text's last token by a padding token which isn't
    the tokenizer's.
    """
    padding = getattr(text_config(model), "pad_token_id", None)
    by_last = type(inner_model(model)).__name__.endswith("ForSequenceClassification")
    is_known = padding is not None and padding == (tokenizer.pad_token_id or 0)
    return 1 if kind in (OUTPUT_LOSS, LABEL_LOSS) and by_last and not is_known else size


def ready_loss_batch(
    model: nn.Module, inputs: dict[str, Any], original: nn.Module | None
) -> tuple[str, Batch]:
    """Model inputs as a batch with a loss, and which one: of their labels or targets where they
    have some, of next tokens for a causal model, else one by the original model.
    """
    batch = Batch(inputs)
    if generates_targets(model):
        if "labels" in inputs or "decoder_input_ids" in inputs:
            return TOKEN_LOSS, batch.with_targets(model, causal=True)
        require_loss(GENERATED_LOSS, model, original)
        assert original is not None
        return GENERATED_LOSS, with_targets(model, batch, generate_ids(original, inputs))
    if "input_ids" in inputs and can_generate(model):
        return TOKEN_LOSS, batch.with_targets(model, causal=True)
    with torch.no_grad(), evaluation(model):
        output = run_model(model, inputs)
        if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
            return LABEL_LOSS, LabelledBatch(inputs)
        require_loss(OUTPUT_LOSS, model, original)
        assert original is not None
        return OUTPUT_LOSS, distil(original, batch, KEPT)


def require_one_loss(kinds: Sequence[str]) -> str:
    """The loss of all batches; raises where they have different ones."""
    for number, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise MultiheadError(
                f"texts[0] has the {kinds[0]}, texts[{number}] the {kind}: give labels with all"
                " batches, or with none"
            )
    return kinds[0]


def count_sequences(inputs: Mapping[str, Any]) -> int | None:
    """The size of the batch axis that all inputs share; None where they share none."""
    sizes = {len(x) for x in inputs.values() if _has_axis(x)}
    return sizes.pop() if len(sizes) == 1 else None


def split_inputs(inputs: dict[str, Any], size: int) -> list[dict[str, Any]]:
    """Model inputs in parts of so many sequences; as they are where they share no batch axis."""
    number = count_sequences(inputs)
    if number is None or number <= size:
        return [inputs]
    return [
        {name: x[start : start + size] if _has_axis(x) else x for name, x in inputs.items()}
        for start in range(0, number, size)
    ]


def _has_axis(x: Any) -> bool:
    return isinstance(x, list) or (isinstance(x, Tensor) and x.ndim > 0)


def proof_inputs(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """A few inputs of a batch on which surgery is proved: two sequences at most, and of texts 64
    tokens at most, without padding.
    """
    inputs = split_inputs(batch.inputs, 2)[0]
    has_decoder = "decoder_input_ids" in inputs or not generates_targets(model)
    inputs = {name: x for name, x in inputs.items() if name != "labels" or not has_decoder}
    sides = {"attention_mask": "input_ids", "decoder_attention_mask": "decoder_input_ids"}
    text = {*sides, *sides.values(), "token_type_ids", "position_ids", "global_attention_mask"}
    if inputs.keys() <= text:  # with a picture's tokens in it, a text can't be cut
        for mask_name, name in sides.items():
            inputs = _without_padding(inputs, name, mask_name)
    if "input_ids" not in inputs:
        return inputs
    if is_sentence_transformer(model):
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    return text_inputs(model, inputs)


def _without_padding(inputs: dict[str, Any], name: str, mask_name: str) -> dict[str, Any]:
    ids, mask = inputs.get(name), inputs.get(mask_name)
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        return inputs
    shape, columns = ids.shape, torch.arange(ids.shape[1], device=ids.device)
    if isinstance(mask, Tensor) and mask.shape == shape:
        if not bool(mask.all()):  # the first sequence alone, without its padding
            inputs, mask = split_inputs(inputs, 1)[0], mask[:1]
            columns, shape = mask[0].nonzero()[:, 0], mask.shape
        inputs = {key: x for key, x in inputs.items() if key != mask_name}
    if len(columns) > PROOF_TOKENS:  # the last one stays: some heads look at the end token
        columns = torch.cat([columns[: PROOF_TOKENS - 1], columns[-1:]])
    return {
        key: x[:, columns] if isinstance(x, Tensor) and x.shape == shape else x
        for key, x in inputs.items()
    }
