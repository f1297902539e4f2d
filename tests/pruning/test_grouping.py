"""Which heads share: similar ones find each other."""

from __future__ import annotations

import pytest
import torch

from multihead.models.site import find_sites
from multihead.pruning.grouping import _best_partition, _grown_partition
from pruning.small_models import copies, make, one


def test_neighbours_stand_together_and_similar_heads_find_each_other() -> None:
    model = make("llama")
    site = find_sites(model)[0]
    copies(site, [0, 0, 2, 0], True)
    assert one(site, model, choice="neighbours").groups == ((0, 1), (2, 3))
    model = make("llama")
    site = find_sites(model)[0]
    copies(site, [0, 1, 1, 0], True)
    assert one(site, model).groups == ((0, 3), (1, 2))


@pytest.mark.parametrize("size", [2, 3])
def test_heads_that_are_many_are_grouped_as_well_as_by_trying_all(size: int) -> None:
    label = torch.arange(12) % (12 // size)
    noise = torch.rand(12, 12, generator=torch.Generator().manual_seed(2)) * 0.3
    apart = (label[:, None] != label).double() + noise + noise.T
    apart.fill_diagonal_(0)
    wanted = tuple(tuple((label == i).nonzero().flatten().tolist()) for i in range(12 // size))
    assert _best_partition(apart, size) == wanted
    assert _grown_partition(apart, size) == wanted
