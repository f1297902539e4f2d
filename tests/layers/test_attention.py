"""The layer: the worked example, the sum over heads, torch's own layer, grouped heads, the words of
errors.
"""

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from multihead import attention
from multihead.layers.attention import MultiHeadAttention
from multihead.layers.cache import Cache
from multihead.layers.position_bias import ALiBi, PositionBias
from multihead.layers.rotary import Rotary
from multihead.ops import merge_heads, split_heads
from multihead.ops.masks import causal


def test_worked_example() -> None:
    """Two heads read the values 8 and 18; W_O = [[1, 1], [1, -1]] makes of them the update (26,
    -10).
    """
    layer = MultiHeadAttention(2, 2, bias=False)
    with torch.no_grad():
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj):
            projection.weight.copy_(torch.eye(2))
        layer.out_proj.weight.copy_(
            torch.tensor([[1.0, 1.0], [1.0, -1.0]]).T
        )  # Linear keeps W_O transposed
    assert layer(torch.tensor([[[8.0, 18.0]]])).tolist() == [[[26.0, -10.0]]]


def readable(
    layer: MultiHeadAttention, x: torch.Tensor, allowed: torch.Tensor | None = None
) -> torch.Tensor:
    """The definition, head by head over slices of the weights, in float64: a sum of one update a
    head.
    """
    w_q, w_k, w_v, w_o = (
        p.weight.double() for p in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)
    )
    b_q, b_k, b_v, b_o = (
        0.0 if p.bias is None else p.bias.double()
        for p in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)
    )
    x, e = x.double(), layer.head_dim
    q, k, v = x @ w_q.T + b_q, x @ w_k.T + b_k, x @ w_v.T + b_v
    y = torch.zeros_like(x) + b_o
    for h in range(layer.num_heads):
        g = h // (layer.num_heads // layer.num_kv_heads)
        q_h, k_h, v_h = (
            q[..., h * e : (h + 1) * e],
            k[..., g * e : (g + 1) * e],
            v[..., g * e : (g + 1) * e],
        )
        scores = q_h @ k_h.mT / e**0.5
        if allowed is not None:
            scores = scores.masked_fill(~allowed, float("-inf"))
        y = y + scores.softmax(-1) @ v_h @ w_o[:, h * e : (h + 1) * e].T
    return y


