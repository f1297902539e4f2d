"""bfloat16 by the processor's dot product of pairs, where it has one."""

from __future__ import annotations

import pytest
import torch

from multihead import attention
from multihead.masks import causal
from multihead.ops.backends import jit

pytestmark = pytest.mark.skipif(
    jit.MISSING is not None, reason="without Numba there are no kernels"
)


@pytest.mark.parametrize("keys", [64, 65, 131])
@pytest.mark.parametrize("strided", [False, True])
def test_odd_numbers_of_keys_and_strides(keys: int, strided: bool) -> None:
    """Values are paired along the keys, keys along the width."""
    from multihead.ops.backends.kernels.bf16 import THERE

    g = torch.Generator().manual_seed(keys)
    q, k, v = (
        torch.randn(1, n, length, 16, generator=g).bfloat16()
        for n, length in ((4, 40), (2, keys), (2, keys))
    )
    if strided:
        q, k, v = (x.mT.contiguous().mT for x in (q, k, v))
    mask, sinks = causal(keys - 40), torch.randn(4, generator=g).bfloat16()
    got = attention(q, k, v, mask, sinks=sinks, backend="cpu")
    want = attention(q, k, v, mask, sinks=sinks, backend="reference")
    torch.testing.assert_close(
        got, want, rtol=2e-2, atol=2e-2, msg=lambda m: f"pairs: {THERE}; {m}"
    )
