"""`HeadLayout`: the heads that a pruned attention module still has, and which key/value head each
of its query heads reads.

It lies on the module as its attribute `multihead`, and in the config of a checkpoint under the same
name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["HeadLayout"]

# The names in a checkpoint's config.json that differ from the attributes: version 1 of the format.
JSON_NAMES = {
    "kv": "kv_heads",
    "numbers": "original_heads",
    "of": "config_num_heads",
    "layout": "fused_layout",
    "bias": "has_bias",
    "returns": "num_returns",
}


@dataclass(frozen=True)
class HeadLayout:
    """The heads of one attention module: query head i reads key/value head `reads[i]`.

    Attributes:
        heads: for each query head, its number in the model that the config describes.
        kv_heads: the same for each key/value head.
        reads: for each query head, the position in `kv_heads` of the head it reads.
        original_heads: for each query head, its number in the model before any pruning, by which
            labels such as "L12.H3" name it.
        config_num_heads: query heads of the module that the config describes.
        fused_layout: how a fused projection is laid out, one of `models.slices.LAYOUTS`.
        has_bias: the output projection has a bias that its family doesn't have.
        num_returns: values that the module's forward returns, if no head is left (0: a tensor).
    """

    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    reads: tuple[int, ...]
    original_heads: tuple[int, ...]
    config_num_heads: int
    fused_layout: str | None = None
    has_bias: bool = False
    num_returns: int | None = None

    @property
    def is_even(self) -> bool:
        """Whether each key/value head is read by the same number of consecutive query heads, which
        is what every implementation of attention computes.
        """
        size, rest = divmod(len(self.heads), max(1, len(self.kv_heads)))
        return not rest and self.reads == tuple(i // max(1, size) for i in range(len(self.heads)))

    def to_json(self) -> dict[str, Any]:
        """The entry of this module in a checkpoint's config.json."""
        json_names = {name: json_name for json_name, name in JSON_NAMES.items()}
        return {
            json_names.get(name, name): list(value) if isinstance(value, tuple) else value
            for name, value in vars(self).items()
            if value is not None
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> HeadLayout:
        """The layout that `to_json` gave."""
        values: dict[str, Any] = {
            JSON_NAMES.get(name, name): tuple(value) if isinstance(value, list) else value
            for name, value in entry.items()
        }
        return cls(**values)
