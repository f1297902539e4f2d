"""The checks of the constructor of `MultiHeadAttention`, alone; its messages are tested with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from multihead.errors import MultiheadError
from multihead.layers.attention import MultiHeadAttention
from multihead.layers.cache import Cache
from multihead.layers.options import check_options, check_position_encoding, check_sizes
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
