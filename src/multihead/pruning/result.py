"""`SmallerModel`: what `prune` and `share` return in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from .checkpoint import save

__all__ = ["SmallerModel", "count_parameters"]


@dataclass
class SmallerModel:
    """A smaller copy of a model.

    Attributes:
        model: the copy, an ordinary transformers model.
        tokenizer: the one that was given.
        loads_in_transformers: whether plain transformers can load its checkpoint; else only
            `multihead.load` can.
        num_parameters: before and after.
    """

    model: nn.Module
    tokenizer: Any
    loads_in_transformers: bool
    num_parameters: tuple[int, int]

    def save(self, out: str | Path, report: Mapping[str, Any] | None = None) -> None:
        """Write model, tokenizer and a JSON report to a new folder, whole or not at all, and load
        it again in a fresh process.

        Args:
            out: the folder; it must not exist, or be empty.
            report: what the JSON file holds; `to_json()` by default.

        Raises:
            MultiheadError: something is there already, or the loaded copy differs.
            OSError: it can't be written (a full disk); no file is left then.
        """
        save(
            self.model,
            self.tokenizer,
            out,
            plain=self.loads_in_transformers,
            extra=self._files(dict(report or self.to_json())),
        )

    def to_json(self) -> dict[str, Any]:
        """A summary without the weights."""
        return {
            "loads in plain transformers": self.loads_in_transformers,
            "parameters": list(self.num_parameters),
        }

    def _files(self, report: dict[str, Any]) -> dict[str, Any]:
        """JSON files to write next to the weights, by name."""
        raise NotImplementedError


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
