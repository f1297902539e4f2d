"""Names in code: of functions that are called, of modules' attributes; switched off ones don't count."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from multihead.checks.code_names import find_names, names_batch_first, names_in_code

TABLE = torch.zeros(3)


def add_table(x: Tensor) -> Tensor:
    return x + TABLE


def apply_rotation(x: Tensor) -> Tensor:
    return x


def attend(x: Tensor) -> Tensor:
    return apply_rotation(x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rel_table = nn.Parameter(torch.zeros(1))
        self.rotary = None
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        if self.rotary is not None:
            x = self.rotary(x)
        return self.helper(x)

    def helper(self, x: Tensor) -> Tensor:
        return x + self.rel_table


def test_functions_that_are_called_are_followed() -> None:
    assert {"apply_rotation", "x"} <= names_in_code(attend)
    assert {"rel_table", "helper", "norm", "LayerNorm"} <= names_in_code(Layer())


def test_global_tensors_are_names_like_others() -> None:
    assert "TABLE" in names_in_code(add_table)


def test_attributes_that_are_off_are_left_out() -> None:
    assert find_names(Layer(), "rot|rel_") == ["rel_table"]
    assert find_names(attend, "rotation") == ["apply_rotation"]


def test_the_axis_that_code_names_first() -> None:
    class Batch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            B, _, _ = x.shape
            return x.view(B, -1)

    class Time(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            tgt_len, bsz, _ = x.size()
            return x.view(tgt_len, bsz, -1)

    assert names_batch_first(Batch()) and not names_batch_first(Time())
    assert not names_batch_first(Layer())  # it doesn't unpack a shape
