"""A calibration text as batches, each with the loss of the model on it: what importance is measured by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..models.sites import Site

__all__ = ["Batch"]

Loss = Callable[[Any], tuple[Tensor, int]]  # of the model's output: the sum, and over how many tokens


@dataclass(frozen=True)
class Batch:
    """Model inputs and the loss on them."""

    inputs: dict[str, Any]
    of_output: Loss

    def loss(self, model: nn.Module) -> tuple[Tensor, int]:
        """The sum over tokens, in nats, and their number."""
        return self.of_output(model(**self.inputs))

    def real(self, site: Site, x: Tensor) -> Tensor:
        """The rows `[n, ...]` of `[B, L, ...]` that are text."""
        decodes = "decoder_attention_mask" in self.inputs and "decoder" in site.name.split(".")
        mask = self.inputs.get("decoder_attention_mask" if decodes else "attention_mask")
        if isinstance(mask, Tensor) and mask.shape == x.shape[:2]:
            return x[mask.bool()]
        return x.reshape(-1, x.shape[-1])
