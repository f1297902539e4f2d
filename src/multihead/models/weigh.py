"""Weigh what a config asks for against what its weight files hold, before it is built.

A config is a few numbers, and each can be a million times too large: then building the model, or
filling it, takes all memory or never ends. Counts are compared before transformers sees the config,
the model's size when its parameters have shapes and no memory yet.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import MultiheadError
from .guard import blame_checkpoint

if TYPE_CHECKING:
    from torch import nn

__all__ = ["WeightFiles", "build_on_meta", "weigh_counts", "weigh_model"]

# Names of the counts that a config builds modules or lists for, and the count that any config may
# have: more needs as many tensors in the weight files.
LAYERS = re.compile(r"(^|_)n?_?(layers?|blocks?|block_count|depths?|stages?|repeats?|towers?)(_|$)")
PARTS = re.compile(r"(^|_)n?_?(experts?|groups?|heads?|codebooks?|quantizers?|branch(es)?)(_|$)")
LABELS = re.compile(r"(^|_)n?_?(labels|classes|languages)(_|$)")
NOT_COUNTS = re.compile(
    r"(^|_)(id|ids|idx|index|indices|dim|dims|size|scale|eps|rate|dropout|prob|theta|vocab|width"
    r"|channels)(_|$)"
)
MOST_LAYERS, MOST_PARTS, MOST_LABELS = 1024, 1 << 16, 1 << 20
MOST_SUM = 16  # times as many in lists of layers together, such as the depths of stages
MOST_MODULES = 1 << 20  # layers times experts or heads
# Elements that any config may have: they take 64 MB to fill
FREE = 1 << 24
MOST_BUFFERS = 1 << 28  # elements of masks and tables, which weight files don't hold


@dataclass(frozen=True)
class WeightFiles:
    """The tensors and bytes of the weight files of a checkpoint."""

    tensors: int
    size: int


def weigh_counts(name: str, where: object, config: Any, weights: WeightFiles | None) -> None:
    """Raise where a config counts more layers, experts, heads or labels than could be in its weight
    files; without weight files, than any model has.

    Args:
        name: the model's, for messages.
        where: the file that holds the config, for messages.
        config: named values, possibly nested.
        weights: what the weight files hold.
    """
    tensors = 0 if weights is None else weights.tensors
    layers, parts = max(MOST_LAYERS, tensors), max(MOST_PARTS, tensors)
    most_layers = most_parts = 1
    total = 0
    for key, value in _numbers(config):
        if NOT_COUNTS.search(key):
            continue
        is_layers, is_parts = bool(LAYERS.search(key)), bool(PARTS.search(key))
        if is_layers or is_parts or LABELS.search(key):
            most = layers if is_layers else parts if is_parts else MOST_LABELS
            if not value <= most:
                raise _too_many(name, where, f"{key} is {_show(value)}", most, weights)
        if is_layers:
            most_layers, total = max(most_layers, int(value)), total + max(0, int(value))
        elif is_parts:
            most_parts = max(most_parts, int(value))
    if total > layers * MOST_SUM:
        what = f"its numbers of layers add up to {total:,}"
        raise _too_many(name, where, what, layers * MOST_SUM, weights)
    if most_layers * most_parts > max(MOST_MODULES, tensors):
        what = f"{most_layers:,} layers of {most_parts:,} heads or experts"
        raise _too_many(name, where, f"{what} each", max(MOST_MODULES, tensors), weights)


def weigh_model(name: str, model: nn.Module, weights: WeightFiles) -> None:
    """Raise where a model on the meta device has more parameters than its weight files have bits,
    or tables that fill the memory.
    """
    asked = sum(p.numel() for p in model.parameters())
    if asked > weights.size * 8 + FREE:
        raise MultiheadError(
            f"model={name!r}: its config asks for {asked:,} parameters, and its weight files have"
            f" {weights.size:,} bytes in {weights.tensors:,} tensors. Take config and weights from"
            " the same checkpoint."
        )
    tables = sum(b.numel() for b in model.buffers())
    if tables > MOST_BUFFERS + weights.size:
        raise MultiheadError(
            f"model={name!r}: its config asks for tables and masks of {tables:,} elements, expected"
            f" at most {MOST_BUFFERS + weights.size:,}; correct its numbers of positions"
        )


def build_on_meta(kind: Any, config: Any, what: str, advice: str = "", **options: Any) -> nn.Module:
    """The model of a config on the meta device, where parameters have shapes and no memory; options
    are those of transformers' `from_config`.

    Raises:
        MultiheadError: the config can't be built; `what` begins its message, `advice` ends it.
    """
    import torch

    with torch.device("meta"), blame_checkpoint(what, advice):
        build = kind.from_config if hasattr(kind, "from_config") else kind._from_config
        model: nn.Module = build(config, **options)
    return model


def _numbers(config: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """All numbers of a config with the name under which each is, however deep."""
    waiting = [(key, config)]
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += [(str(k).replace(".", "_"), v) for k, v in value.items()]
        elif isinstance(value, (list, tuple)):
            waiting += [(key, v) for v in value]
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield key, value


def _show(value: float) -> str:
    return f"{value:,}" if abs(value) < 1e18 else f"a number of {len(str(value))} digits"


def _too_many(
    name: str, where: object, what: str, most: int, weights: WeightFiles | None
) -> MultiheadError:
    found = "" if weights is None else f" (its weight files have {weights.tensors:,} tensors)"
    return MultiheadError(
        f"model={name!r}: {where}: {what}, expected at most {most:,}{found}; correct the config, or"
        " take it from the same checkpoint as the weights"
    )
