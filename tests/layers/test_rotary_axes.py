"""Positions of three axes (mrope), longrope and proportional rotary encodings: the code of the
models that have them, layers, caches and blocks, compiled and exported, the words of the errors.
"""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multihead import Cache, LatentAttention, MultiHeadAttention, TransformerBlock
from multihead.layers.position_bias import ALiBi
from multihead.layers.rotary import Rotary
from multihead.masks import causal

MROPE = {"type": "mrope", "mrope_section": [2, 1, 1]}
INTERLEAVED = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True}
LONG = {
    "rope_type": "longrope", "original_max_position_embeddings": 16, "factor": 4.0,
    "short_factor": [1.0, 1.1, 1.2, 1.5], "long_factor": [1.0, 2.0, 3.0, 5.0],
}  # fmt: skip
PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0}
KINDS = {"mrope": MROPE, "interleaved": INTERLEAVED, "longrope": LONG, "proportional": PROPORTIONAL}


def image_ids(batch: int, length: int, start: int = 0) -> Tensor:
    """`[3, B, L]`, those of images: the axes differ."""
    at = torch.arange(start, start + length)
    rows = torch.stack((at, at // 2 + 3, at % 3 + 1))
    return rows[:, None] + 2 * torch.arange(batch)[:, None]


# the code of models


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"])
@pytest.mark.parametrize("yarn", [False, True])
def test_three_axes_equal_the_models(family: str, yarn: bool) -> None:
    import importlib

    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    configs = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    sections = {"glm4v": [1, 2, 1], "qwen3_vl": [3, 3, 2]}.get(family, [2, 3, 3])
    kind = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VLText"}
    name = kind.get(family, "Glm4vText")
    parameters: dict[str, Any] = {
        "rope_type": "default", "rope_theta": 5000.0, "mrope_section": sections,
    }  # fmt: skip
    if yarn:
        parameters |= {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
        }  # fmt: skip
    if family == "glm4v":
        parameters["partial_rotary_factor"] = 0.5
    config_name = {"qwen2_vl": "Qwen2VLTextConfig", "qwen2_5_vl": "Qwen2_5_VLTextConfig"}
    config = getattr(configs, config_name.get(family, f"{name}Config"))(
        hidden_size=32, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        max_position_embeddings=64, rope_parameters=dict(parameters),
    )  # fmt: skip
    q, k = torch.randn(2, 2, 2, 9, 16)
    ids = image_ids(2, 9, start=5)
    cos, sin = getattr(modeling, f"{name}RotaryEmbedding")(config)(q, ids)
    theirs = modeling.apply_rotary_pos_emb(q, k, cos, sin)
    if family == "qwen3_vl":
        parameters["mrope_interleaved"] = True
    ours = Rotary(16, scaling=parameters, interleaved=family == "glm4v")
    assert ours.num_axes == 3
    for got, want in zip((ours(q, ids), ours(k, ids)), theirs):
        torch.testing.assert_close(got, want, atol=3e-6, rtol=1e-6)
    swapped = ours(q, ids[[0, 2, 1]])
    assert not torch.allclose(swapped, theirs[0], atol=1e-3)


@pytest.mark.parametrize("family", ["phi3", "phi4_multimodal"])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_longrope_equals_phi(family: str, share: float) -> None:
    import importlib

    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    configs = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    half = int(16 * share) // 2
    scaling: dict[str, Any] = {
        "type": "longrope",
        "short_factor": [1.0 + 0.05 * p for p in range(half)],
        "long_factor": [1.0 + 0.9 * p for p in range(half)],
    }
    config = getattr(configs, {"phi3": "Phi3Config"}.get(family, "Phi4MultimodalConfig"))(
        hidden_size=32, num_attention_heads=2, num_key_value_heads=2, pad_token_id=0,
        max_position_embeddings=128, original_max_position_embeddings=32,
        rope_parameters={**scaling, "rope_theta": 10000.0, "partial_rotary_factor": share},
    )  # fmt: skip
    name = {"phi3": "Phi3"}.get(family, "Phi4Multimodal")
    theirs = getattr(modeling, f"{name}RotaryEmbedding")(config)
    elsewhere = {"original_max_position_embeddings": 32, "factor": 128 / 32}
    ours = Rotary(16, scaling={**scaling, **elsewhere, "partial_rotary_factor": share})
    assert ours.attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(32)))
    q, k = torch.randn(2, 2, 2, 8, 16)
    for start in (0, 24, 25, 60):  # position 31 is the last of a short call
        ids = torch.arange(start, start + 8)
        want = modeling.apply_rotary_pos_emb(q, k, *theirs(q, ids[None]))
        for x, turned in zip((q, k), want):
            torch.testing.assert_close(ours(x, ids), turned, atol=3e-6, rtol=1e-6)
    short, long = (ours.frequencies(torch.tensor([last])) for last in (31, 32))
    assert short[0] == long[0] and bool((short[1:] > long[1:]).all())


