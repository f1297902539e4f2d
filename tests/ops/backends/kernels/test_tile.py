"""Dense masks and biases, read a square at a time where their rows are contiguous."""

from __future__ import annotations

import pytest
import torch

from multihead import attention
from multihead.ops.backends import jit

pytestmark = pytest.mark.skipif(
    jit.MISSING is not None, reason="without Numba there are no kernels"
)


@pytest.mark.parametrize("keys", [64, 128, 130, 192])
@pytest.mark.parametrize("heads", [1, 4])
def test_dense_masks_and_biases_of_whole_tiles(keys: int, heads: int) -> None:
    """Read a square at a time where rows lie as they should, one by one where they don't."""
    g = torch.Generator().manual_seed(keys)
    q, k, v = (torch.randn(2, n, m, 16, generator=g) for n, m in ((4, 96), (2, keys), (2, keys)))
    may = torch.rand(2, heads, 96, keys, generator=g) > 0.5
    add = torch.randn(2, heads, 96, keys, generator=g)
    turned = may.transpose(2, 3).contiguous().transpose(2, 3)
    for mask, bias in (
        (may, None),
        (turned, None),
        (may[:1, :, :1], None),
        (None, add),
        (None, add.mT.contiguous().mT),
        (None, add[:, :, :1]),
        (may, add),
        (may[..., :1], add[:1]),
    ):
        want = attention(q, k, v, mask, bias=bias, backend="reference")
        torch.testing.assert_close(
            attention(q, k, v, mask, bias=bias, backend="cpu"), want, rtol=1e-5, atol=1e-5
        )
