"""Norms of queries and keys are recognised by what they compute."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.stablelm.modeling_stablelm import StableLmLayerNormPerHead

from multihead.layers.from_transformers.norms import convert_norm
from multihead.layers.from_transformers.twin import twin_of

NORMS = {
    "rms": (LlamaRMSNorm(6, eps=1e-3), "head"),
    "rms, 1 + weight": (Gemma3RMSNorm(6, eps=1e-3), "head"),
    "layer": (nn.LayerNorm(6, eps=1e-3), "head"),
    "rms over all heads": (LlamaRMSNorm(24, eps=1e-3), "all"),
    "layer, each head": (CohereLayerNorm((4, 6), eps=1e-3), "each"),
    "a list of layer norms": (StableLmLayerNormPerHead(6, 4, eps=1e-3), "list"),
}


@pytest.mark.parametrize("name", NORMS)
def test_converted_norms_compute_the_same(name: str) -> None:
    norm, extent = NORMS[name]
    owner = nn.ModuleDict({"q_norm": norm})
    with torch.no_grad():
        for parameter in owner.parameters():
            parameter.add_(torch.randn_like(parameter))
    made, spans = convert_norm(owner, "q_norm", twin_of(owner), 4, 6)
    x = torch.randn(2, 3, 4, 6) * 0.03
    if extent == "all":
        want, got = norm(x.flatten(2)), made(x.flatten(2))
    elif extent == "head":
        want, got = norm(x), made(x)
    else:
        got = made(x.transpose(1, 2)).transpose(1, 2)
        want = norm(x.transpose(1, 2)).transpose(1, 2) if extent == "list" else norm(x)
    assert spans == (extent == "all")
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_another_norm_is_refused() -> None:
    owner = nn.ModuleDict({"q_norm": nn.Sigmoid()})
    with pytest.raises(ValueError, match="ModuleDict: q_norm is a Sigmoid"):
        convert_norm(owner, "q_norm", twin_of(owner), 4, 6)
