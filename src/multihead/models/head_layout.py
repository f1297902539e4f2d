"""`HeadLayout`: the heads that a pruned attention module still has, and which key/value head each
of its query heads reads.

It lies on the module as its attribute `multihead`, and in the config of a checkpoint under the same
name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from ..errors import MultiheadError
from ..outside import clean

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
    def from_json(cls, entry: Any) -> HeadLayout:
        """The layout that `to_json` gave.

        Raises:
            MultiheadError: an entry that no `to_json` gives.
        """
        if not isinstance(entry, Mapping):
            raise MultiheadError(f"it is {str(entry)[:80]!r}, expected named entries")
        values: dict[str, Any] = {
            JSON_NAMES.get(str(name), str(name)): tuple(value) if isinstance(value, list) else value
            for name, value in entry.items()
        }
        for field in fields(cls):
            shown = next((j for j, name in JSON_NAMES.items() if name == field.name), field.name)
            if field.name not in values and field.default is MISSING:
                raise MultiheadError(f"it has no {shown}")
            value = values.get(field.name, field.default)
            if not _is_valid(field.name, value):
                raise MultiheadError(f"{shown} is {clean(repr(value), 80)}")
        if unknown := sorted(map(str, values.keys() - {field.name for field in fields(cls)})):
            raise MultiheadError(f"it has an unknown entry {unknown[0]!r}")
        return cls(**values)

    def require_heads(self, num_heads: int, num_kv_heads: int) -> None:
        """Raise unless the heads are among so many, in lists that fit each other."""
        lengths = {len(self.heads), len(self.reads), len(self.original_heads)}
        within = (
            all(h < num_heads for h in self.heads)
            and all(g < num_kv_heads for g in self.kv_heads)
            and all(g < len(self.kv_heads) for g in self.reads)
        )
        if len(lengths) > 1 or not within:
            raise MultiheadError(
                f"its heads {list(self.heads)} that read {list(self.reads)} of the key/value heads"
                f" {list(self.kv_heads)} are not among {num_heads} heads and {num_kv_heads}"
                " key/value heads"
            )


def _is_valid(name: str, value: Any) -> bool:
    if name in ("heads", "kv_heads", "reads", "original_heads"):
        return isinstance(value, tuple) and all(type(n) is int and n >= 0 for n in value)
    if name == "config_num_heads":
        return type(value) is int and value > 0
    if name == "fused_layout":
        return value is None or isinstance(value, str)
    if name == "has_bias":
        return isinstance(value, bool)
    return value is None or (type(value) is int and 0 <= value < 100)  # num_returns
