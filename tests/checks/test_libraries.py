"""No false alarms: torch's, transformers', timm's and this library's own modules."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import multihead
from families import FAMILIES, Family, model_of
from multihead import LatentAttention, MultiHeadAttention
from multihead.layers import ALiBi, Rotary
from multihead.masks import causal
from multihead.testing import assert_attention
from pictures import import_timm

timm = import_timm()


def recomputed(report: Any) -> bool:
    return any(line.startswith("recomputed by the definition") for line in report.passed)


def verdict(report: Any) -> str:
    return "right" if recomputed(report) else "partly judged"


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(batch_first=True, dropout=0.1),
        dict(bias=False),
        dict(kdim=20, vdim=28),
        dict(add_bias_kv=True),
        dict(add_zero_attn=True),
    ],
    ids=str,
)
def test_torch(options: dict[str, Any]) -> None:
    report = multihead.check(nn.MultiheadAttention(32, 4, **options), causal=False)
    assert not report.findings, str(report)
    assert report.ok and recomputed(report), str(report)
    assert [f.bug for f in report.known] == (
        [] if "add" in str(options) else ["fully masked rows give NaN"]
    )


def test_torchs_operator_and_what_wraps_it() -> None:
    def by_length(q: Any, k: Any, v: Any, causal: bool = False) -> Any:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    report = multihead.check(F.scaled_dot_product_attention)
    assert (
        report.ok
        and recomputed(report)
        and "is_causal" in report.called
        and "fully masked rows" in report.passed
    ), str(report)
    report = multihead.check(by_length)
    assert report.ok and recomputed(report) and "[B, L, H, E]" in report.called, str(report)
    report = multihead.check(nn.TransformerEncoderLayer(32, 4, 40, batch_first=True))
    assert report.verdict == "partly judged", str(report)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_transformers(family: Family, implementation: str) -> None:
    model = model_of(family)
    try:
        model.set_attn_implementation(implementation)
    except ValueError:
        pytest.skip(f"{family.name} has no {implementation}")
    seen = {
        type(m): m
        for m in model.modules()
        if re.search(r"Attention$", type(m).__name__)
        and not any(re.search(r"Attention$", type(c).__name__) for c in list(m.modules())[1:])
    }
    assert seen
    for module in seen.values():
        module.requires_grad_(True)
        report = multihead.check(module)
        module.requires_grad_(False)
        assert report.verdict == verdict(report), str(report)
        assert recomputed(report) or family.name in ("t5", "gpt_oss", "llama4"), str(report)


@pytest.mark.parametrize(
    "make",
    [
        lambda: timm.layers.Attention(36, 3),
        lambda: timm.layers.Attention(36, 3, qk_norm=True, norm_layer=nn.LayerNorm),
        lambda: timm.layers.AttentionRope(
            36, 6, qkv_fused=False, num_kv_heads=2, num_prefix_tokens=0
        ),
        lambda: timm.models.swin_transformer.WindowAttention(24, 3, window_size=(4, 4)),
        lambda: timm.models.beit.Attention(36, 3, window_size=(4, 4)),
    ],
)
@pytest.mark.parametrize("fused", [True, False])
def test_timm(make: Any, fused: bool) -> None:
    module = make()
    module.fused_attn = fused
    report = multihead.check(module, causal=False)
    assert report.verdict == "right", str(report)


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(num_kv_heads=2, positions=Rotary(8)),
        dict(positions=Rotary(8, rotary_dim=4, theta=100.0), mask=causal(), scale=0.5),
        dict(qk_norm="rms_all", positions=Rotary(8, interleaved=True)),
        dict(positions=ALiBi(4)),
        dict(softcap=2.0, dropout=0.2),
        dict(sinks=True),
        dict(gate="head"),
        dict(qk_norm="rms"),
        dict(bias_kv=True),
        dict(kdim=20, vdim=20),
        dict(head_dim=12, out_dim=20),
    ],
    ids=lambda options: ",".join(options),
)
def test_its_own(options: dict[str, Any]) -> None:
    report = multihead.check(MultiHeadAttention(32, 4, **options))
    assert report.ok and recomputed(report) and not report.known, str(report)
    assert "fully masked rows" in report.passed
    assert "KV cache" in report.passed or "kdim" in options, str(report)


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(q_latent_dim=12, v_head_dim=5, bias=True),
        dict(norm="layer", dropout=0.2, scale=0.4),
        dict(norm=None, positions=Rotary(4, theta=50.0, interleaved=True)),
        dict(mask=causal(), out_dim=20),
    ],
    ids=lambda options: ",".join(options),
)
@pytest.mark.parametrize("form", ["auto", "absorbed", "expanded"])
def test_its_latent_attention(options: dict[str, Any], form: str) -> None:
    layer = LatentAttention(32, 4, kv_latent_dim=10, rotary_dim=4, head_dim=8, **options)
    layer.form = form
    report = multihead.check(layer)
    assert report.ok and not report.known and recomputed(report), str(report)
    assert {"KV cache", "gradients", "fully masked rows", "padding"} <= set(report.passed)


def test_its_own_operator_and_block() -> None:
    assert_attention(multihead.attention)
    with pytest.raises(AssertionError, match="partly judged"):
        assert_attention(multihead.TransformerBlock(24, 3, hidden_dim=32))
    assert_attention(multihead.TransformerBlock(24, 3, hidden_dim=32), partial=True)
    assert torch.get_num_threads() >= 1
