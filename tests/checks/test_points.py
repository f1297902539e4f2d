"""What modules return and take is seen, and changed, in each layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from multihead.checks.factors import CannotRead
from multihead.checks.points import find_rows, outputs_of_modules, watch_points


@pytest.mark.parametrize("layout", ["[1, L, W]", "[1, W, L]", "[1, H, L, E]", "[1, L, H, E]"])
def test_values_are_changed_in_each_layout(layout: str) -> None:
    t = torch.arange(30.0).view(1, 5, 6)
    ways = {
        "[1, L, W]": t,
        "[1, W, L]": t.mT,
        "[1, H, L, E]": t.unflatten(-1, (2, 3)).transpose(1, 2),
        "[1, L, H, E]": t.unflatten(-1, (2, 3)),
    }
    module, change = nn.Sequential(nn.Identity(), nn.Identity()), torch.randn(5, 6)
    points: dict[str, Tensor] = {}
    with watch_points(module, ("0", "1"), (5, 5), points, change):
        out = module(ways[layout])
    assert points["v"].equal(t[0].double())
    torch.testing.assert_close(points["z"], (t[0] + change).double())
    assert out.shape == ways[layout].shape
    assert module(ways[layout]).equal(ways[layout])  # the hooks are gone


def test_other_shapes_are_refused() -> None:
    for shape in ((2, 5, 6), (5, 6), (1, 4, 6)):
        with pytest.raises(CannotRead, match="one sequence of 5 tokens"):
            find_rows(torch.zeros(shape), 5)


def test_outputs_of_modules_and_parameters() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    seen, handles = outputs_of_modules(module)
    out = module(torch.randn(1, 4, 3))
    for handle in handles:
        handle.remove()
    assert set(seen) == {"0", "1", "0.bias"} and seen["0.bias"].shape == (1, 2)
    torch.testing.assert_close(seen["1"], out[0].detach().double())