@given(
    heads=st.sampled_from([(1, 1), (3, 3), (6, 2), (4, 1)]),
    head_dim=st.sampled_from([1, 5, 8]),
    embed_dim=st.sampled_from([12, 24, 60]),
    length=st.integers(1, 20),
    bias=st.booleans(),
    is_causal=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_is_a_sum_of_one_update_a_head(heads, head_dim, embed_dim, length, bias, is_causal) -> None:
    layer = MultiHeadAttention(
        embed_dim, heads[0], num_kv_heads=heads[1], head_dim=head_dim, bias=bias
    )
    with torch.no_grad():
        layer.q_proj.weight.mul_(5)  # weights that are far from even
    x = torch.randn(2, length, embed_dim)
    allowed = torch.ones(length, length, dtype=torch.bool).tril() if is_causal else None
    expected = readable(layer, x, allowed)
    torch.testing.assert_close(
        layer(x, mask=causal() if is_causal else None).double(), expected, atol=1e-5, rtol=1e-5
    )


def test_equals_torchs_layer() -> None:
    theirs = nn.MultiheadAttention(60, 6, batch_first=True).eval()
    ours = MultiHeadAttention(60, 6)
    with torch.no_grad():
        theirs.in_proj_bias.normal_()
        theirs.out_proj.bias.normal_()
        parts = (ours.q_proj, ours.k_proj, ours.v_proj)
        for part, weight, bias in zip(
            parts, theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3), strict=True
        ):
            part.weight.copy_(weight)
            part.bias.copy_(bias)
        ours.out_proj.load_state_dict(theirs.out_proj.state_dict())
    query, key, value = torch.randn(2, 7, 60), torch.randn(2, 11, 60), torch.randn(2, 11, 60)
    torch.testing.assert_close(
        ours(query, key, value), theirs(query, key, value)[0], atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(ours(query, key), theirs(query, key, key)[0], atol=1e-5, rtol=1e-5)
    not_yet = torch.ones(7, 7, dtype=torch.bool).triu(1)  # torch: True where a row may not read
    expected = theirs(query, query, query, attn_mask=not_yet)[0]
    torch.testing.assert_close(ours(query, mask=causal()), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours(query, mask=~not_yet), expected, atol=1e-5, rtol=1e-5)


def test_grouped_heads_equal_repeated_heads() -> None:
    grouped = MultiHeadAttention(24, 6, num_kv_heads=2, positions=Rotary(4))
    full = MultiHeadAttention(24, 6, positions=Rotary(4))
    state = grouped.state_dict()
    for name in ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"):
        state[name] = state[name].unflatten(0, (2, 4)).repeat_interleave(3, 0).flatten(0, 1)
    full.load_state_dict(state)
    x = torch.randn(2, 9, 24)
    torch.testing.assert_close(
        grouped(x, mask=causal()), full(x, mask=causal()), atol=1e-6, rtol=1e-5
    )


def test_permuted_heads_give_the_same_sum() -> None:
    layer, permuted = MultiHeadAttention(24, 4), MultiHeadAttention(24, 4)
    rows = torch.arange(24).view(4, 6)[[2, 0, 3, 1]].flatten()
    state = layer.state_dict()
    for name in list(state):
        if not name.startswith("out_proj"):
            state[name] = state[name][rows]
    state["out_proj.weight"] = state["out_proj.weight"][:, rows]
    permuted.load_state_dict(state)
    x = torch.randn(2, 9, 24)
    torch.testing.assert_close(layer(x), permuted(x), atol=1e-6, rtol=1e-5)


def test_positions_reach_queries_and_keys() -> None:
    x = torch.randn(1, 6, 16)
    layer = MultiHeadAttention(16, 2, positions=Rotary(8))
    assert not torch.allclose(layer(x, mask=causal())[:, -1], layer(x.flip(1))[:, 0])
    layer.positions = None  # without positions the order of what is read makes no difference
    torch.testing.assert_close(layer(x)[:, -1], layer(x.flip(1))[:, 0])


def test_bias_and_dtype_are_honoured() -> None:
    assert MultiHeadAttention(16, 2, bias=False).out_proj.bias is None
    layer = MultiHeadAttention(16, 2, bias=True, out_bias=False, dtype=torch.float64)
    assert layer.v_proj.bias is not None
    assert layer.out_proj.bias is None
    assert {weight.dtype for weight in layer.parameters()} == {torch.float64}
    assert MultiHeadAttention(16, 2, device="meta").q_proj.weight.is_meta


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MultiHeadAttention(12, 4.0), ["num_heads=4.0", "integer"]),
        (lambda: MultiHeadAttention(12, 4, head_dim=True), ["head_dim=True", "integer"]),
        (
            lambda: MultiHeadAttention(12, 4, positions="rotary"),
            ["positions='rotary'", "Rotary(3)", "ALiBi(4)"],
        ),
        (
            lambda: MultiHeadAttention(12, 4)(torch.zeros(2, 3, 12), causal()),
            ["key is a IntervalMask", "mask="],
        ),
        (
            lambda: MultiHeadAttention(12, 4)(torch.zeros(2, 3, 12), cache=Cache),
            ["cache=", "Cache()"],
        ),
    ],
)
def test_words_of_wrong_types(make: Any, words: list[str]) -> None:
    with pytest.raises(TypeError) as caught:
        make()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_every_parameter_can_be_set_anew() -> None:
    layer = MultiHeadAttention(
        12, 4, sinks=True, bias_kv=True, qk_norm="rms", device="meta"
    ).to_empty(device="cpu")
    for parameter in layer.parameters():
        nn.init.constant_(parameter, torch.nan)
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert (
        all(parameter.isfinite().all() for parameter in layer.parameters())
        and layer(torch.randn(1, 3, 12)).isfinite().all()
    )


