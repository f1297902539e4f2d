"""The output that a model should give for a text: the target of an encoder-decoder, given or
generated, and the label of a classifier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..errors import MultiheadError
from ..models.contexts import evaluation
from ..models.introspect import can_generate, config_of, device_of, inner_model, is_encoder_decoder
from ..models.quiet import quiet
from .batch import IGNORED, Batch, collate, decoder_inputs, run_model
from .tokenizing import max_tokens
from .windows import Window

__all__ = [
    "LabelledBatch",
    "complete_decoder",
    "generate_ids",
    "generate_targets",
    "labelled_batch",
    "target_batch",
    "with_decoder",
    "with_targets",
]

SEQUENCES = 16  # that are generated for at once
SEVERAL = "multi_label_classification"  # a config's problem type
NEW_TOKENS = 128  # that an encoder-decoder generates for a text at most
# Of a model's class, whose labels aren't one of a text.
OTHER_LABELS = ("ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice")


# ---- encoder-decoders


def target_batch(model: nn.Module, tokenizer: Any, windows: Sequence[Window]) -> Batch:
    """A batch of texts on the encoder's side and their targets on the decoder's, each token of
    which is scored given the ones before it.
    """
    rows = [window.target or [] for window in windows]
    return with_targets(model, collate(windows, tokenizer), rows)


def with_targets(model: nn.Module, batch: Batch, rows: Sequence[list[int]]) -> Batch:
    """A batch for an encoder, with the tokens that its decoder should give for each sequence."""
    device = device_of(model)
    ids = [torch.tensor(row, dtype=torch.int64, device=device) for row in rows]
    mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    padding = getattr(config_of(model), "pad_token_id", None) or 0
    padded = pad_sequence(ids, batch_first=True, padding_value=padding)
    inputs = batch.to(device).inputs
    inputs |= decoder_inputs(model, {"input_ids": padded, "attention_mask": mask})
    valid = None if batch.valid is None else batch.valid.to(device)
    return Batch(inputs, valid, padded.masked_fill(mask == 0, IGNORED), batch.document)


def generate_targets(model: nn.Module, tokenizer: Any, windows: Sequence[Window]) -> list[Window]:
    """The windows, with what the model generates for each as its target."""
    ids: list[list[int]] = []
    for start in range(0, len(windows), SEQUENCES):
        batch = collate(windows[start : start + SEQUENCES], tokenizer).to(device_of(model))
        ids += generate_ids(model, batch.inputs)
    return [window._replace(target=row) for window, row in zip(windows, ids, strict=True)]


@torch.no_grad()
def generate_ids(model: nn.Module, inputs: dict[str, Any]) -> list[list[int]]:
    """Tokens that an encoder-decoder generates for each sequence, greedily, at most 128 tokens:
    without the start token, with the end token.

    Raises:
        MultiheadError: its `generate` fails on these inputs.
    """
    inner: Any = inner_model(model)
    bounds = (max_tokens(model), getattr(inner.config, "max_target_positions", None))
    limit = max(1, min([NEW_TOKENS, *(bound - 2 for bound in bounds if bound)]))
    try:
        with evaluation(model), quiet():
            rows = inner.generate(**inputs, max_new_tokens=limit, do_sample=False, num_beams=1)
    except Exception as error:  # of any model's code
        raise MultiheadError(
            f"{type(inner).__name__} can't generate the targets that these inputs lack"
            f" ({type(error).__name__}: {error}); give them: rows with a source and a target, or"
            " ready-made inputs with labels"
        ) from error
    ends = getattr(inner.generation_config, "eos_token_id", None)
    ends = ends if isinstance(ends, list) else [ends]
    start = getattr(inner.config, "decoder_start_token_id", None)
    first_end = next((end for end in ends if end is not None), 0)
    found = []
    for row in rows.tolist():
        ids = row[1:] if len(row) > 1 and row[0] == start else row
        end = next((n for n, token in enumerate(ids) if token in ends), len(ids))
        found.append(ids[: end + 1] or [first_end])  # Whisper's `generate` leaves ends out
    return found


def with_decoder(model: nn.Module, batch: Batch) -> Batch:
    """The batch for an encoder-decoder that generates nothing: its head may make the decoder's
    input from the text; else the text is on both sides.
    """
    if not is_encoder_decoder(model):
        return batch
    try:
        with torch.no_grad():
            run_model(model, batch.inputs)
    except Exception:  # of any model's code
        return batch.for_model(model)
    return batch


def complete_decoder(model: nn.Module, batch: Batch) -> Batch:
    """The batch with what the decoder of an encoder-decoder reads: given, generated, or the text;
    that of any other model as it is.
    """
    if not is_encoder_decoder(model) or {"labels", "decoder_input_ids"} & batch.inputs.keys():
        return batch
    if can_generate(model):
        return with_targets(model, batch, generate_ids(model, batch.inputs))
    return with_decoder(model, batch)


# ---- labels


@dataclass(frozen=True)
class LabelledBatch(Batch):
    """A batch whose inputs hold labels; the loss is the one that the model itself computes of them,
    a mean over sequences, times their number.
    """

    def losses(
        self, model: nn.Module, output: Any = None, *, most_logits: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """The loss of each sequence: the mean for all of them, which is known alone. `[B]` both."""
        config = config_of(model)
        problem = getattr(config, "problem_type", None)
        output = run_model(model, self.inputs) if output is None else output
        if config is not None:  # transformers notes there what kind of labels it was given
            config.problem_type = problem
        loss = output.get("loss") if hasattr(output, "get") else None
        if not isinstance(loss, Tensor):
            raise MultiheadError(
                f"{type(model).__name__} returns no loss for labels; leave them out, and its"
                " outputs are compared with those of the whole model"
            )
        first = next(x for x in self.inputs.values() if isinstance(x, Tensor))
        count = torch.ones(len(first), dtype=torch.int64, device=loss.device)
        return loss.double().mean().expand(len(first)), count


def labelled_batch(model: nn.Module, tokenizer: Any, windows: Sequence[Window]) -> LabelledBatch:
    """A batch of texts with their labels.

    Raises:
        MultiheadError: a model without labels of a text, or labels that it doesn't have.
    """
    batch = collate(windows, tokenizer)
    labels = _label_tensor(model, [window.label for window in windows])
    return LabelledBatch(batch.inputs | {"labels": labels}, batch.valid)


def _label_tensor(model: nn.Module, labels: Sequence[Any]) -> Tensor:
    """Classes int64 `[B]`, numbers float `[B]`, or the numbers of several labels `[B, C]`."""
    name, config = type(inner_model(model)).__name__, config_of(model)
    number = getattr(config, "num_labels", None)
    if name.endswith(OTHER_LABELS) or number is None:
        raise MultiheadError(
            f"texts have a label each, and {name} has none of a whole text; leave the labels out,"
            " or give ready-made inputs with the labels that its forward takes"
        )
    known = {str(x): int(n) for n, x in (getattr(config, "id2label", None) or {}).items()}
    known |= getattr(config, "label2id", None) or {}
    values: list[Any] = []
    for label in labels:
        if hasattr(label, "tolist"):  # of NumPy or torch, as data sets may give them
            label = label.tolist()
        if isinstance(label, str):
            if label not in known:
                names = ", ".join(map(repr, list(known)[:6]))
                raise MultiheadError(
                    f"label {label!r} isn't one of this model's, {names}; give one of these, or"
                    " its number"
                )
            label = known[label]
        is_list = isinstance(label, (list, tuple))
        each = list(label) if is_list else [label]
        if not each or not all(
            isinstance(x, int) or (isinstance(x, float) and isfinite(x)) for x in each
        ):
            raise MultiheadError(
                f"label {label!r}: expected a finite number, a name or a list of numbers"
            )
        if not is_list and getattr(config, "problem_type", None) == SEVERAL:
            raise MultiheadError(
                f"label {label!r}: the model has several labels a text; give a list of {number}"
                " numbers, 1 for each label that the text has and 0 for the others"
            )
        if is_list and len(each) != number:
            raise MultiheadError(
                f"label {label!r} has {len(each)} numbers; the model has {number} labels"
            )
        values.append(each if is_list else label)
    if len({isinstance(value, list) for value in values}) > 1:
        raise MultiheadError("labels are numbers in some texts and lists in others; give one kind")
    is_regression = number == 1 or getattr(config, "problem_type", None) == "regression"
    if is_regression or isinstance(values[0], list):
        return torch.tensor(values, dtype=torch.float32, device="cpu")
    wrong = [value for value in values if value != int(value) or not 0 <= value < number]
    if wrong:
        raise MultiheadError(
            f"label {wrong[0]!r}: expected one of the model's classes, 0 to {number - 1}"
        )
    return torch.tensor([int(value) for value in values], device="cpu")
