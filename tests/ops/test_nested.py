"""Nested (jagged) inputs of the operator: each sequence as alone; what has no meaning is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from multihead import attention
from multihead.masks import IntervalMask, causal, documents, padding, prefix, window
from multihead.ops import AlibiBias, backend_for
from multihead.ops.backends import jit
from multihead.ops.nested import is_nested, unpack

QUERIES, KEYS = [3, 1, 6], [4, 2, 7]
BACKENDS = ("auto", "torch", "reference", *(() if jit.MISSING else ("cpu",)))


def nested(lengths: list[int], heads: int, width: int, like: Tensor | None = None) -> Tensor:
    """`[B, j, heads, width]`, a leaf."""
    packed = torch.randn(sum(lengths), heads, width)
    offsets = torch.tensor([0, *lengths]).cumsum(0) if like is None else like.offsets()
    return torch.nested.nested_tensor_from_jagged(packed, offsets=offsets).requires_grad_()


def qkv(queries: list[int] = QUERIES, keys: list[int] = KEYS, groups: int = 2) -> list[Tensor]:
    torch.manual_seed(0)
    q, k = nested(queries, 4, 8), nested(keys, groups, 8)
    return [q, k, nested(keys, groups, 6, like=k)]


def heads_first(inputs: list[Tensor]) -> list[Tensor]:
    return [x.transpose(1, 2) for x in inputs]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": causal()},
    "after": {"mask": causal(1)},
    "window": {"mask": causal() & window(1)},
    "prefix": {"mask": prefix(2)},
    "lengths": {"mask": padding([2, 1, 7])},
    "prefixes": {"mask": prefix([1, 2, 3])},
    "documents": {"mask": documents([0, 0, 1, 1, 1, 2, 2])},
    "softcap": {"softcap": 1.5, "mask": causal()},
    "sinks": {"sinks": torch.tensor([0.0, 1.0, -1.0, 2.0])},
    "scale": {"scale": 0.1},
    "alibi": {"bias": AlibiBias(torch.tensor([1.0, 0.5, 0.25, 0.1]), range(6), range(7))},
}


def of_one(options: dict[str, Any], b: int, length: int, keys: int) -> dict[str, Any]:
    """The options of sequence b alone."""
    found = dict(options)
    if isinstance(found.get("mask"), IntervalMask):
        dense = found["mask"].dense(6, 7)
        found["mask"] = dense[b if len(dense) > 1 else 0, :, :length, :keys]
    if "bias" in found:
        found["bias"] = found["bias"].dense()[..., :length, :keys]
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_each_sequence_as_alone(name: str, backend: str) -> None:
    options, inputs = OPTIONS[name], qkv()
    inputs = [x.detach() for x in inputs] if backend == "reference" else inputs
    out, lse = attention(*heads_first(inputs), **options, return_lse=True, backend=backend)
    alone = attention(*heads_first(inputs), **options, backend=backend)
    assert out.is_nested and out.layout == torch.jagged
    assert torch.allclose(out.transpose(1, 2).values(), alone.transpose(1, 2).values(), atol=1e-5)
    assert out.shape[:2] == (3, 4) and out.shape[3] == 6
    assert out.shape[2] == inputs[0].shape[1]  # the same ragged axis as q, so that they add
    total = 0.0
    for b, (q, k, v) in enumerate(zip(*(x.unbind() for x in inputs))):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        here = of_one(options, b, q.shape[2], k.shape[2])
        want, want_lse = attention(q, k, v, **here, return_lse=True, backend="torch")
        assert torch.allclose(out.unbind()[b], want[0], atol=1e-5)
        assert torch.allclose(lse.unbind()[b], want_lse[0], atol=1e-5)
        total = total + want.square().sum()
    if backend == "reference":
        return
    want = torch.autograd.grad(total, inputs)
    got = torch.autograd.grad(out.values().square().sum(), inputs)
    for a, b in zip(got, want):
        assert torch.allclose(a.values(), b.values(), atol=1e-5)


def test_empty_sequences_and_gaps() -> None:
    inputs = heads_first(qkv([0, 3, 0], [2, 3, 0]))
    out = attention(*inputs, causal())
    assert [x.shape for x in out.unbind()] == [(4, 0, 6), (4, 3, 6), (4, 0, 6)]
    none = heads_first(qkv([2], [0]))
    assert not attention(*none).values().any()
    x = torch.randn(3, 6, 4, 8)
    starts, lengths = torch.tensor([0, 1, 2]), torch.tensor([2, 3, 4])
    gaps = torch.nested.narrow(x, 1, starts, lengths, layout=torch.jagged).transpose(1, 2)
    out = attention(gaps, gaps, gaps, causal())
    for b, one in enumerate(out.unbind()):
        part = x[b, starts[b] : starts[b] + lengths[b]].transpose(0, 1)[None]
        assert torch.allclose(one, attention(part, part, part, causal())[0], atol=1e-5)
    assert (gaps + out).shape == gaps.shape  # the same ragged axis
    split = [x[b, starts[b] : starts[b] + lengths[b]] for b in range(3)]
    other = torch.nested.nested_tensor(split, layout=torch.jagged).transpose(1, 2)
    for mask in (causal(1), prefix(2), documents([0, 0, 1, 1])):
        want = attention(other, other, other, mask)
        for three in ((gaps, gaps, other), (gaps, other, gaps), (other, gaps, gaps)):
            for got, one in zip(attention(*three, mask).unbind(), want.unbind()):
                assert torch.allclose(got, one, atol=1e-5)
    slopes = AlibiBias(torch.tensor([1.0, 0.5, 0.25, 0.1]), range(4), range(4))
    want = attention(other, other, other, bias=slopes)
    for got, one in zip(attention(gaps, gaps, other, bias=slopes).unbind(), want.unbind()):
        assert torch.allclose(got, one, atol=1e-5)


def test_as_torch_computes_them() -> None:
    inputs = heads_first(qkv(KEYS, KEYS, groups=4))
    v = inputs[1]
    want = torch.nn.functional.scaled_dot_product_attention(inputs[0], inputs[1], v)
    got = attention(inputs[0], inputs[1], v)
    assert torch.allclose(got.values(), want.values(), atol=1e-5)


DENSE = torch.randn(3, 2, 4, 8)
STRIDED = torch.nested.nested_tensor([torch.randn(2, n, 8) for n in (3, 5)])


def with_inputs(**options: Any) -> Callable[[], Any]:
    return lambda: attention(*heads_first(qkv()), **options)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "weights": (with_inputs(return_weights=True), "return_weights=True is given with nested"),
    "dense mask": (with_inputs(mask=torch.ones(6, 7).bool()), r"mask is given.*causal\(\)"),
    "dense bias": (with_inputs(bias=torch.zeros(6, 7)), r"bias is given.*AlibiBias"),
    "masks of another batch": (with_inputs(mask=padding([1, 2])), "batch of 2.*3 sequences"),
    "positions of fewer": (
        with_inputs(bias=AlibiBias(torch.ones(4), range(2), range(7))),
        r"query_positions\[1, 2\].*up to 6 tokens",
    ),
    "dense keys": (
        lambda: attention(heads_first(qkv())[0], DENSE, DENSE),
        r"k\[3, 2, 4, 8\] isn't nested",
    ),
    "dense queries": (lambda: attention(DENSE, *heads_first(qkv())[1:]), "q.* isn't nested"),
    "heads last": (lambda: attention(*qkv()), r"q is nested with shape \[3, j, 4, 8\].*transpose"),
    "strided": (lambda: attention(STRIDED, STRIDED, STRIDED), "strided layout.*as_nested_tensor"),
    "other lengths": (
        lambda: attention(*heads_first(qkv())[:2], heads_first(qkv(keys=[7, 2, 4]))[2]),
        r"lengths \[\[3, 1, 6\], \[4, 2, 7\], \[7, 2, 4\]\]",
    ),
    "two axes": (lambda: attention(*(x.flatten(2) for x in qkv())), r"expected \[B, H, j, E\]"),
    "choice": (lambda: backend_for(*heads_first(qkv())), "q is a nested tensor.*pad it"),
    "strided mask": (lambda: attention(DENSE, DENSE, DENSE, STRIDED), "mask is a nested tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_meaning_is_named(name: str) -> None:
    call, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        call()


def test_a_nested_mask_of_dense_inputs_is_named() -> None:
    with pytest.raises(TypeError, match=r"mask is of the layout torch\.jagged.*convert it"):
        attention(DENSE, DENSE, DENSE, qkv()[0])


def test_the_parts_alone() -> None:
    values, sequences = unpack("x", qkv()[0], 1, "[B, j, H, E]")
    assert values.shape == (10, 4, 8) and sequences.longest == 6
    assert sequences.number.tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 2, 2]
    assert sequences.position.tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4, 5]
    assert is_nested(None, STRIDED) and not is_nested(DENSE, None, [1])
