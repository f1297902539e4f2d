"""Which arguments of which modules are token ids."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from multihead.models.site import find_sites
from multihead.reader.stacks import find_stacks, ids_among, is_not_text, placeholders_of
from small import IDS, llama


class Plain(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return self.inner(x)


def test_wrappers_are_stacks_too() -> None:
    model = Plain(Plain(llama()))
    stacks = find_stacks(model, find_sites(model))
    assert {"", "inner", "inner.inner", "inner.inner.model"} <= set(stacks)


@pytest.mark.parametrize("name", ["input_ids", "token_ids", "idx"])
def test_ids_by_their_names(name: str) -> None:
    assert ids_among({name: IDS}, outermost=False, across=False) is IDS
    assert ids_among({name: IDS.float()}, outermost=False, across=False) is None or (
        name == "input_ids"
    )


def test_plain_names_are_ids_in_the_outermost_module_alone() -> None:
    assert ids_among({"x": IDS}, outermost=True, across=False) is IDS
    assert ids_among({"x": IDS}, outermost=False, across=False) is None


def test_two_sequences_are_ambiguous_across() -> None:
    assert ids_among({"x": IDS, "y": IDS}, outermost=True, across=True) is None


def test_pictures_are_no_text() -> None:
    picture = torch.zeros(1, 3, 4, 4)
    assert is_not_text({"pixel_values": picture}, outermost=False)
    assert is_not_text({"x": picture}, outermost=True)
    assert not is_not_text({"x": picture}, outermost=False)


def test_placeholders_of_the_model_inside() -> None:
    model = llama()
    model.config.image_token_id = 9
    assert placeholders_of(Plain(model)) == placeholders_of(model) == [9]
