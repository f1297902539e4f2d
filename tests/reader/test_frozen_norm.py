"""A LayerNorm or RMSNorm as a linear map with its scale frozen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from multihead.reader.frozen_norm import FrozenNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [24, 512])
@pytest.mark.parametrize("kind", ["layer", "rms", "plain"])
def test_a_norm_is_known_for_what_it_is(kind: str, width: int, dtype: torch.dtype) -> None:
    """Half the digits are no reason to take a LayerNorm for one that leaves the mean in."""
    module = (
        nn.RMSNorm(width)
        if kind == "rms"
        else nn.LayerNorm(width, elementwise_affine=kind == "layer")
    )
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        parameter.data.add_(0.3 * torch.randn(width, generator=generator))
    module = module.to(dtype)
    norm = FrozenNorm(module, width, torch.empty(0, dtype=dtype))
    assert norm.is_linear
    assert norm.centred == (kind != "rms")
    x = torch.randn(1, 7, width, generator=generator).to(dtype) * 5 + 1
    scale = norm.scale(x, module(x).detach())
    assert scale is not None
    inner = x.double() - (x.double().mean(-1, keepdim=True) if norm.centred else 0)
    assert torch.allclose(
        scale.double() * inner.square().mean(-1).sqrt(),
        torch.ones(1, 7, dtype=torch.float64),
        rtol=1e-4 if dtype == torch.float32 else 2e-2,
    )
    assert norm.scale(x, module(x).detach() ** 2) is None


def test_a_module_that_is_no_norm_is_not_linear() -> None:
    like = torch.zeros(8)
    assert not FrozenNorm(nn.Sequential(nn.Linear(8, 8), nn.GELU()), 8, like).is_linear
    assert not FrozenNorm(nn.MultiheadAttention(8, 2), 8, like).is_linear  # takes more arguments


def test_directions_are_pulled_back() -> None:
    """<scale * norm(x), w> equals <x, pulled-back w> times the scale, but for the shift."""
    torch.manual_seed(0)
    module = nn.LayerNorm(8, bias=False)
    module.weight.data.normal_()
    norm = FrozenNorm(module, 8, module.weight)
    x, w = torch.randn(1, 5, 8), torch.randn(3, 8)
    y = module(x).detach()
    scale = norm.scale(x, y)
    assert scale is not None
    torch.testing.assert_close(y @ w.T, scale[..., None] * (x @ norm.pull_back(w).T))