@pytest.mark.parametrize("share", [0.25, 0.5, 0.3, 1.0])
def test_proportional_equals_gemma4(share: float) -> None:
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
    from transformers.models.gemma4.modeling_gemma4 import (
        Gemma4TextRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    full = {"rope_type": "proportional", "partial_rotary_factor": share, "rope_theta": 1e6}
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    config = Gemma4TextConfig(
        hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"], global_head_dim=24,
        rope_parameters={"full_attention": dict(full), "sliding_attention": dict(sliding)},
    )  # fmt: skip
    theirs, ids = Gemma4TextRotaryEmbedding(config), torch.arange(30, 37)
    for kind, width, scaling in (("full", 24, full), ("sliding", 16, sliding)):
        q = torch.randn(2, 2, 7, width)
        cos, sin = theirs(q, ids[None], f"{kind}_attention")
        got = Rotary(width, scaling=scaling)(q, ids)
        torch.testing.assert_close(got, apply_rotary_pos_emb(q, cos, sin), atol=3e-6, rtol=1e-6)


@pytest.mark.parametrize("family", ["glm", "glm4"])
def test_part_of_a_head_equals_glm(family: str) -> None:
    import importlib

    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    configs = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    name = {"glm": "Glm", "glm4": "Glm4"}[family]
    parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    config = getattr(configs, f"{name}Config")(
        hidden_size=32, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        rope_parameters=dict(parameters), pad_token_id=0,
    )  # fmt: skip
    q, ids = torch.randn(2, 2, 7, 16), torch.arange(30, 37)
    cos, sin = getattr(modeling, f"{name}RotaryEmbedding")(config)(q, ids[None])
    want, _ = modeling.apply_rotary_pos_emb(q, q, cos, sin)
    got = Rotary(16, interleaved=True, scaling=parameters)(q, ids)
    torch.testing.assert_close(got, want, atol=3e-6, rtol=1e-6)
    assert torch.equal(got[..., 8:], q[..., 8:])


@given(
    kind=st.sampled_from(["linear", "dynamic", "yarn", "llama3", "longrope", "proportional"]),
    share=st.sampled_from([0.25, 0.5, 0.75, 1.0]),
    interleaved=st.booleans(),
    three=st.booleans(),
    start=st.integers(0, 40),
)
@settings(max_examples=60, deadline=None)
def test_each_scaling_of_part_of_a_head(
    kind: str, share: float, interleaved: bool, three: bool, start: int
) -> None:
    """The part turns as a head of that width does by transformers' frequencies; the rest passes."""
    from types import SimpleNamespace

    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    width = 16 if kind == "proportional" else int(16 * share)
    half, trained = width // 2, 24
    scaling: dict[str, Any] = {"rope_type": kind, "partial_rotary_factor": share, "factor": 4.0}
    if kind not in ("linear", "proportional"):
        scaling["original_max_position_embeddings"] = trained
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "longrope":
        scaling["short_factor"] = [1.0 + 0.1 * p for p in range(half)]
        scaling["long_factor"] = [1.0 + p for p in range(half)]
    if three:
        scaling["mrope_section"] = [half - half // 2, half // 2, 0]
    ids = image_ids(2, 6, start) if three else torch.arange(start, start + 6)
    config = SimpleNamespace(
        head_dim=16, hidden_size=16, num_attention_heads=1, max_position_embeddings=trained,
        rope_parameters={"rope_theta": 1e4, **scaling}, standardize_rope_params=lambda: None,
    )  # fmt: skip
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=int(ids.max()) + 1)
    rotary = Rotary(16, interleaved=interleaved, scaling=scaling)
    torch.testing.assert_close(rotary.frequencies(ids), frequencies, rtol=1e-6, atol=0.0)
    assert rotary.rotary_dim == width and rotary.attention_factor == pytest.approx(factor)
    q = torch.randn(2, 2, 6, 16, dtype=torch.float64)
    got, want = rotary(q, ids), q.clone()
    for p in range(half):
        place = ids[int(p >= half - half // 2)] if three else ids[None]
        angle = (place * frequencies[p])[:, None].double()
        first, second = (2 * p, 2 * p + 1) if interleaved else (p, p + half)
        turned = torch.complex(q[..., first], q[..., second]) * torch.exp(1j * angle) * factor
        want[..., first], want[..., second] = turned.real, turned.imag
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


# shapes of positions


def test_text_has_one_position_along_all_axes() -> None:
    x, plain = torch.randn(2, 3, 5, 8), Rotary(8)
    for scaling in (MROPE, INTERLEAVED):
        rotary = Rotary(8, scaling=scaling)
        torch.testing.assert_close(rotary(x), plain(x))
        rows = torch.stack((torch.arange(5), torch.arange(7, 12)))
        for ids in (rows[1], rows, rows[:1]):
            torch.testing.assert_close(rotary(x, ids), plain(x, ids))
        axes = image_ids(1, 5)[:, 0]  # [3, L], of both sequences
        of_both = rotary(x, axes[:, None].expand(3, 2, 5))
        torch.testing.assert_close(rotary(x, axes), of_both)
        torch.testing.assert_close(rotary(x, axes.tolist()), of_both)
        assert not torch.allclose(rotary(x, axes), plain(x, axes[0]), atol=1e-4)
        cos, sin = rotary.cos_sin(axes)
        assert cos.shape == sin.shape == (5, 4)
        torch.testing.assert_close(rotary.cos_sin(axes[:, None])[0][0], cos)


def test_sections_say_which_pairs() -> None:
    ids = torch.tensor([1, 100, 10000])[:, None]
    scaling = {"mrope_section": [4, 2, 3], "type": "mrope"}
    frequencies = Rotary(18).frequencies(ids)
    for interleaved, axes in ((False, [0] * 4 + [1] * 2 + [2] * 3), (True, [0, 1, 2] * 3)):
        if interleaved:
            scaling |= {"mrope_section": [3, 3, 3], "mrope_interleaved": True}
        cos, _ = Rotary(18, scaling=scaling).cos_sin(ids)
        torch.testing.assert_close(cos[0], torch.cos(frequencies * ids[axes, 0]))
    short = {"mrope_section": [6, 1, 2], "mrope_interleaved": True, "rope_type": "default"}
    cos, _ = Rotary(18, scaling=short).cos_sin(ids)
    torch.testing.assert_close(cos[0], torch.cos(frequencies * ids[[0, 1, 2, 0, 0, 2, 0, 0, 0], 0]))


# layers


@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize("scaling", [MROPE, INTERLEAVED])
def test_layers_with_caches(batch: int, scaling: dict[str, Any]) -> None:
    """An image of 2 x 3 in the middle: positions after it don't count tokens."""
    torch.manual_seed(0)
    layer = MultiHeadAttention(16, 2, num_kv_heads=1, positions=Rotary(8, scaling=scaling))
    block = TransformerBlock(16, 2, hidden_dim=8, positions=Rotary(8, scaling=scaling))
    x = torch.randn(batch, 11, 16)
    image = torch.tensor([[2] * 6, [2, 2, 2, 3, 3, 3], [2, 3, 4, 2, 3, 4]])
    text = torch.arange(2).expand(3, 2), torch.arange(5, 8).expand(3, 3)
    ids = torch.cat([text[0], image, text[1]], 1)
    ids = ids[:, None] + torch.arange(batch)[:, None]
    for module in (layer, block):
        want = module(x, mask=causal(), position_ids=ids)
        cache, steps = Cache(), []
        for start, stop in ((0, 7), (7, 8), (8, 11)):
            at = ids[..., start:stop]
            steps.append(module(x[:, start:stop], mask=causal(), position_ids=at, cache=cache))
        torch.testing.assert_close(torch.cat(steps, 1), want)
        assert not torch.allclose(module(x, mask=causal()), want, atol=1e-3)
        with pytest.raises(ValueError, match=r"position_ids is missing.*11 tokens.*3 axes"):
            module(x[:, :1], mask=causal(), cache=cache)
        assert cache.length == 11


@given(
    steps=st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=3, max_size=3),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 99),
)  # of each step and sequence the padding on the left, and the number of tokens
@settings(max_examples=25, deadline=None)
def test_ragged_steps_with_given_positions(steps: list[Any], seed: int) -> None:
    torch.manual_seed(seed)
    layer = MultiHeadAttention(16, 2, num_kv_heads=1, positions=Rotary(8, scaling=INTERLEAVED))
    texts: list[list[Tensor]] = [[], [], []]
    places: list[list[Tensor]] = [[], [], []]
    got: list[list[Tensor]] = [[], [], []]
    cache = Cache()
    for step in steps:
        length = max(left + count for left, count in step)
        x, ids = torch.randn(3, length, 16), torch.randint(0, 50, (3, 3, length))
        valid = torch.zeros(3, length, dtype=torch.bool)
        for b, (left, count) in enumerate(step):
            valid[b, left : left + count] = True
            texts[b].append(x[b][valid[b]])
            places[b].append(ids[:, b][:, valid[b]])
        out = layer(x, mask=causal(), position_ids=ids, cache=cache, valid=valid)
        for b in range(3):
            got[b].append(out[b][valid[b]])
    for text, place, parts in zip(texts, places, got):
        want = layer(torch.cat(text)[None], mask=causal(), position_ids=torch.cat(place, 1))
        torch.testing.assert_close(torch.cat(parts)[None], want, atol=1e-5, rtol=1e-4)


def test_latent_attention() -> None:
    torch.manual_seed(0)
    rotary = Rotary(8, scaling=INTERLEAVED)
    layer = LatentAttention(16, 2, kv_latent_dim=12, rotary_dim=8, head_dim=8, positions=rotary)
    x, ids, cache = torch.randn(3, 6, 16), image_ids(3, 6), Cache()
    want = layer(x, mask=causal(), position_ids=ids)
    steps = [
        layer(x[:, i : i + 2], mask=causal(), position_ids=ids[..., i : i + 2], cache=cache)
        for i in (0, 2, 4)
    ]
    torch.testing.assert_close(torch.cat(steps, 1), want, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(layer(x, mask=causal()), want, atol=1e-3)
    with pytest.raises(ValueError, match=r"position_ids is missing.*6 tokens"):
        layer(x[:, :1], mask=causal(), cache=cache)
    parts = [x[0, :3], x[1]]
    at = torch.nested.nested_tensor([ids[:, 0, :3].T, ids[:, 1].T], layout=torch.jagged)
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    got = layer(nested, mask=causal(), position_ids=at).unbind()
    torch.testing.assert_close(got[1], want[1], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(got[0], want[0, :3], atol=1e-5, rtol=1e-4)


def test_first_call_with_padding_counts_along_all_axes() -> None:
    layer = MultiHeadAttention(16, 2, positions=Rotary(8, scaling=MROPE))
    plain = MultiHeadAttention(16, 2, positions=Rotary(8))
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(3, 5, 16)
    valid = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 1, 1, 1, 1]]).bool()
    ours, theirs = (m(x, mask=causal(), valid=valid, cache=Cache()) for m in (layer, plain))
    torch.testing.assert_close(ours, theirs)


