"""Reading timm's vision transformers, against a softmax worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import multihead
from oracles.compare import differences
from oracles.statistics import NAMES, OFFSETS
from pictures import import_timm
from twins import as_before, call, sharpened, twin, watched

timm = import_timm()
SMALL = dict(img_size=32, patch_size=8, embed_dim=36, depth=2, num_heads=3, num_classes=4)
PICTURES = torch.empty(2, 3, 32, 32, dtype=torch.float64).normal_(
    generator=torch.Generator().manual_seed(1)
)
INNER = [
    n
    for n in NAMES
    if n.partition(":")[0] not in ("contribution", "even", "cancellation", "reach", "norm", "share")
]


def vit(**options: Any) -> Any:
    return timm.models.vision_transformer.VisionTransformer(**SMALL | options)


def by_hand(
    module: Any, x: Tensor, rope: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Weights and values of one of timm's attention modules, from its parameters."""
    if getattr(module, "qkv", None) is None:
        q, k, v = (layer(x) for layer in (module.q_proj, module.k_proj, module.v_proj))
    else:
        q, k, v = F.linear(x, module.qkv.weight, module.qkv.bias).chunk(3, -1)
        if getattr(module, "q_bias", None) is not None:
            q, v = q + module.q_bias, v + module.v_bias
    q, k, v = (
        part.unflatten(-1, (-1, part.shape[-1] // n)).transpose(1, 2)
        for part, n in ((q, module.num_heads), (k, heads(module)), (v, heads(module)))
    )
    if hasattr(module, "q_norm"):
        q, k = module.q_norm(q), module.k_norm(k)
    if rope is not None:
        q, k = (torch.cat([part[:, :, :1], turned(part[:, :, 1:], rope)], 2) for part in (q, k))
    if getattr(module, "relative_position_bias_table", None) is not None:
        bias = module.relative_position_bias_table[module.relative_position_index].permute(2, 0, 1)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (q @ k.mT * q.shape[-1] ** -0.5 + (0 if bias is None else bias)).softmax(-1), v


def heads(module: Any) -> int:
    return getattr(module, "num_kv_heads", module.num_heads)


def turned(x: Tensor, rope: Tensor) -> Tensor:
    sin, cos = rope.chunk(2, -1)
    return x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(qk_norm=True),
        dict(qkv_bias=False),
        dict(scale_attn_norm=True),
        dict(reg_tokens=2, class_token=False, global_pool="avg"),
    ],
    ids=str,
)
def test_vit(options: dict[str, Any], fused: bool) -> None:
    """With timm's fused attention or its plain products: the same reading."""
    model = sharpened(vit(**options))
    for block in model.blocks:
        block.attn.fused_attn = fused
    before = as_before(model)
    table = multihead.read(model, [{"x": PICTURES}])
    assert as_before(model) == before
    kind = type(model.blocks[0].attn)
    with watched(model, kind) as seen, torch.no_grad():
        plain = model(PICTURES)
    want = [(path, call(*by_hand(m, args[0]), m.proj)) for path, m, args, _ in seen]
    normed = "scale_attn_norm" in options
    assert not differences(table, twin(want), INNER if normed else NAMES)
    with torch.no_grad(), multihead.reading(model):
        torch.testing.assert_close(model(PICTURES), plain, rtol=0, atol=1e-12)
    assert [row["head"] for row in table.rows()] == [
        f"L{n}.H{h}" for n in range(2) for h in range(3)
    ]
    assert table.reasons["duplicate"] == "pictures and sound have no token ids"
    assert all((table.count(name) > 0).all() for name in OFFSETS)  # positions are patches
    if normed:
        assert "gate or norm" in table.reasons["contribution:self"]


def test_eva_with_rotary_positions_and_a_norm() -> None:
    eva = timm.models.eva.Eva(
        **SMALL | dict(embed_dim=48),
        qkv_fused=False,
        use_rot_pos_emb=True,
        swiglu_mlp=True,
        scale_mlp=True,
        scale_attn_inner=True,
    )
    model = sharpened(eva)
    table = multihead.read(model, [{"x": PICTURES}])
    with watched(model, timm.models.eva.EvaAttention) as seen, torch.no_grad():
        model(PICTURES)
    want = [
        (path, call(*by_hand(m, args[0], kwargs["rope"]), m.proj)) for path, m, args, kwargs in seen
    ]
    assert not differences(table, twin(want), INNER)
    assert "gate or norm" in table.reasons["contribution:self"] and sum(
        table.value("share")
    ) == pytest.approx(2)


