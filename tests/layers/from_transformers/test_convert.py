"""Attention modules of transformers as layers: the outputs that they have in their models."""

from __future__ import annotations

import pytest
import torch

import families
import in_models
from families import FAMILIES, Family
from multihead import LatentAttention, MultiHeadAttention

TOLERANCE = 1e-5
REFUSED = ("gpt_neox", "llama4")


@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if f.name not in REFUSED], ids=lambda f: f.name
)
def test_layers_compute_what_modules_compute_in_their_models(family: Family) -> None:
    model = families.model_of(family)
    calls = in_models.calls_in(model, families.batches_of(family, "none")[0])
    converted = 0
    for call in calls:
        kind = type(call.module).__name__
        if kind.endswith(("LayerSelfAttention", "LayerCrossAttention")):
            with pytest.raises(ValueError, match=kind):
                in_models.convert(call.module)
            continue
        is_text = family.name == "clip" and call.name.startswith("text")
        layer = in_models.convert(call.module, is_causal=True if is_text else None)
        want = call.out
        scale = float(want.abs().max())
        assert float((in_models.run_layer(layer, call) - want).abs().max()) < TOLERANCE * scale
        is_decoder = layer.mask is not None and call.memory is None and call.bias is None
        if is_decoder:
            steps = in_models.run_steps(layer, call)
            assert float((steps - want).abs().max()) < TOLERANCE * scale
        converted += 1
    assert converted >= 2


def test_what_isnt_attention_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="module is a int"):
        MultiHeadAttention.from_transformers(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Linear: no projections of queries, keys and values"):
        MultiHeadAttention.from_transformers(torch.nn.Linear(3, 3))
    deepseek = families.model_of(next(f for f in FAMILIES if f.name == "deepseek_v3"))
    latent = deepseek.model.layers[0].self_attn
    with pytest.raises(ValueError, match=r"DeepseekV3Attention.*use LatentAttention"):
        MultiHeadAttention.from_transformers(latent)
    llama = families.model_of(next(f for f in FAMILIES if f.name == "llama"))
    with pytest.raises(ValueError, match=r"LlamaAttention.*use MultiHeadAttention"):
        LatentAttention.from_transformers(llama.model.layers[0].self_attn)
    llama4 = families.model_of(next(f for f in FAMILIES if f.name == "llama4"))
    with pytest.raises(ValueError, match="attn_temperature_tuning=True"):
        MultiHeadAttention.from_transformers(llama4.model.layers[0].self_attn)
