"""The checks of the constructor of `MultiHeadAttention`, alone; its messages are tested with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from multihead.errors import MultiheadError
from multihead.layers.attention import MultiHeadAttention
from multihead.layers.cache import Cache
from multihead.layers.options import (
    check_options,
    check_position_encoding,
    check_sizes,
    to_clip,
    to_scale,
)
from multihead.layers.position_bias import ALiBi
from multihead.layers.rotary import Rotary


def test_sizes_have_defaults() -> None:
    sizes = dict(embed_dim=24, num_heads=4, num_kv_heads=None, head_dim=None, kdim=None)
    assert check_sizes(**sizes) == (4, 6)
    assert check_sizes(**{**sizes, "num_kv_heads": 2, "head_dim": 5}) == (2, 5)
    for wrong in ({"num_kv_heads": 3}, {"num_heads": 5}, {"kdim": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            check_sizes(**{**sizes, **wrong})


def test_options_and_positions() -> None:
    check_options("rms", "head")
    check_position_encoding(Rotary(6), 4, 6)
    check_position_encoding(ALiBi(4), 4, 6)
    with pytest.raises(ValueError, match="gate='none'"):
        check_options(None, "none")
    with pytest.raises(ValueError, match="width 6"):
        check_position_encoding(Rotary(6), 4, 8)
    with pytest.raises(TypeError, match="expected a module such as"):
        check_position_encoding([0, 1], 4, 8)


def test_layers_share_cosines_and_sines() -> None:
    rotary, ids = Rotary(8, rotary_dim=4), torch.tensor([[3, 1, 4], [1, 5, 9]])
    layer, x = MultiHeadAttention(16, 2, positions=rotary), torch.randn(2, 3, 16)
    shared = rotary.cos_sin(ids)
    torch.testing.assert_close(layer(x, cos_sin=shared), layer(x, position_ids=ids))
    one, two = Cache(), Cache()
    for i in range(3):
        step = x[:, i : i + 1]
        got = layer(step, cos_sin=tuple(t[:, i : i + 1] for t in shared), cache=one)
        torch.testing.assert_close(got, layer(step, position_ids=ids[:, i : i + 1], cache=two))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda f, x, t: f(x, cos_sin=t, position_ids=[0, 1, 2]), MultiheadError, "give one of"),
        (lambda f, x, t: f(x, x.clone(), cos_sin=t), MultiheadError, "with a separate key="),
        (lambda f, x, t: f(x, cos_sin=t[0]), TypeError, "expected two tensors"),
        (
            lambda f, x, t: f(x, cos_sin=(t[0].repeat(1, 2), t[1].repeat(1, 2))),
            MultiheadError,
            r"cosines\[3, 8\]: expected \[L, 4\]",
        ),
        (lambda f, x, t: f(x[:, :2], cos_sin=t), MultiheadError, r"cos\[3, 4\].*L=2"),
        (
            lambda f, x, t: MultiHeadAttention(16, 2, positions=ALiBi(2))(x, cos_sin=t),
            MultiheadError,
            "whose positions= is a Rotary",
        ),
        (
            lambda f, x, t: f(torch.nested.nested_tensor([x[0]], layout=torch.jagged), cos_sin=t),
            MultiheadError,
            "cos_sin",
        ),
        (lambda f, x, t: f.positions(x[:, None, :, :8], [0], cos_sin=t), MultiheadError, "one of"),
    ],
)
def test_words_about_cosines_and_sines(call: Any, error: type[Exception], words: str) -> None:
    layer = MultiHeadAttention(16, 2, positions=Rotary(8))
    with pytest.raises(error, match=words):
        call(layer, torch.randn(2, 3, 16), Rotary(8).cos_sin([0, 1, 2]))


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf"), "1", True, None])
def test_numbers(wrong: object) -> None:
    for name, check in (("scale", to_scale), ("clip_qkv", to_clip)):
        with pytest.raises((ValueError, TypeError), match=f"{name}="):
            check(wrong)
    with pytest.raises(ValueError, match=r"out_dropout=1\.0"):
        MultiHeadAttention(8, 2, out_dropout=1.0)


@pytest.mark.parametrize("more", [{}, {"bias_kv": True, "softcap": 2.0}])
def test_scale_multiplies_the_scores(more: dict[str, Any]) -> None:
    x = torch.randn(2, 5, 12)
    layer = MultiHeadAttention(12, 2, scale=0.7, **more)
    plain = MultiHeadAttention(12, 2, **more)
    plain.load_state_dict(layer.state_dict())
    with torch.no_grad():
        for parameter in plain.q_proj.parameters():
            parameter.mul_(0.7 * 6**0.5)
    torch.testing.assert_close(layer(x), plain(x), atol=1e-5, rtol=1e-5)
    assert "scale=0.7" in repr(layer) and "scale" not in repr(plain)


def test_clip_qkv_limits_queries_keys_and_values() -> None:
    layer = MultiHeadAttention(12, 2, clip_qkv=0.2, qk_norm="rms_all")
    x = torch.randn(2, 5, 12)
    plain = [layer.q_norm(layer.q_proj(x)), layer.k_norm(layer.k_proj(x)), layer.v_proj(x)]
    heads = [y.clamp(-0.2, 0.2).unflatten(-1, (2, 6)).transpose(1, 2) for y in plain]
    out = torch.nn.functional.scaled_dot_product_attention(*heads)
    want = layer.out_proj(out.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), want, atol=1e-5, rtol=1e-5)


def test_out_dropout_drops_outputs_in_training_alone() -> None:
    layer, x = MultiHeadAttention(12, 2, out_dropout=0.5), torch.randn(4, 9, 12)
    kept = layer(x)
    share = (kept == 0).float().mean()
    assert 0.3 < share < 0.7
    whole = layer.eval()(x)
    torch.testing.assert_close(kept, torch.where(kept == 0, kept, 2 * whole), atol=1e-5, rtol=1e-5)
