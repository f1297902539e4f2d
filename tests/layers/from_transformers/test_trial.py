"""Arguments of a trial are found by their names in forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from multihead.layers.from_transformers.trial import arguments_of, is_cross_attention, trial_of
from multihead.masks import causal


class Self(nn.Module):
    def forward(self, x: Any, attention_mask: Any = None, cache: Any = None) -> Any:
        return x


class Cross(nn.Module):
    def forward(self, x: Any, encoder_hidden_states: Any) -> Any:
        return x


class Odd(nn.Module):
    def forward(self, x: Any, moon: Any) -> Any:
        return x


def test_arguments_by_name() -> None:
    trial = trial_of(Self(), Self(), 8, 8, causal(), False)
    given = arguments_of(Self(), trial)
    assert list(given) == ["x", "attention_mask"]
    assert torch.equal(given["attention_mask"][0, 0] == 0, torch.ones(9, 9).tril().bool())
    trial = trial_of(Cross(), Cross(), 8, 6, None, True)
    assert arguments_of(Cross(), trial)["encoder_hidden_states"].shape == (2, 7, 6)
    assert is_cross_attention(Cross()) and not is_cross_attention(Self())
    with pytest.raises(ValueError, match="Odd: forward needs the argument moon="):
        arguments_of(Odd(), trial)
