"""The twin of a module: nothing of the module changes."""

from __future__ import annotations

import copy

import torch
from torch import nn

from multihead.layers.from_transformers.twin import twin_of


def test_a_twin_has_other_numbers_and_the_module_keeps_its_own() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(0.5)).to(torch.bfloat16)
    nn.init.zeros_(module[0].weight)
    module[0].register_forward_hook(lambda *_: torch.zeros(1))
    before = copy.deepcopy(module.state_dict())
    state = torch.get_rng_state()
    twin = twin_of(module)
    assert torch.equal(torch.get_rng_state(), state)
    x = torch.randn(3, 4)
    assert not twin.training and module.training and twin(x).shape == (3, 4)
    assert all(torch.equal(before[name], x) for name, x in module.state_dict().items())
    for ours, theirs in zip(twin.parameters(), module.parameters()):
        assert ours.dtype == torch.float32 and not torch.equal(ours, theirs.float())
        assert float(ours.std()) > 0.02
