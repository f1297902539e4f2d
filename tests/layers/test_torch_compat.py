"""The layer against `nn.MultiheadAttention`, over all of its options: outputs, weights, gradients,
and there and back.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from multihead import MultiHeadAttention
from multihead.layers import Rotary, from_torch, to_torch
from multihead.masks import from_torch_mask

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-11}


@st.composite
def problems(draw: Any) -> Any:
    """A torch layer, its inputs in its own order, and its masks."""
    heads, width = draw(st.sampled_from([(1, 5), (2, 12), (3, 12)]))
    sizes = {"kdim": draw(st.sampled_from([None, 7])), "vdim": draw(st.sampled_from([None, 9]))}
    options = {
        name: draw(st.booleans())
        for name in ("bias", "add_bias_kv", "add_zero_attn", "batch_first")
    }
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    seed = draw(st.integers(0, 2**31))
    torch.manual_seed(seed)
    layer = nn.MultiheadAttention(width, heads, **options, **sizes, dtype=dtype).train(
        draw(st.booleans())
    )
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    batch, length, keys = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 7))
    shapes = ((length, width), (keys, sizes["kdim"] or width), (keys, sizes["vdim"] or width))
    inputs = [torch.randn(batch, *shape, dtype=dtype) for shape in shapes]
    attn_shape = draw(st.sampled_from([None, (length, keys), (batch * heads, length, keys)]))
    key_shape = draw(st.sampled_from([None, (batch, keys)]))
    as_float = draw(st.booleans())

    def mask(shape: Any) -> Tensor | None:
        if shape is None:
            return None
        off = (torch.rand(shape) > 0.6).index_fill(
            -1, torch.tensor(0), False
        )  # torch gives NaN to a row without a key
        return torch.randn(shape, dtype=dtype).masked_fill(off, -torch.inf) if as_float else off

    return layer, inputs, mask(attn_shape), mask(key_shape)


def run_torch(
    layer: nn.MultiheadAttention, inputs: list[Tensor], attn: Any, key: Any, weights: bool
) -> Any:
    order = (lambda x: x) if layer.batch_first else (lambda x: x.transpose(0, 1))
    out, w = layer(
        *map(order, inputs),
        attn_mask=attn,
        key_padding_mask=key,
        need_weights=weights,
        average_attn_weights=False,
    )
    return order(out), w


@given(problem=problems(), weights=st.booleans())
@settings(max_examples=120)
def test_equals_torchs_layer(problem: Any, weights: bool) -> None:
    theirs, inputs, attn, key = problem
    ours = from_torch(theirs)
    assert ours.training == theirs.training
    tolerance = TOLERANCE[inputs[0].dtype]
    mask, bias = from_torch_mask(attn, key, num_heads=theirs.num_heads)
    a = [x.clone().requires_grad_() for x in inputs]
    b = [x.clone().requires_grad_() for x in inputs]
    want, want_weights = run_torch(theirs, a, attn, key, weights)
    got, got_weights = ours(*b, mask=mask, attn_bias=bias, return_weights=True)
    assert torch.allclose(got, want, atol=tolerance)
    assert torch.allclose(ours(*inputs, mask=mask, attn_bias=bias), want, atol=tolerance)
    loss_a, loss_b = want.square().sum(), got.square().sum()
    if weights:
        keys = inputs[1].shape[1]  # torch's further columns are those of bias_kv and zero_attn
        assert torch.allclose(got_weights, want_weights[..., :keys], atol=tolerance)
        loss_a, loss_b = (
            loss_a + want_weights[..., :keys].square().sum(),
            loss_b + got_weights.square().sum(),
        )
    grads = [
        torch.autograd.grad(loss, x, retain_graph=True) for loss, x in ((loss_a, a), (loss_b, b))
    ]
    assert all(
        torch.allclose(x, y, atol=30 * tolerance * max(1.0, float(y.abs().max())))
        for x, y in zip(*grads)
    )
    out_grads = [
        torch.autograd.grad(loss, layer.out_proj.weight)[0]
        for loss, layer in ((loss_a, theirs), (loss_b, ours))
    ]
    assert torch.allclose(*out_grads, atol=30 * tolerance)

    back = to_torch(ours)
    assert torch.allclose(run_torch(back, inputs, attn, key, False)[0], want, atol=tolerance)
    for name, value in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[name], value), name


@given(
    heads=st.sampled_from([(4, 1), (4, 2), (6, 3)]),
    bias=st.booleans(),
    out_bias=st.booleans(),
    bias_kv=st.booleans(),
)
def test_shared_heads_are_repeated(
    heads: tuple[int, int], bias: bool, out_bias: bool, bias_kv: bool
) -> None:
    ours = MultiHeadAttention(
        24, heads[0], num_kv_heads=heads[1], bias=bias, out_bias=out_bias, bias_kv=bias_kv
    )
    x = torch.randn(2, 5, 24)
    assert torch.allclose(to_torch(ours)(x, x, x)[0], ours(x), atol=1e-5)


def test_what_is_no_weight_comes_over_too() -> None:
    theirs = nn.MultiheadAttention(8, 2, dropout=0.3, add_zero_attn=True).eval()
    nn.utils.parametrizations.weight_norm(theirs.out_proj)
    ours = from_torch(theirs)
    assert ours.dropout == 0.3 and not ours.training and not ours.sinks.requires_grad
    x = torch.randn(3, 1, 8)
    assert torch.allclose(ours(x.transpose(0, 1))[0], theirs(x, x, x)[0][:, 0], atol=1e-6)
    assert (
        to_torch(ours).training is False
        and to_torch(ours.train()).dropout == 0.3
        and to_torch(ours).training
    )


def test_weights_are_copies() -> None:
    theirs = nn.MultiheadAttention(8, 2)
    ours = from_torch(theirs)
    back = to_torch(ours)
    with torch.no_grad():
        ours.q_proj.weight.zero_()
    assert theirs.in_proj_weight[:8].any() and back.in_proj_weight[:8].any()


def test_torch_has_nan_where_a_row_reads_nothing_and_this_layer_zeros() -> None:
    theirs = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 3, 8)
    padded = torch.tensor([[False, False, True], [True, True, True]])
    assert theirs(x, x, x, key_padding_mask=padded)[0][1].isnan().all()
    mask, _ = from_torch_mask(key_padding_mask=padded)
    out, weights = from_torch(theirs)(x, mask=mask, return_weights=True)
    assert not weights[1].any() and torch.allclose(out[1], theirs.out_proj.bias.expand(3, 8))
    assert torch.allclose(out[0], theirs(x, x, x, key_padding_mask=padded)[0][0], atol=1e-6)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: from_torch(nn.Linear(2, 2)), TypeError, ["Linear", "nn.MultiheadAttention"]),
        (
            lambda: from_torch(torch.ao.nn.quantizable.MultiheadAttention(4, 2)),
            TypeError,
            ["torch's own forward"],
        ),
        (
            lambda: to_torch(MultiHeadAttention(8, 2, head_dim=3)),
            ValueError,
            ["head_dim=3", "embed_dim / num_heads = 4"],
        ),
        (
            lambda: to_torch(MultiHeadAttention(8, 2, out_dim=3)),
            ValueError,
            ["out_dim=3", "embed_dim=8"],
        ),
        (
            lambda: to_torch(
                MultiHeadAttention(
                    8, 2, positions=Rotary(4), softcap=2.0, gate="head", qk_norm="rms"
                )
            ),
            ValueError,
            ["positions", "softcap", "gate", "qk_norm"],
        ),
    ],
)
def test_words(make: Any, error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        make()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_learned_sinks_have_no_place_there() -> None:
    ours = MultiHeadAttention(8, 2, sinks=True)
    with torch.no_grad():
        ours.sinks.fill_(0.5)
    with pytest.raises(ValueError, match="sinks that aren't 0"):
        to_torch(ours)