def test_nested_sequences_have_three_positions_a_token() -> None:
    layer = MultiHeadAttention(16, 2, positions=Rotary(8, scaling=MROPE))
    parts = [torch.randn(n, 16) for n in (3, 1, 5)]
    at = [image_ids(1, n, start=n)[:, 0] for n in (3, 1, 5)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged)
    ids = torch.nested.nested_tensor([p.T.contiguous() for p in at], layout=torch.jagged)
    got = layer(x, mask=causal(), position_ids=ids)
    for one, part, three in zip(got.unbind(), parts, at):
        want = layer(part[None], mask=causal(), position_ids=three)
        torch.testing.assert_close(one, want[0])
    text = torch.nested.nested_tensor([p[0].contiguous() for p in at], layout=torch.jagged)
    want = layer(parts[2][None], position_ids=at[2][0])
    torch.testing.assert_close(layer(x, position_ids=text).unbind()[2], want[0])


# compiled, exported, mapped


@pytest.mark.parametrize("kind", KINDS)
def test_compiles_as_one_graph_and_exports(kind: str) -> None:
    torch._dynamo.reset()
    rotary = Rotary(8, scaling=KINDS[kind])
    compiled = torch.compile(rotary, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 3, 5, 8)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for start in (0, 20, 3):
            ids = image_ids(2, 5, start) if rotary.num_axes == 3 else torch.arange(start, start + 5)
            torch.testing.assert_close(compiled(x, ids), rotary(x, ids))
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    place = {rotary.num_axes // 2: batch, rotary.num_axes // 2 + 1: length}
    ids = image_ids(2, 5) if rotary.num_axes == 3 else torch.arange(10).view(2, 5)
    program = torch.export.export(
        rotary, (x, ids), dynamic_shapes=({0: batch, 2: length}, place)
    )  # fmt: skip
    x, ids = torch.randn(4, 3, 9, 8), image_ids(4, 9, start=9)
    ids = ids if rotary.num_axes == 3 else ids[0]
    torch.testing.assert_close(program.module()(x, ids), rotary(x, ids))


@pytest.mark.parametrize("kind", KINDS)
def test_maps_and_half_types(kind: str) -> None:
    rotary = Rotary(8, scaling=KINDS[kind])
    x, starts = torch.randn(2, 2, 1, 5, 8), (0, 14)
    if rotary.num_axes == 3:
        ids = torch.stack([image_ids(1, 5, start) for start in starts])
    else:
        ids = torch.stack([torch.arange(start, start + 5) for start in starts])
    want = torch.stack([rotary(a, p) for a, p in zip(x, ids)])
    torch.testing.assert_close(torch.vmap(rotary)(x, ids), want)
    low = rotary.to(torch.bfloat16)(x[0].bfloat16(), ids[0])
    assert torch.equal(low, rotary(x[0].bfloat16().float(), ids[0]).bfloat16())


def test_says_what_it_is() -> None:
    rotary = Rotary(8, scaling=MROPE)
    shown = "scaling={'rope_type': 'default', 'mrope_section': [2, 1, 1]}"
    assert repr(rotary) == f"Rotary(head_dim=8, theta=10000.0, {shown})"
    assert "'short_factor': '4 numbers'" in repr(Rotary(8, scaling=LONG))
    assert "'partial_rotary_factor': 0.5" in repr(Rotary(8, scaling=PROPORTIONAL))


@pytest.mark.parametrize(
    "change",
    [
        {"short_factor": [1.0, 2.0, 1.2, 1.5]}, {"factor": 8.0}, {"attention_factor": 2.0},
        {"original_max_position_embeddings": 5}, {"rope_theta": 500.0},
    ],
)  # fmt: skip
def test_every_key_of_longrope_changes_the_result(change: dict[str, Any]) -> None:
    x = torch.randn(1, 1, 8, 8)
    before = Rotary(8, scaling=LONG)(x)
    assert not torch.allclose(Rotary(8, scaling=LONG | change)(x), before, atol=1e-3)
    assert torch.equal(Rotary(8, scaling=LONG | {"rope_type": "su"})(x), before)


# bad input

ROTARY, X3 = Rotary(8, scaling=MROPE), torch.randn(3, 2, 5, 8)
LAYER = MultiHeadAttention(16, 2, positions=ROTARY)


def jagged(*parts: Tensor) -> Tensor:
    return torch.nested.nested_tensor(list(parts), layout=torch.jagged)


def scaled(base: dict[str, Any], **change: Any) -> Any:
    return lambda: Rotary(8, scaling=base | change)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (scaled(MROPE, mrope_section=[2, 1, 2]), ValueError, ["[2, 1, 2] sums to 5", "rotary_dim/2=4"]),
        (scaled(MROPE, mrope_section=[2, 2]), ValueError, ["mrope_section']=[2, 2]", "three integers"]),
        (scaled(MROPE, mrope_section=[5, 1, -2]), ValueError, ["mrope_section'][2]=-2"]),
        (scaled(MROPE, mrope_section=[2.0, 1, 1]), TypeError, ["mrope_section'][0]=2.0", "integer"]),
        (scaled(MROPE, mrope_section=4), TypeError, ["mrope_section']=4", "a list"]),
        (scaled(MROPE, mrope_section=None), ValueError, ["lacks 'mrope_section'", "Qwen2-VL"]),
        (scaled(INTERLEAVED, mrope_section=None), ValueError, ["mrope_interleaved=True without"]),
        (scaled(INTERLEAVED, mrope_interleaved=1), TypeError, ["mrope_interleaved']=1", "True or False"]),
        (scaled(INTERLEAVED, mrope_section=[0, 2, 2]), ValueError, ["every third of 4", "a third"]),
        (scaled(LONG, short_factor=[1.0, 2.0]), ValueError, ["short_factor'] has 2 numbers", "/2=4"]),
        (scaled(LONG, long_factor=[1.0] * 5), ValueError, ["long_factor'] has 5 numbers", "/2=4"]),
        (scaled(LONG, long_factor=[1.0, math.nan, 1.0, 1.0]), ValueError, ["long_factor'][1]=nan"]),
        (scaled(LONG, long_factor=[1.0, 0, 1.0, 1.0]), ValueError, ["long_factor'][1]=0", "positive"]),
        (scaled(LONG, short_factor=["1", 2, 3, 4]), TypeError, ["short_factor'][0]='1'", "number"]),
        (scaled(LONG, short_factor=2.0), TypeError, ["short_factor']=2.0", "one for each pair"]),
        (scaled(LONG, factor=None), ValueError, ["lacks 'factor'", "max_position_embeddings divided"]),
        (scaled(LONG, short_mscale=1.0), ValueError, ["'short_mscale'", "doesn't use"]),
        (scaled(LONG, original_max_position_embeddings=1), ValueError, ["=1: must be at least 2"]),
        (scaled(PROPORTIONAL, partial_rotary_factor=0.2), ValueError, ["factor']=0.2", "none of the 4"]),
        (lambda: Rotary(8, rotary_dim=4, scaling=PROPORTIONAL), ValueError, ["rotary_dim=4", "leave"]),
        (
            lambda: Rotary(8, scaling={"full_attention": LONG, "sliding_attention": None}),
            ValueError, ["each type of layer, 'full_attention'", "scaling['full_attention']"],
        ),
        (lambda: ROTARY(X3, torch.zeros(3, 5).long()), ValueError, ["positions[3, 5]", "batch of 3", "[:, None]"]),
        (lambda: ROTARY(X3, torch.zeros(2, 3, 5).long()), ValueError, ["positions[2, 3, 5]", "[3, B, L]"]),
        (lambda: ROTARY(X3, torch.zeros(3, 2, 5).long()), ValueError, ["positions[3, 2, 5]", "B=3"]),
        (lambda: ROTARY(X3, torch.zeros(3, 3, 4).long()), ValueError, ["positions[3, 3, 4]", "L=5"]),
        (lambda: ROTARY(X3, torch.zeros(4, 5).long()), ValueError, ["positions[4, 5]", "B=3"]),
        (lambda: ROTARY.cos_sin(torch.zeros(2, 5).long()), ValueError, ["positions[2, 5]", "expand(3"]),
        (lambda: ROTARY(X3, torch.zeros(3, 3, 5)), TypeError, ["float32", "positions.long()"]),
        (
            lambda: Rotary(8)(X3, torch.zeros(3, 3, 5).long()),
            ValueError, ["positions[3, 3, 5]", "mrope_section"],
        ),
        (
            lambda: MultiHeadAttention(16, 2, positions=ALiBi(2))(
                torch.randn(2, 5, 16), position_ids=image_ids(2, 5)
            ),
            ValueError, ["position_ids[3, 2, 5]", "[L] or [B, L]", "mrope_section"],
        ),
        (
            lambda: LAYER(torch.randn(2, 5, 16), position_ids=image_ids(2, 4)),
            ValueError, ["position_ids[3, 2, 4]", "L=5"],
        ),
        (
            lambda: LAYER(jagged(torch.randn(3, 16)), position_ids=jagged(torch.zeros(3, 2).long())),
            ValueError, ["position_ids is given", "2 positions a token", "[B, j, 3]"],
        ),
        (
            lambda: LAYER(torch.randn(3, 5, 16), position_ids=image_ids(1, 5)[:, 0]),
            ValueError, ["position_ids[3, 5]", "batch of 3"],
        ),
    ],
)  # fmt: skip
def test_words_of_errors(call: Any, error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error, match=".*".join(map(re.escape, words))):
        call()
