"""Blocks of scores and weights, whatever their size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from multihead import attention
from multihead.masks import causal, padding, window
from multihead.ops import AttentionCall
from multihead.ops.backends.blocks import mix_values, score_blocks, weight_blocks

MASKS = {
    "none": None,
    "window": causal() & window(left=20),
    "padding": padding(torch.tensor([70, 31])) & causal(),
    "dense": torch.rand(2, 1, 70, 70, generator=torch.Generator().manual_seed(0)) > 0.5,
}


def call_of(mask: Any, **options: Any) -> AttentionCall:
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, n, 70, 8, generator=g).double() for n in (4, 2, 2))
    return AttentionCall.lower(q, k, v, mask, **options)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("step", [1, 7, 32, 100])
def test_scores_of_any_number_of_queries_a_block(mask: Any, step: int) -> None:
    call = call_of(mask, softcap=2.0)
    allowed = call.allowed()
    allowed = torch.ones(1, 1, 70, 70, dtype=torch.bool) if allowed is None else allowed
    want = call.scale * (call.q @ call.k.repeat_interleave(2, 1).mT)
    cap = torch.tanh(want / 2)
    rows = 0
    for block in score_blocks(call, step=step, softcap_slope=True):
        part = allowed[:, :, block.rows, block.keys].expand_as(block.s)
        here = (slice(None), slice(None), block.rows, block.keys)
        torch.testing.assert_close(block.s[part], 2 * cap[here][part])
        assert block.slope is not None and (block.s[~part] < -1e300).all()
        torch.testing.assert_close(block.slope[part], (1 - cap**2)[here][part])
        outside = allowed[:, :, block.rows].clone()
        outside[..., block.keys] = False
        assert block.rows.start == rows and not outside.any()
        rows = block.rows.stop
    assert rows == 70


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("passing", [False, True])
def test_weights_and_their_mix_of_values(mask: Any, passing: bool) -> None:
    call = call_of(mask, sinks=torch.linspace(-1, 1, 4).double())
    options = dict(sinks=call.sinks, return_lse=True, return_weights=True, backend="reference")
    out, lse, weights = attention(*call[:3], mask, **options)  # type: ignore[call-overload]
    for block in weight_blocks(call, passing=passing):
        got = block.powers / block.total[..., None]
        torch.testing.assert_close(got, weights[:, :, block.rows, block.keys])
        torch.testing.assert_close(mix_values(block, call.v), out[:, :, block.rows])
        some = block.total.isfinite()
        got = (block.top + block.total.log())[some]
        torch.testing.assert_close(got, lse[:, :, block.rows][some])
