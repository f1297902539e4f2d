"""Attention modules of transformers as layers: the outputs that they have in their models."""

from __future__ import annotations

import pytest
import torch

import families
import in_models
from families import FAMILIES, Family
from multihead import Cache, LatentAttention, MultiHeadAttention

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


class Plain(torch.nn.Module):
    """Attention as someone writes it, which isn't in transformers."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.to_q, self.to_k, self.to_v = (torch.nn.Linear(32, 32) for _ in range(3))
        self.to_out = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            y.unflatten(-1, (4, 8)).transpose(1, 2)
            for y in (self.to_q(x), self.to_k(x), self.to_v(x))
        )
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.2 * self.factor)
        out = out.transpose(1, 2).flatten(2)
        kept: torch.Tensor = self.to_out(out)
        return kept


class Scaled(Plain):
    scale = 0.2


class Causal(torch.nn.Module):
    """Attention as in nanoGPT: a fused projection, and a mask inside."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.n_embd, self.dropout = 4, 32, 0.2
        self.c_attn, self.c_proj = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)
        self.resid_dropout = torch.nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in self.c_attn(x).split(32, 2))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        kept: torch.Tensor = self.resid_dropout(self.c_proj(out.transpose(1, 2).flatten(2)))
        return kept


class Stronger(Scaled):
    factor = 1.5


class Spare(Scaled):
    def __init__(self) -> None:
        super().__init__()
        self.spare = torch.nn.Parameter(torch.zeros(3))


class Asking(Scaled):
    def forward(self, x: torch.Tensor, moon: object = None) -> torch.Tensor:
        return super().forward(x)


def in_steps(layer: MultiHeadAttention, x: torch.Tensor) -> torch.Tensor:
    cache = Cache()
    return torch.cat([layer(part, cache=cache) for part in x.split(2, 1)], 1)


def test_an_unknown_class_is_converted_if_the_layer_computes_the_same() -> None:
    module = Scaled()
    layer = MultiHeadAttention.from_transformers(module.eval())
    x = torch.randn(2, 5, 32)
    torch.testing.assert_close(layer(x), module(x), atol=1e-5, rtol=1e-5)
    assert layer.scale == 0.2 and layer.mask is None
    theirs = Causal().eval()
    ours = MultiHeadAttention.from_transformers(theirs)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(in_steps(ours, x), theirs(x), atol=1e-5, rtol=1e-5)
    assert (ours.dropout, ours.out_dropout) == (0.2, 0.3)


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (Plain, r"Plain: its output differs .* by \d"),
        (Stronger, r"Stronger: its output differs .* by \d"),
        (Spare, "Spare: its parameters spare have no place in a layer"),
        (Asking, "Asking: forward takes the argument moon="),
    ],
)
def test_an_unknown_class_is_refused_otherwise(cls: type[Plain], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MultiHeadAttention.from_transformers(cls())


def test_modules_without_numbers_and_with_another_forward_are_refused() -> None:
    with torch.device("meta"):
        module = Scaled()
    with pytest.raises(ValueError, match="Scaled: its parameters are on the meta device"):
        MultiHeadAttention.from_transformers(module)
    module = Scaled()
    module.to_q.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="Linear: its forward was replaced"):
        MultiHeadAttention.from_transformers(module)
    with pytest.raises(ValueError, match="MultiheadAttention: a module of torch"):
        MultiHeadAttention.from_transformers(torch.nn.MultiheadAttention(8, 2))


def test_dropout_of_weights_and_outputs_is_read() -> None:
    model = families.model_of(next(f for f in FAMILIES if f.name == "bert"))
    outer = MultiHeadAttention.from_transformers(model.encoder.layer[0].attention)
    inner = MultiHeadAttention.from_transformers(model.encoder.layer[0].attention.self)
    assert (outer.dropout, outer.out_dropout) == (0.1, 0.1)
    assert (inner.dropout, inner.out_dropout) == (0.1, 0.0)