def test_queries_and_keys_have_norms_of_their_own_of_the_layers_dtype() -> None:
    layer = MultiHeadAttention(12, 4, qk_norm="layer", dtype=torch.bfloat16)
    assert layer.q_norm is not layer.k_norm and layer.q_norm.weight.dtype == torch.bfloat16
    assert layer(torch.randn(1, 3, 12, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_bias_of_the_call_joins_that_of_the_positions() -> None:
    layer, x, bias = _made(positions=ALiBi(4)), torch.randn(2, 5, 24), torch.randn(5, 5)
    at = torch.arange(5)
    both = bias + ALiBi(4)(at, at)
    layer.positions = None
    want = layer(x, attn_bias=both)
    layer.positions = ALiBi(4)
    assert torch.allclose(layer(x, attn_bias=bias), want, atol=1e-6)
    assert torch.allclose(
        layer(x, mask=bias), want, atol=1e-6
    )  # numbers given as a mask are the same


def test_dropout_reaches_the_further_key_of_bias_kv() -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(4, 1, bias_kv=True, dropout=0.5, bias=False)
    with torch.no_grad():
        layer.v_proj.weight.zero_()  # so that only the further key is read
        layer.bias_v.fill_(1.0)
    rows = layer(torch.randn(1, 400, 4), mask=torch.zeros(400, 400).bool())[
        0
    ]  # nothing else may be read
    assert 0.3 < float((rows == 0).all(-1).float().mean()) < 0.7


def _made(**options: Any) -> MultiHeadAttention:
    torch.manual_seed(0)
    made = MultiHeadAttention(24, 4, **options)
    for name, parameter in made.named_parameters():
        if name in ("sinks", "bias_k", "bias_v") or "norm" in name or parameter.ndim == 1:
            nn.init.normal_(parameter)
    return made


@pytest.mark.parametrize(
    "change",
    [
        {"num_kv_heads": 2},
        {"head_dim": 4},
        {"bias": False},
        {"out_bias": False},
        {"qk_norm": "rms"},
        {"qk_norm": "layer"},
        {"qk_norm": lambda width: nn.LayerNorm(width, elementwise_affine=False)},
        {"positions": Rotary(6)},
        {"softcap": 0.1},
        {"sinks": True},
        {"gate": "head"},
        {"gate": "elementwise"},
        {"bias_kv": True},
        {"dropout": 0.5},
    ],
    ids=lambda change: " ".join(
        f"{k}={v if isinstance(v, (int, float, str)) else type(v).__name__}"
        for k, v in change.items()
    ),
)
def test_every_argument_changes_the_output(change: dict[str, Any]) -> None:
    x = torch.randn(2, 5, 24)
    assert (_made(**change)(x) - _made()(x)).abs().max() > 1e-3


@pytest.mark.parametrize(
    "change",
    [
        {"key": torch.ones(2, 5, 24)},
        {"value": torch.ones(2, 5, 24)},
        {"mask": causal()},
        {"attn_bias": torch.eye(5)},
        {"position_ids": torch.tensor([0, 1, 2, 3, 40])},
        {"valid": torch.arange(5) < torch.tensor([[5], [3]])},
    ],
    ids=str,
)
def test_every_argument_of_a_call_changes_the_output(change: dict[str, Any]) -> None:
    layer, x = _made(positions=Rotary(6)), torch.randn(2, 5, 24)
    assert (layer(x, **change) - layer(x)).abs().max() > 1e-3


@given(
    kv_heads=st.sampled_from([1, 2, 4]),
    qk_norm=st.sampled_from([None, "rms", "layer"]),
    softcap=st.sampled_from([None, 1.0]),
    sinks=st.booleans(),
    gate=st.sampled_from([None, "head", "elementwise"]),
    bias_kv=st.booleans(),
    is_causal=st.booleans(),
)
def test_features_together_equal_a_loop_over_heads(
    kv_heads: int,
    qk_norm: str | None,
    softcap: float | None,
    sinks: bool,
    gate: str | None,
    bias_kv: bool,
    is_causal: bool,
) -> None:
    layer = _made(
        num_kv_heads=kv_heads,
        qk_norm=qk_norm,
        softcap=softcap,
        sinks=sinks,
        gate=gate,
        bias_kv=bias_kv,
    ).double()
    x = torch.randn(1, 5, 24, dtype=torch.float64)
    got, weights = layer(x, mask=causal() if is_causal else None, return_weights=True)
    update = layer.out_proj.bias.expand(5, 24).clone()
    for head in range(4):
        group, columns = head // (4 // kv_heads), slice(6 * head, 6 * head + 6)
        q = layer.q_proj(x)[0, :, columns]
        k, v = (p(x)[0, :, 6 * group : 6 * group + 6] for p in (layer.k_proj, layer.v_proj))
        if layer.q_norm is not None:
            q, k = layer.q_norm(q), layer.k_norm(k)
        if layer.bias_k is not None:
            k, v = (
                torch.cat([k, layer.bias_k[group : group + 1]]),
                torch.cat([v, layer.bias_v[group : group + 1]]),
            )
        scores = q @ k.T / 6**0.5
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        if is_causal:
            scores[:, :5] = scores[:, :5].masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        if layer.sinks is not None:
            scores = torch.cat([scores, layer.sinks[head].expand(5, 1)], 1)
        read = scores.softmax(-1)[:, : len(k)]
        assert torch.allclose(weights[0, head], read[:, :5], atol=1e-12)
        out = read @ v
        if gate is not None:
            g = layer.gate_proj(x)[0].sigmoid()
            out = out * (g[:, head : head + 1] if gate == "head" else g[:, columns])
        update = update + out @ layer.out_proj.weight[:, columns].T
    assert torch.allclose(got[0], update, atol=1e-12)


def test_padding_on_either_side_is_left_out() -> None:
    layer, x = _made(positions=Rotary(6)), torch.randn(2, 6, 24)
    valid = torch.tensor(
        [[False, False, True, True, True, True], [True, True, True, False, False, False]]
    )
    for mask in (causal(), None, torch.ones(6, 6, dtype=torch.bool).tril()):
        out = layer(x, mask=mask, valid=valid)
        alone = None if mask is None else causal()
        assert torch.allclose(out[0, 2:], layer(x[:1, 2:], mask=alone)[0], atol=1e-5)
        assert torch.allclose(out[1, :3], layer(x[1:, :3], mask=alone)[0], atol=1e-5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MultiHeadAttention(10, 4), ["embed_dim=10", "num_heads=4", "head_dim"]),
        (
            lambda: MultiHeadAttention(12, 4, num_kv_heads=3),
            ["num_kv_heads=3", "num_heads=4", "divisor of 4"],
        ),
        (lambda: MultiHeadAttention(12, 4, num_kv_heads=0), ["num_kv_heads=0"]),
        (lambda: MultiHeadAttention(12, 0), ["num_heads=0", "at least 1"]),
        (lambda: MultiHeadAttention(12, 4, head_dim=-1), ["head_dim=-1", "at least 1"]),
        (lambda: MultiHeadAttention(12, 4, dropout=1.0), ["dropout=1.0", "below 1"]),
        (lambda: MultiHeadAttention(12, 4, kdim=0), ["kdim=0", "at least 1"]),
        (
            lambda: MultiHeadAttention(12, 4, qk_norm="batch"),
            ["qk_norm='batch'", "'rms'", "callable"],
        ),
        (lambda: MultiHeadAttention(12, 4, gate="row"), ["gate='row'", "'head' or 'elementwise'"]),
        (lambda: MultiHeadAttention(12, 4, softcap=0.0), ["softcap=0.0", "above 0"]),
        (lambda: MultiHeadAttention(12, 4, softcap=float("inf")), ["softcap=inf", "finite"]),
        (lambda: MultiHeadAttention(12, 4, qk_norm=True), ["qk_norm=True", "callable"]),
        (lambda: MultiHeadAttention(12, 4, positions=Rotary(4)), ["width 4", "head_dim=3"]),
        (
            lambda: MultiHeadAttention(12, 4, positions=ALiBi(8)),
            ["ALiBi", "8 heads", "num_heads=4"],
        ),
        (
            lambda: MultiHeadAttention(12, 4)(torch.zeros(2, 3, 12), position_ids=torch.arange(3)),
            ["position_ids=", "change nothing"],
        ),
        (
            lambda: MultiHeadAttention(8, 4, positions=Rotary(2))(
                torch.zeros(2, 3, 8), position_ids=torch.arange(2)
            ),
            ["position_ids[2]", "[2, 3]"],
        ),
        (
            lambda: MultiHeadAttention(12, 4)(torch.zeros(2, 3, 12), valid=torch.ones(2, 4).bool()),
            ["[2, 4]", "[2, 3]"],
        ),
        (
            lambda: MultiHeadAttention(12, 4)(torch.zeros(2, 3, 12), valid=[True]),
            ["valid is torch.bool [1]", "[2, 3]"],
        ),
        (lambda: MultiHeadAttention(12, 4)(torch.randn(2, 3, 8)), ["query[2, 3, 8]", "[B, L, 12]"]),
        (lambda: MultiHeadAttention(12, 4)(torch.randn(3, 12)), ["query[3, 12]", "batch first"]),
        (
            lambda: MultiHeadAttention(12, 4)(torch.randn(2, 3, 12), torch.randn(2, 3, 9)),
            ["key[2, 3, 9]", "[B, S, 12]"],
        ),
    ],
)
def test_words_of_errors(make: Any, words: list[str]) -> None:
    with pytest.raises(ValueError, match=".*".join(map(re.escape, words))):
        make()


