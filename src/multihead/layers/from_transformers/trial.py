"""Inputs on which a module and a layer are compared, and how each is called with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...ops.masks import IntervalMask
from .positions import ROTARY_ARGUMENTS, rotary_tables
from .twin import definition_of, refuse, signature_of

MPT = "build_mpt_alibi_tensor"
BATCH, LENGTH, MEMORY_LENGTH = 2, 9, 7
MASKS = ("attention_mask", "mask", "attn_mask")
MEMORY = ("key_value_states", "encoder_hidden_states", "cross_attention_states", "kv", "memory")
SKIPPED = {
    **dict.fromkeys(("use_cache", "output_attentions", "output_hidden_states")),
    **dict.fromkeys(("cache", "layer_past", "past_key_value", "past_key_values", "past_key")),
    **dict.fromkeys(("head_mask", "layer_head_mask", "cache_position", "is_causal", "layer_idx")),
    "position_bias": None,  # that of another layer, which is the call's attn_bias
}


@dataclass
class Trial:
    """One input: hidden states `[B, L, D]`, another sequence `[B, S, D']` for cross attention, and
    positions `[B, L]`.
    """

    hidden: Tensor
    memory: Tensor | None
    ids: Tensor
    rule: IntervalMask | None
    tables: Any = None
    takes_none: bool = False  # whether the model passes no tables to a module that could use them

    def added(self) -> Tensor:
        """The mask as numbers that are added to the scores, `[B, 1, L, S]`."""
        length = self.hidden.shape[1]
        keys = length if self.memory is None else self.memory.shape[1]
        rule = IntervalMask() if self.rule is None else self.rule
        allowed = rule.dense(length, keys).expand(len(self.hidden), 1, length, keys)
        return torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)


def is_cross_attention(module: nn.Module) -> bool:
    """Whether the module's keys are always those of another sequence."""
    takes = signature_of(module)
    required = any(name in takes and takes[name].default is takes[name].empty for name in MEMORY)
    named = "Cross" in type(module).__name__ and any(name in takes for name in MEMORY)
    return required or named or bool(getattr(module, "is_cross_attention", False))


def trial_of(
    module: nn.Module,
    inner: nn.Module,
    width: int,
    memory_width: int,
    rule: IntervalMask | None,
    cross: bool,
) -> Trial:
    """An input for the module, whose attention is in `inner`, the same at every call."""
    generator = torch.Generator().manual_seed(2)
    hidden = torch.empty(BATCH, LENGTH, width).normal_(generator=generator)
    memory = torch.empty(BATCH, MEMORY_LENGTH, memory_width).normal_(generator=generator)
    ids = torch.arange(LENGTH).expand(BATCH, -1)
    takes = signature_of(module)
    tables = None
    if any(name in takes for name in ROTARY_ARGUMENTS):
        ids = ids + torch.tensor([[0] * 4 + [7] * (LENGTH - 4), [3] * LENGTH])
        tables = rotary_tables(inner, ids, hidden.dtype)
    elif "position_ids" in takes:
        ids = ids + torch.tensor([[0] * 4 + [7] * (LENGTH - 4), [3] * LENGTH])
    return Trial(hidden, memory if cross else None, ids, rule, tables)


def arguments_of(module: nn.Module, trial: Trial) -> dict[str, Any]:
    """The arguments of the module's forward for this input.

    Raises:
        MultiheadError: an argument that is required and unknown.
    """
    takes = signature_of(module)
    given: dict[str, Any] = {}
    for number, (name, parameter) in enumerate(takes.items()):
        is_optional = parameter.default is not parameter.empty
        if number == 0:
            given[name] = trial.hidden
        elif name in MASKS:
            given[name] = None if trial.memory is not None else trial.added()
            if definition_of(module, MPT) is not None:  # booleans, True where it's hidden
                given[name] = trial.added() < 0
        elif name == "encoder_attention_mask":
            given[name] = None
        elif name in MEMORY:
            if trial.memory is not None:
                given[name] = trial.memory
        elif name in ROTARY_ARGUMENTS:
            if trial.tables is not None or trial.takes_none:
                given[name] = trial.tables
            else:
                raise refuse(module, f"forward takes {name}=, which its file doesn't compute")
        elif name == "position_ids":
            given[name] = trial.ids
        elif name == "alibi":
            given[name] = _alibi(module, trial)
        elif name == "residual":
            given[name] = torch.zeros_like(trial.hidden)
        elif name == "position_bias" and (made := _mpt_bias(module, trial)) is not None:
            given[name] = made
        elif name not in SKIPPED:
            raise refuse(
                module, f"forward {'takes' if is_optional else 'needs'} the argument {name}="
            )
        elif not is_optional:
            given[name] = SKIPPED[name]
    return given


def _mpt_bias(module: nn.Module, trial: Trial) -> Tensor | None:
    build, heads = definition_of(module, MPT), getattr(module, "n_heads", None)
    if build is None or heads is None:
        return None
    made: Tensor = build(heads, trial.hidden.shape[1])
    return made


def _alibi(module: nn.Module, trial: Trial) -> Tensor | None:
    build = definition_of(module, "build_alibi_tensor")
    heads = getattr(module, "num_heads", None)
    is_off = getattr(getattr(module, "config", None), "alibi", True) is False
    if build is None or heads is None or is_off:
        return None
    made: Tensor = build(torch.ones(trial.hidden.shape[:2]), heads, torch.float32)
    return made


def distance(layer: Any, trial: Trial, ids: Tensor | None, want: Tensor) -> float:
    """The largest difference between the layer's outputs and those wanted, relative to the largest
    of these; infinite where they can't be compared.
    """
    given = {} if trial.memory is None else {"key": trial.memory}
    with torch.no_grad():
        try:
            got = layer.eval()(trial.hidden, position_ids=ids, **given)
        except (RuntimeError, ValueError):  # an encoding of another width
            return float("inf")
    if got.shape != want.shape:
        return float("inf")
    found = float((got - want).abs().max() / want.abs().max().clamp(min=1.0))
    return found if found == found else float("inf")
