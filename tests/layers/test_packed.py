"""Nested inputs of layers and blocks: each sequence as alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from multihead import Cache, MultiHeadAttention, TransformerBlock
from multihead.layers.position_bias import ALiBi, RelativeBias, T5Bias
from multihead.layers.rotary import Rotary
from multihead.masks import causal, prefix, window

LENGTHS, MEMORY = [3, 1, 5], [2, 4, 3]


def nested(lengths: list[int] = LENGTHS, width: int = 12) -> Tensor:
    parts = [torch.randn(n, width) for n in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)


def same(x: Tensor, want: list[Tensor]) -> bool:
    assert x.is_nested and x.layout == torch.jagged
    return all(torch.allclose(a, b[0], atol=1e-5) for a, b in zip(x.unbind(), want))


POSITIONS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "rotary": lambda: Rotary(6),
    "alibi": lambda: ALiBi(2),
    "t5": lambda: T5Bias(2),
    "relative": lambda: RelativeBias(2, 3),
}
MASKS = {
    "all": None,
    "causal": causal(),
    "window": causal() & window(1),
    "prefix": prefix(2),
    "prefixes": prefix([1, 2, 4]),
}


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("mask", [name for name in MASKS if name != "prefixes"])
@pytest.mark.parametrize("options", [{}, {"bias_kv": True, "sinks": True, "gate": "head"}])
def test_layers_and_blocks(positions: str, mask: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(
        12, 2, num_kv_heads=1, positions=POSITIONS[positions](), qk_norm="rms", **options
    )
    block = TransformerBlock(12, 2, hidden_dim=16, positions=POSITIONS[positions]())
    x = nested()
    for module in (layer, block):
        want = [module(part[None], mask=MASKS[mask]) for part in x.unbind()]
        got = module(x, mask=MASKS[mask])
        assert same(got, want)
        parameters = [x, *module.parameters()]
        for a, b in zip(
            torch.autograd.grad(got.values().square().sum(), parameters),
            torch.autograd.grad(sum(y.square().sum() for y in want), parameters),
        ):
            a, b = (y.values() if y.is_nested else y for y in (a, b))
            assert torch.allclose(a, b, atol=1e-4)


def test_masks_by_sequence_and_given_positions() -> None:
    layer = MultiHeadAttention(12, 2, positions=Rotary(6))
    x, n = nested(), [1, 2, 4]
    want = [layer(part[None], mask=prefix(k)) for part, k in zip(x.unbind(), n)]
    assert same(layer(x, x, x, mask=MASKS["prefixes"]), want)
    at = [torch.arange(k) * 2 + 1 for k in LENGTHS]
    ids = torch.nested.nested_tensor(at, layout=torch.jagged)
    want = [layer(part[None], position_ids=p) for part, p in zip(x.unbind(), at)]
    assert same(layer(x, position_ids=ids), want)


def test_cross_attention() -> None:
    layer = MultiHeadAttention(12, 2, kdim=8, vdim=10)
    x, key = nested(), nested(MEMORY, 8)
    value = torch.nested.nested_tensor([torch.randn(n, 10) for n in MEMORY], layout=torch.jagged)
    triples = list(zip(x.unbind(), key.unbind(), value.unbind()))
    assert same(layer(x, key, value), [layer(*(t[None] for t in three)) for three in triples])
    own = MultiHeadAttention(12, 2, vdim=10)
    other = torch.nested.nested_tensor([torch.randn(n, 10) for n in LENGTHS], layout=torch.jagged)
    pairs = list(zip(x.unbind(), other.unbind()))
    assert same(own(x, None, other), [own(a[None], None, b[None]) for a, b in pairs])
    block = TransformerBlock(12, 2, hidden_dim=16, cross_attention=True, memory_dim=8)
    want = [block(a[None], b[None], mask=causal()) for a, b, _ in triples]
    assert same(block(x, key, mask=causal()), want)


@pytest.mark.parametrize("positions", POSITIONS)
def test_cross_attention_with_positions(positions: str) -> None:
    torch.manual_seed(0)
    layer = MultiHeadAttention(12, 2, kdim=8, vdim=8, positions=POSITIONS[positions]())
    x, key = nested(), nested(MEMORY, 8)
    want = [layer(a[None], b[None], mask=causal(1)) for a, b in zip(x.unbind(), key.unbind())]
    assert same(layer(x, key, mask=causal(1)), want)
    own = MultiHeadAttention(12, 2, vdim=10, positions=POSITIONS[positions]())
    value = nested(LENGTHS, 10)
    pairs = list(zip(x.unbind(), value.unbind()))
    assert same(own(x, None, value), [own(a[None], None, b[None]) for a, b in pairs])


def with_gaps(grad: bool = True) -> tuple[Tensor, Tensor]:
    """A buffer `[3, 6, 12]` and the nested tensor of 2, 0 and 4 of its rows."""
    buffer = torch.randn(3, 6, 12, requires_grad=grad)
    starts, lengths = torch.tensor([0, 3, 2]), torch.tensor([2, 0, 4])
    return buffer, torch.nested.narrow(buffer, 1, starts, lengths, layout=torch.jagged)


@pytest.mark.parametrize("kind", ["layer", "block"])
def test_what_comes_out_is_added_to_what_went_in(kind: str) -> None:
    torch.manual_seed(0)
    module: Any = MultiHeadAttention(12, 2, num_kv_heads=1, positions=Rotary(6))
    if kind == "block":
        module = TransformerBlock(12, 2, hidden_dim=16, positions=Rotary(6))
    for make in (nested, lambda: with_gaps()[1]):
        x = make()
        got = x + module(x, mask=causal())
        want = [part[None] + module(part[None], mask=causal()) for part in x.unbind()]
        assert same(got, want)
        doubled = module(module(x, mask=causal()), mask=causal())
        want = [module(module(part[None], mask=causal()), mask=causal()) for part in x.unbind()]
        assert same(doubled, want)
    buffer, x = with_gaps()
    got = torch.cat((x + module(x)).unbind())
    want = torch.cat([module(part[None])[0] + part for part in x.unbind()])
    direction = torch.randn_like(want)
    inputs = [buffer, *module.parameters()]
    for a, b in zip(*(torch.autograd.grad((y * direction).sum(), inputs) for y in (got, want))):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_what_lies_in_gaps_has_no_effect() -> None:
    layer = MultiHeadAttention(12, 2, positions=Rotary(6))
    buffer, x = with_gaps()
    with torch.no_grad():
        buffer[0, 2:], buffer[2, :2] = torch.nan, torch.inf
    out = torch.cat(layer(x).unbind())
    assert bool(out.isfinite().all())
    gradients = torch.autograd.grad(out.sum(), [buffer, *layer.parameters()])
    assert all(bool(g.isfinite().all()) for g in gradients)
    # values without gaps, and positions, are aligned with what has them
    value = nested([2, 0, 4])
    at = torch.nested.nested_tensor([torch.arange(n) + 7 for n in (2, 0, 4)], layout=torch.jagged)
    other = MultiHeadAttention(12, 2, positions=ALiBi(2))
    for module, ids in ((layer, at), (other, at), (other, None)):
        want = []
        for part, v, p in zip(x.unbind(), value.unbind(), at.unbind()):
            one, p = part[None], None if ids is None else p
            want.append(module(one, one, v[None], mask=prefix(2), position_ids=p))
        assert same(module(x, x, value, mask=prefix(2), position_ids=ids), want)


@pytest.mark.parametrize("kind", ["self", "cross", "gaps"])
def test_compiles_as_one_graph(kind: str) -> None:
    torch._dynamo.reset()
    layer = MultiHeadAttention(12, 2, positions=None if kind == "cross" else Rotary(6))

    def run(x: Tensor, key: Tensor) -> Tensor:
        if kind == "cross":
            return x + layer(x, key)
        return x + layer(x, mask=causal() & window(3))

    compiled = torch.compile(run, fullgraph=True, backend="eager", dynamic=True)
    for lengths in ([3, 1, 5],) if kind == "gaps" else ([3, 1, 5], [2, 6, 1, 1]):
        # torch can't compile gradients of tensors with gaps
        x = with_gaps(grad=False)[1] if kind == "gaps" else nested(lengths).detach()
        key = nested(lengths[::-1]).detach()
        got, want = compiled(x, key), run(x, key)
        assert same(got, [part[None] for part in want.unbind()])


X, STRIDED = nested(), torch.nested.nested_tensor([torch.randn(n, 12) for n in LENGTHS])
LAYER = MultiHeadAttention(12, 2, positions=Rotary(6))
BLOCK = TransformerBlock(12, 2, hidden_dim=16)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "cache": (lambda: LAYER(X, cache=Cache()), "cache is given with nested tensors.*valid="),
    "valid": (lambda: LAYER(X, valid=[[True]]), "valid is given.*leave it out"),
    "weights": (lambda: LAYER(X, return_weights=True), "return_weights is given"),
    "bias": (lambda: LAYER(X, attn_bias=torch.zeros(5, 5)), "attn_bias is given.*AlibiBias"),
    "mask": (lambda: LAYER(X, mask=torch.ones(5, 5).bool()), r"mask is given.*causal\(\)"),
    "positions": (lambda: LAYER(X, position_ids=[0, 1, 2]), r"position_ids is given.*\[B, j\]"),
    "lengths of values": (
        lambda: LAYER(X, X, nested(MEMORY)),
        "value is given.*other lengths than",
    ),
    "lengths of positions": (
        lambda: LAYER(X, position_ids=nested(MEMORY, 1).squeeze(-1).long()),
        "position_ids is given.*other lengths; give one for each token",
    ),
    "padded keys": (lambda: LAYER(X, torch.randn(3, 5, 12)), r"key\[3, 5, 12\] isn't nested"),
    "strided": (lambda: LAYER(STRIDED), "query is a nested tensor of the strided layout"),
    "strided block": (lambda: BLOCK(STRIDED), "x is a nested tensor of the strided layout"),
    "block cache": (lambda: BLOCK(X, cache=Cache()), "cache is given"),
    "block memory cache": (lambda: BLOCK(X, memory_cache=Cache()), "memory_cache is given"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_meaning_is_named(name: str) -> None:
    call, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        call()
