"""FlexAttention: the mask and score functions that it gets are the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from multihead import attention
from multihead.layers import ALiBi
from multihead.masks import causal, documents, padding, prefix, window
from multihead.ops import AlibiBias as AlibiBias
from multihead.ops import AttentionCall
from multihead.ops.backends import flex

IDS = torch.tensor([[0, 0, 1, 1, 1], [5, 5, 5, 5, 2]])
MASKS: dict[str, Any] = {
    "none": None,
    "causal": causal(),
    "window": causal() & window(left=1),
    "lengths": padding(torch.tensor([0, 3])) & causal(),
    "documents": documents(IDS) & causal(),
    "prefix": prefix(torch.tensor([1, 3])),
    "dense": torch.rand(2, 4, 5, 5, generator=torch.Generator().manual_seed(1)) > 0.4,
}


def doubles(**options: Any) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [
        torch.randn(*shape, generator=g, dtype=torch.float64, requires_grad=True, **options)
        for shape in ((2, 4, 5, 3), (2, 2, 5, 3), (2, 2, 5, 2), (2, 1, 5, 5), (4,))
    ]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 1.0}, {"bias": True}, {"sinks": True}], ids=str
)
def test_what_flex_attention_is_asked_is_the_definition(mask: Any, options: dict[str, Any]) -> None:
    """Its kernel needs CUDA, but its unfused form runs anywhere, and gets the same mask and score
    functions.
    """
    q, k, v, bias, sinks = (x.detach() for x in doubles())
    options = {
        name: {"bias": bias, "sinks": sinks}.get(name, value) for name, value in options.items()
    }
    want = attention(q, k, v, mask, **options, return_lse=True, backend="reference")
    call = AttentionCall.lower(q, k, v, mask, **options)
    got = flex.FlexBackend(torch.nn.attention.flex_attention.flex_attention).forward(call)
    assert torch.allclose(got[0], want[0], atol=1e-6) and torch.allclose(got[1], want[1], atol=1e-6)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_takes_the_dense_form() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    from multihead.ops.backends import flex

    q, k, v = (torch.randn(1, 4, 16, 16) for _ in range(3))
    slopes = AlibiBias(ALiBi(4).slopes, torch.arange(16), torch.arange(16))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex.FlexBackend, "unsupported_reason", lambda *x, **more: None)
        patch.setattr(flex, "_compiled", lambda: flex_attention)
        got = attention(q, k, v, causal(), bias=slopes, backend="flex")
    torch.testing.assert_close(got, attention(q, k, v, causal(), bias=slopes, backend="reference"))
