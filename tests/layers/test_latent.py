"""`LatentAttention` against transformers' layer, and its two forms against each other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from multihead import Cache, LatentAttention
from multihead.layers import Rotary
from multihead.masks import causal, prefix

NAMES = {
    "q_proj": "q_proj",
    "q_a_proj": "q_down_proj",
    "q_a_layernorm": "q_norm",
    "q_b_proj": "q_up_proj",
    "kv_a_proj_with_mqa": "kv_down_proj",
    "kv_a_layernorm": "kv_norm",
    "kv_b_proj": "kv_up_proj",
    "o_proj": "out_proj",
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}


class Theirs(nn.Module):
    """transformers' `DeepseekV3Attention`, eager, with sharp weights."""

    def __init__(self, *, q_latent: int | None, interleaved: bool, yarn: bool, bias: bool) -> None:
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

        super().__init__()
        self.config = deepseek.DeepseekV3Config(
            hidden_size=32,
            num_attention_heads=4,
            num_key_value_heads=4,
            q_lora_rank=q_latent,
            kv_lora_rank=16,
            qk_rope_head_dim=4,
            qk_nope_head_dim=6,
            v_head_dim=5,
            rope_interleave=interleaved,
            max_position_embeddings=128,
            attention_bias=bias,
            rope_parameters=YARN if yarn else None,
        )
        self.config._attn_implementation = "eager"
        self.attention = deepseek.DeepseekV3Attention(self.config, 0)
        self.rotary = deepseek.DeepseekV3RotaryEmbedding(self.config)
        with torch.no_grad():
            for parameter in self.attention.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.5)

    def forward(self, x: Tensor, positions: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        added = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
        out, weights = self.attention(x, self.rotary(x, positions), added)
        return out, weights

    def ours(self) -> LatentAttention:
        config = self.config
        scaling = dict(config.rope_parameters)
        layer = LatentAttention(
            32,
            4,
            kv_latent_dim=16,
            rotary_dim=4,
            head_dim=6,
            v_head_dim=5,
            q_latent_dim=config.q_lora_rank,
            bias=config.attention_bias,
            positions=Rotary(4, interleaved=config.rope_interleave, scaling=scaling),
            norm=lambda width: nn.RMSNorm(width, eps=1e-6),
            scale=self.attention.scaling if scaling["rope_type"] == "yarn" else None,
        )
        state = {}
        for name, x in self.attention.state_dict().items():
            module, _, kind = name.partition(".")
            state[f"{NAMES[module]}.{kind}"] = x
        if config.q_lora_rank is None and config.attention_bias:
            state["q_proj.bias"] = torch.zeros(40)  # theirs has none
        layer.load_state_dict(state)
        return layer.eval()


VARIANTS: list[dict[str, Any]] = [
    dict(q_latent=None, interleaved=True, yarn=False, bias=False),
    dict(q_latent=12, interleaved=False, yarn=False, bias=True),
    dict(q_latent=12, interleaved=True, yarn=True, bias=False),
    dict(q_latent=None, interleaved=False, yarn=True, bias=True),
]


@pytest.fixture(params=VARIANTS, ids=lambda v: "-".join(f"{k}={x}" for k, x in v.items()))
def theirs(request: Any) -> Theirs:
    torch.manual_seed(0)
    return Theirs(**request.param).eval()


def lower(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()[None, None]


def test_one_pass_equals_transformers(theirs: Theirs) -> None:
    x, layer = torch.randn(2, 9, 32), theirs.ours()
    want, want_weights = theirs(x, torch.arange(9)[None], lower(9))
    assert want_weights[:, :, -1].amax(-1).mean() > 0.5, "attention is to be sharp"
    for form in ("auto", "absorbed", "expanded"):
        layer.form = form
        got, weights = layer(x, mask=causal(), return_weights=True)
        assert torch.allclose(got, want, atol=1e-5, rtol=1e-5)
        assert torch.allclose(weights, want_weights, atol=1e-5)
        assert torch.allclose(layer(x, mask=causal()), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", ["auto", "absorbed", "expanded"])
@torch.no_grad()
def test_steps_of_any_size_equal_transformers(theirs: Theirs, form: str) -> None:
    x, layer = torch.randn(2, 9, 32), theirs.ours()
    layer.form = form
    want = theirs(x, torch.arange(9)[None], lower(9))[0]
    for sizes in ([1] * 9, [4, 1, 3, 1], [9]):
        cache, parts = Cache(), []
        for part in x.split(sizes, 1):
            parts.append(layer(part, mask=causal(), cache=cache))
        assert torch.allclose(torch.cat(parts, 1), want, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_ragged_batch_equals_transformers(theirs: Theirs) -> None:
    x, layer = torch.randn(2, 9, 32), theirs.ours()
    valid = torch.ones(2, 9, dtype=torch.bool)
    valid[0, :4] = False
    positions = (valid.cumsum(1) - 1).clamp(min=0)
    want = theirs(x, positions, lower(9) & valid[:, None, None])[0][valid]
    got = layer(x, mask=causal(), valid=valid, position_ids=positions)[valid]
    assert torch.allclose(got, want, atol=1e-5, rtol=1e-5)
    cache, parts = Cache(), []
    for start, stop in ((0, 6), (6, 7), (7, 9)):
        part, real = x[:, start:stop], valid[:, start:stop]
        parts.append(layer(part, mask=causal(), cache=cache, valid=real))
    assert torch.allclose(torch.cat(parts, 1)[valid], want, atol=1e-5, rtol=1e-5)
    assert cache.lengths.tolist() == [5, 9]


def test_gradients_equal_transformers(theirs: Theirs) -> None:
    x, layer = torch.randn(2, 9, 32, requires_grad=True), theirs.ours()
    theirs(x, torch.arange(9)[None], lower(9))[0].square().sum().backward()
    want = {
        NAMES[name.partition(".")[0]] + "." + name.partition(".")[2]: p.grad
        for name, p in theirs.attention.named_parameters()
    }
    want_x, x.grad = x.grad, None
    for form in ("expanded", "absorbed"):
        one = copy.deepcopy(layer)
        one.form = form
        one(x, mask=causal()).square().sum().backward()
        found, x.grad = x.grad, None
        assert torch.allclose(found, want_x, rtol=1e-4, atol=1e-5 * want_x.abs().max().item())
        for name, parameter in one.named_parameters():
            if name in want:
                limit = 1e-5 * want[name].abs().max().item()
                assert torch.allclose(parameter.grad, want[name], rtol=1e-4, atol=limit), name


def test_a_layers_mask_holds_in_each_nested_sequence() -> None:
    layer = LatentAttention(16, 4, kv_latent_dim=6, rotary_dim=2, head_dim=4, mask=prefix(2))
    parts = [torch.randn(n, 16) for n in (3, 1, 5)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    for part, got in zip(parts, layer(nested).unbind()):
        torch.testing.assert_close(got, layer(part[None])[0], atol=1e-5, rtol=1e-5)
