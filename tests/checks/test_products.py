"""Products with a matrix are seen, and changed, however they are written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from multihead.checks.products import Numbers, Products

WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda x, w: x @ w,
    "linear": lambda x, w: F.linear(x, w.T.contiguous(), torch.ones(6).double()) - 1,
    "einsum": lambda x, w: torch.einsum("bld,de->ble", x, w),
    "from the left": lambda x, w: (w.mT @ x.mT).mT,
    "convolution": lambda x, w: F.conv1d(x.mT, w.mT[..., None]).mT,
    "batched": lambda x, w: torch.bmm(x, w[None]),
    "columns apart": lambda x, w: torch.cat([x @ w[:, 4:], x @ w[:, :4]], -1).roll(-2, -1),
    "rows apart": lambda x, w: x[..., :2] @ w[:2] + x[..., 2:] @ w[2:],
    "heads apart": lambda x, w: (
        (x[:, None] @ w.unflatten(1, (3, 2)).transpose(0, 1)).transpose(1, 2).flatten(2)
    ),
    "beside another": lambda x, w: (x @ torch.cat([torch.zeros(4, 2), w], 1))[..., 2:],
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_multiply(way: str) -> None:
    x, w = torch.randn(1, 5, 4).double(), torch.randn(4, 6).double()
    change = torch.randn(5, 6).double()
    products = Products({"w": Numbers(w)})
    with products:
        plain = WAYS[way](x, w)
    torch.testing.assert_close(plain, x @ w)
    torch.testing.assert_close(products.seen["w"], x[0])
    for plan in (None, products.plan):
        with Products({"w": Numbers(w)}, {"w": change}, plan):
            changed = WAYS[way](x, w)
        torch.testing.assert_close(changed, x @ w + change)


def test_rows_of_several_calls_follow_each_other() -> None:
    x, w = torch.randn(6, 4), torch.randn(4, 2)
    with Products({"w": Numbers(w)}, {"w": torch.eye(6)[:, 3:5]}) as products:
        parts = [part @ w for part in x.split([1, 3, 2])]
    torch.testing.assert_close(torch.cat(parts), x @ w + torch.eye(6)[:, 3:5])
    assert products.seen["w"].equal(x.double())


def test_other_products_are_left_alone() -> None:
    x, w = torch.randn(5, 4), torch.randn(4, 4)
    with Products({"w": Numbers(w)}, {"w": torch.ones(5, 4)}) as products:
        for y, expected in ((x @ w.T, x @ w.T), (x @ torch.ones(4, 4), x.sum(-1, keepdim=True))):
            torch.testing.assert_close(y, expected.expand(5, 4))
    assert not products.seen
