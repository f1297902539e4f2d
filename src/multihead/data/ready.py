"""Ready-made model inputs, in the forms in which tokenizers and data sets give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import MultiheadError
from ..models.introspect import device_of, is_sentence_transformer

__all__ = ["are_ready", "ready_inputs", "take_ready"]

# Of a batch: they ask for outputs that a reading doesn't use.
UNUSED = ("output_attentions", "output_hidden_states", "return_dict")
PADDED = "tokenizer(texts, padding=True, return_tensors='pt')"


def ready_inputs(batch: Any, number: int, model: nn.Module) -> dict[str, Any]:
    """Arguments of the model's forward by name, from a dict of tensors, arrays or lists.

    Lists and arrays become tensors on the model's device. Where `input_ids` are of one sequence
    `[L]`, everything of that shape becomes a batch of one, `[1, L]`.

    Args:
        batch: the dict.
        number: its number, for the messages.
        model: the model; one of sentence-transformers takes the dict as a whole.

    Raises:
        TypeError: not a dict.
        MultiheadError: sequences of several lengths.

    >>> import multihead
    >>> model, tokenizer = multihead.load_builtin()
    >>> ready_inputs({"input_ids": [5, 6], "attention_mask": [1, 1]}, 0, model)
    {'input_ids': tensor([[5, 6]]), 'attention_mask': tensor([[1, 1]])}
    """
    name = f"texts[{number}]"
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"{name} is a {type(batch).__name__}: expected a list of strings or of conversations"
            " (with tokenizer=), or dicts of model inputs such as {'input_ids': torch.tensor([[1,"
            " 2, 3]])}, and not both"
        )
    device = device_of(model)
    inputs = {
        key: _tensor(value, f"{name}[{key!r}]", device)
        for key, value in batch.items()
        if key not in UNUSED
    }
    if not inputs:
        raise MultiheadError(f"{name} is an empty dict: expected model inputs, such as input_ids")
    if all(isinstance(value, str) for value in inputs.values()):
        raise MultiheadError(
            f"{name} is a dict with {', '.join(map(repr, inputs))}, and no model inputs; give its"
            " text itself, or a conversation as a list of messages with 'role' and 'content'"
        )
    ids = inputs.get("input_ids")
    if not isinstance(batch.get("input_ids"), (Tensor, type(None))):
        is_number = isinstance(ids, Tensor) and not ids.is_floating_point() and ids.numel()
        if not is_number:
            raise MultiheadError(
                f"{name}['input_ids'] holds no token ids: expected whole numbers, [B, L], such as"
                " [[1, 2, 3]]"
            )
    if isinstance(ids, Tensor) and ids.ndim == 1:
        shape = ids.shape
        inputs = {
            key: value[None] if isinstance(value, Tensor) and value.shape == shape else value
            for key, value in inputs.items()
        }
    if is_sentence_transformer(model) and "input" not in inputs:
        return {"input": inputs}
    return inputs


def are_ready(listed: Sequence[Any]) -> bool:
    """Whether these are ready-made batches of model inputs, not texts."""
    return bool(listed) and all(isinstance(batch, Mapping) for batch in listed)


def take_ready(model: nn.Module, inputs: Any, number: int) -> dict[str, Any]:
    """Ready-made model inputs on the model's device, by the names that a model inside a wrapper of
    sentence-transformers has for them; raises as `ready_inputs` does.
    """
    given = ready_inputs(inputs, number, model)
    if is_sentence_transformer(model) and isinstance(given.get("input"), Mapping):
        given = dict(given["input"])
    device = device_of(model)
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in given.items()}


def _tensor(value: Any, name: str, device: torch.device) -> Any:
    """A list or array of numbers as a tensor; anything else as it is."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.as_tensor(value, device=device)
    if not isinstance(value, list) or not value:
        return value
    if all(isinstance(row, (list, np.ndarray)) for row in value):
        lengths = sorted({len(row) for row in value})
        if len(lengths) > 1:
            raise MultiheadError(
                f"{name} has sequences of {lengths[0]:,} to {lengths[-1]:,} numbers, which make no"
                f" tensor: give them padded, as {PADDED} does, a dict for each, or the texts"
                " themselves"
            )
    try:
        return torch.as_tensor(np.array(value), device=device)
    except (TypeError, ValueError):  # not numbers
        return value