def test_beit_with_relative_positions() -> None:
    model = sharpened(
        timm.models.beit.Beit(
            **SMALL, use_abs_pos_emb=False, use_rel_pos_bias=True, init_values=0.1
        )
    )
    table = multihead.read(model, [{"x": PICTURES}])
    with watched(model, timm.models.beit.Attention) as seen, torch.no_grad():
        model(PICTURES)
    assert not differences(
        table, twin([(path, call(*by_hand(m, args[0]), m.proj)) for path, m, args, _ in seen])
    )


def test_shared_keys() -> None:
    attention = sharpened(
        timm.layers.AttentionRope(36, 6, qkv_fused=False, num_kv_heads=2, num_prefix_tokens=0)
    )
    x = torch.empty(2, 9, 36, dtype=torch.float64).normal_(
        generator=torch.Generator().manual_seed(3)
    )
    table = multihead.read(attention, [{"x": x}])
    assert not differences(table, twin([("", call(*by_hand(attention, x), attention.proj))]))
    assert [row["group"] for row in table.rows()] == [0, 0, 0, 1, 1, 1]


def test_swin_a_window_is_a_document() -> None:
    swin = timm.models.swin_transformer.SwinTransformer(
        img_size=32,
        patch_size=2,
        embed_dim=12,
        depths=(2, 2),
        num_heads=(2, 3),
        window_size=4,
        num_classes=4,
    )
    model = sharpened(swin)
    table = multihead.read(model, [{"x": PICTURES}])
    with watched(model, timm.models.swin_transformer.WindowAttention) as seen, torch.no_grad():
        model(PICTURES)
    want = []
    for path, m, args, kwargs in seen:
        mask = kwargs.get("mask")
        bias = (
            m.relative_position_bias_table[m.relative_position_index.flatten()]
            .view(16, 16, -1)
            .permute(2, 0, 1)
        )
        if mask is not None:
            bias = bias + mask.repeat(args[0].shape[0] // mask.shape[0], 1, 1)[:, None]
        want.append((path, call(*plain_heads(m, args[0], bias), m.proj)))
    assert not differences(table, twin(want))
    assert table.meta["documents"] == 2 * 16 and {row["layer"] for row in table.rows()} == {0, 1}
    one = multihead.read(model, [{"x": PICTURES[:1]}])  # as many windows as masks
    assert {row["kind"] for row in one.rows()} == {"self"} and (one.count("self") > 0).all()
    with pytest.raises(ValueError, match=r"holds 16 texts .*expected one"):
        multihead.read_maps(model, {"x": PICTURES[:1]}, table.rows()[0]["head"])


def plain_heads(module: Any, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (
        part.unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
        for part in module.qkv(x).chunk(3, -1)
    )
    return (q @ k.mT * q.shape[-1] ** -0.5 + bias).softmax(-1), v


def test_maps_and_heads() -> None:
    model = sharpened(vit(class_token=True))
    with watched(model, timm.layers.Attention) as seen, torch.no_grad():
        plain = model(PICTURES[:1])
    found = multihead.read_maps(model, {"x": PICTURES[:1]}, "L1.H2")
    np.testing.assert_allclose(
        found.weights, by_hand(seen[1][1], seen[1][2][0])[0][0, 2], atol=1e-6
    )
    assert found.tokens[:3] == ["0", "1", "2"]
    with torch.no_grad(), multihead.ablate_heads(model, "L1.H2"):
        off = model(PICTURES[:1])
    model.blocks[1].attn.proj.weight[:, 24:] = 0
    assert torch.allclose(off, model(PICTURES[:1]), atol=1e-12) and not torch.allclose(off, plain)


@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224",
        "deit_tiny_patch16_224",
        "eva02_tiny_patch14_224",
        "vit_relpos_small_patch16_224",
        "vit_small_patch16_dinov3",
    ],
)
def test_models_by_their_names(name: str) -> None:
    """As timm makes them, random weights, in float32; the reading compares outputs itself."""
    model = timm.create_model(name, depth=2).eval()
    size = model.patch_embed.img_size
    table = multihead.read(
        model, [{"x": torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(0))}]
    )
    assert len(table.heads) == 2 * model.blocks[0].attn.num_heads and not table.meta["notes"]
    assert sum(row["share"] for row in table.rows()) == pytest.approx(2, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("swinv2_tiny_window8_256", "WindowAttention"),
        ("xcit_nano_12_p16_224", "XCA|ClassAttention"),
        ("samvit_base_patch16", r"Attention can't be read.*expected \[B, H, L, E\]"),
    ],
)
def test_refused_by_name(name: str, word: str) -> None:
    small = dict(depth=2) if "sam" in name else {}
    model = timm.create_model(name, **small).eval()
    size = model.patch_embed.img_size if hasattr(model.patch_embed, "img_size") else (224, 224)
    with pytest.raises(ValueError, match=word):
        multihead.read(model, [{"x": torch.randn(1, 3, *size)}])
