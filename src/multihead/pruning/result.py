"""`SmallerModel`: what `prune` and `share` return in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ..version import __version__
from .checkpoint import Written, save

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
        written: the checkpoint that `save` wrote last: its size on disk before and after, the types
            of its weights, and what was left out. None before.
        why_not_plain: the number or setting of the config in the way of plain transformers, else
            "".
        proof: model inputs on which the checkpoint is compared with the model in memory; by default
            a line of text.
    """

    model: nn.Module
    tokenizer: Any
    loads_in_transformers: bool
    num_parameters: tuple[int, int]
    written: Written | None = field(default=None, init=False)
    why_not_plain: str = field(default="", kw_only=True)
    proof: Mapping[str, Any] | None = field(default=None, repr=False, kw_only=True)

    def save(self, out: str | Path, report: Mapping[str, Any] | None = None) -> Written:
        """Write model, tokenizer and a JSON report to a new folder, whole or not at all, and load
        it again in a fresh process.

        A model that was loaded from a folder, or from the hub, is stored as it was there: in the
        same types, in as many files, with the other files of the folder.

        Args:
            out: the folder; it must not exist, or be empty.
            report: what the JSON file holds; `to_json()` by default.

        Raises:
            MultiheadError: something is there already, or the loaded copy differs.
            OSError: it can't be written (a full disk); no file is left then.
        """
        self.written = save(
            self.model,
            self.tokenizer,
            out,
            batch=self.proof,
            plain=self.loads_in_transformers,
            extra=self._files(dict(report or self.to_json())),
            summary=f"{self.summary} (multihead {__version__})",
        )
        return self.written

    def to_json(self) -> dict[str, Any]:
        """A summary without the weights."""
        return {
            "loads in plain transformers": self.loads_in_transformers,
            **({"why not": self.why_not_plain} if self.why_not_plain else {}),
            "parameters": list(self.num_parameters),
            **({} if self.written is None else self.written.to_json()),
        }

    @property
    def summary(self) -> str:
        """A sentence on what became of the heads."""
        raise NotImplementedError

    def _files(self, report: dict[str, Any]) -> dict[str, Any]:
        """JSON files to write next to the weights, by name."""
        raise NotImplementedError


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