class ScaledRotary(torch.nn.Module):
    """A position encoding from outside that a layer calls on queries and keys: rotary, with a
    smaller first pair.
    """

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.rotary = Rotary(head_dim)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        scale = torch.ones(x.shape[-1]).index_fill(0, torch.tensor([0, 3]), 0.5)
        return self.rotary(x, positions) * scale


class Stairs(PositionBias):
    """A position bias from outside, of distances alone."""

    def of_distance(self, distance: torch.Tensor) -> torch.Tensor:
        steps = -(distance.abs() // 2).float()
        return steps[:, None] * torch.arange(1, self.num_heads + 1).view(-1, 1, 1)


@pytest.mark.parametrize("make", [lambda: ScaledRotary(6), lambda: Stairs(4)])
def test_a_position_encoding_from_outside(make: Any) -> None:
    """It is applied as given, follows position_ids, and works with a cache."""
    torch.manual_seed(0)
    encoding, x = make(), torch.randn(2, 7, 24)
    layer = MultiHeadAttention(24, 4, positions=encoding).eval()
    q, k, v = (split_heads(p(x), 4) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    ids, bias = torch.arange(7), None
    if isinstance(encoding, PositionBias):
        bias = encoding(ids, ids)
    else:
        q, k = encoding(q, ids), encoding(k, ids)
    expected = layer.out_proj(merge_heads(attention(q, k, v, causal(), bias=bias)))
    got = layer(x, mask=causal())
    torch.testing.assert_close(got, expected)
    plain = MultiHeadAttention(24, 4).eval()
    plain.load_state_dict(layer.state_dict())
    assert not torch.allclose(plain(x, mask=causal()), got, atol=1e-3)
    moved = layer(x, mask=causal(), position_ids=ids + 5)
    torch.testing.assert_close(moved, got, rtol=1e-4, atol=1e-5)
    cache = Cache()
    with torch.no_grad():
        steps = [layer(part, mask=causal(), cache=cache) for part in x.split([3, 1, 3], 1)]
    torch.testing.assert_close(torch.cat(steps, 1), got, rtol=1e-4, atol=1e-5)
