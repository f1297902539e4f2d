"""`AttentionCall`: lowering masks and biases, limits, and slices that commute with attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multihead.masks import causal, documents, padding, window
from multihead.ops import AlibiBias, AttentionCall
from multihead.ops.backends.custom_op import attend
from multihead.ops.backends.reference import ReferenceBackend
from multihead.ops.call import AXES, slice_axes

B, H, G, L, S = 3, 6, 2, 7, 9
MASKS: dict[str, Any] = {
    "none": None,
    "causal": causal(2),
    "window": causal(2) & window(left=3, offset=2),
    "padding": padding(torch.tensor([9, 4, 0])) & causal(2),
    "dense": torch.rand(B, 1, L, S, generator=torch.Generator().manual_seed(0)) > 0.4,
    "by head": torch.rand(H, L, 1, generator=torch.Generator().manual_seed(1)) > 0.4,
}
BIASES: dict[str, Any] = {
    "none": None,
    "dense": torch.randn(1, H, L, S, generator=torch.Generator().manual_seed(2)).double(),
    "keys": torch.randn(S, generator=torch.Generator().manual_seed(3)).double(),
    "alibi": AlibiBias(torch.rand(H).double(), torch.arange(2, 9), torch.arange(S).expand(B, S)),
}


def lowered(mask: str = "none", bias: str = "none", **options: Any) -> AttentionCall:
    g = torch.Generator().manual_seed(4)
    shapes = (B, H, L, 4), (B, G, S, 4), (B, G, S, 5)
    q, k, v = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in shapes)
    return AttentionCall.lower(q, k, v, MASKS[mask], bias=BIASES[bias], **options)


def output(call: AttentionCall) -> Tensor:
    return ReferenceBackend().forward(call).out


@pytest.mark.parametrize("mask", MASKS)
def test_limits_are_those_of_the_mask(mask: str) -> None:
    want, call = MASKS[mask], lowered(mask)
    if want is None:
        assert call.allowed() is None and call.bounds() is None and call.is_unmasked()
        return
    dense = want if isinstance(want, Tensor) else want.dense(L, S)
    allowed = call.allowed()
    assert allowed is not None and not call.is_unmasked()
    torch.testing.assert_close(allowed.expand(B, H, L, S), dense.expand(B, H, L, S))
    bounds = call.bounds(torch.int32)
    assert (bounds is None) == isinstance(want, Tensor)
    assert bounds is None or bounds[0].dtype == torch.int32


def test_limits_that_exclude_nothing_are_none() -> None:
    x = torch.randn(1, 2, 5, 4)
    for mask in (causal(4), window(left=4), window(), causal(100) & window(left=9)):
        assert AttentionCall.lower(x, x, x, mask).is_unmasked(), mask
    for mask in (causal(), causal() & window(left=4)):
        assert AttentionCall.lower(x, x, x, mask).is_causal(), mask
    for mask in (causal(1), window(right=1), causal() & window(left=3), documents(torch.arange(5))):
        call = AttentionCall.lower(x, x, x, mask)
        assert not call.is_causal() and not call.is_unmasked(), mask


def test_limits_of_a_band_can_be_saved_for_a_backward_pass_later() -> None:
    """They are kept for later calls, and may have been computed in inference mode."""
    x = torch.randn(1, 2, 83, 4)
    with torch.inference_mode():
        bounds = AttentionCall.lower(x, x, x, causal(1)).bounds()
    assert bounds is not None and not bounds[0].is_inference()


@settings(max_examples=60, deadline=None)
@given(
    mask=st.sampled_from(list(MASKS)),
    bias=st.sampled_from(list(BIASES)),
    sinks=st.booleans(),
    data=st.data(),
)
def test_a_slice_of_the_call_gives_that_slice_of_the_output(
    mask: str, bias: str, sinks: bool, data: Any
) -> None:
    call = lowered(mask, bias, sinks=torch.linspace(-1, 1, H).double() if sinks else None)

    def part(n: int) -> slice | Tensor | None:
        first = data.draw(st.integers(0, n - 1))
        whole = slice(first, data.draw(st.integers(first + 1, n)))
        some = torch.tensor(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=4)))
        return data.draw(st.sampled_from([None, whole, some]))

    index = {"batch": part(B), "head": part(H), "query": part(L)}
    want = output(call)
    for n, wanted in enumerate(index.values()):
        if wanted is not None:
            want = want[(slice(None),) * n + (wanted,)]
    torch.testing.assert_close(output(call.slice(**index)), want)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("bias", BIASES)
def test_a_slice_of_the_keys_is_the_call_without_the_others(mask: str, bias: str) -> None:
    call, keys = lowered(mask, bias), slice(2, 6)
    inside = (torch.arange(S) >= 2) & (torch.arange(S) < 6)
    allowed = call.allowed()
    allowed = inside[None, None, None] if allowed is None else allowed & inside
    without = call._replace(start=None, stop=None, low=None, high=None, mask=allowed)
    torch.testing.assert_close(output(call.slice(key=keys)), output(without))


def test_the_schema_of_the_operator_is_the_list_of_fields() -> None:
    names = [argument.name for argument in attend._opoverload._schema.arguments]
    *fields, context = AttentionCall._fields
    assert names == [*fields, "seed", "kernels", "with_lse", "with_weights"]
    assert context == "context" and len(AXES) == len(AttentionCall._fields)
    assert slice_axes(torch.zeros(2, 1), "B L", {"L": slice(3, 4)}).shape == (2, 1)


def test_a_mask_of_another_batch_is_an_error() -> None:
    x = torch.randn(2, 2, 5, 4)
    with pytest.raises(ValueError, match="mask is for a batch of 3, but q"):
        AttentionCall.lower(x, x, x, padding(torch.tensor([1, 2, 3])))
