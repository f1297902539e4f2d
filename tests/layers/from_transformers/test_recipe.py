"""What a converted layer keeps of its module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention

from multihead import MultiHeadAttention


def llama(**options: Any) -> LlamaAttention:
    sizes = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2)
    return LlamaAttention(LlamaConfig(**sizes, **options), 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtype_mode_and_requires_grad_are_kept(dtype: torch.dtype) -> None:
    module = llama(attention_bias=True, attention_dropout=0.25).to(dtype).eval()
    module.v_proj.weight.requires_grad_(False)
    state = torch.get_rng_state()
    layer = MultiHeadAttention.from_transformers(module)
    assert torch.equal(torch.get_rng_state(), state)
    assert {p.dtype for p in layer.parameters()} == {dtype} and not layer.training
    assert layer.dropout == 0.25 and layer.q_proj.bias is not None
    learns = {name: p.requires_grad for name, p in layer.named_parameters()}
    assert [name for name, value in learns.items() if not value] == ["v_proj.weight"]


def test_weights_are_copies() -> None:
    module = llama()
    layer = MultiHeadAttention.from_transformers(module)
    before = module.q_proj.weight.clone()
    with torch.no_grad():
        layer.q_proj.weight.zero_()
    assert torch.equal(module.q_proj.weight, before)
    assert torch.equal(layer.k_proj.weight, module.k_proj.weight)
    assert layer.training and module.training
